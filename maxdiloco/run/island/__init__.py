"""An island of a run: the trainer, its values in host memory, and its leased text."""
