"""Several processes as one run: start, messages, failure detection and signals."""
