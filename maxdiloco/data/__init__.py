"""The training data: documents, tokens, the order of sequences, batches."""
