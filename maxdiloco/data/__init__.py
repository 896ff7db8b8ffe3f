"""Training data: documents, tokens, the order of sequences, and batches."""
