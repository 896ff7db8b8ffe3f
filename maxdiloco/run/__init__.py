"""One training run: model, data, tokenizer, optimizer, state, loop and evaluation."""
