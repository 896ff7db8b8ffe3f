"""The loss of parameters on held-out text: in a run, and of a stored checkpoint."""
