"""The algorithm: numbers and pytrees, nothing else."""
