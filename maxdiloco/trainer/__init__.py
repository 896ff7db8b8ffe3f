"""A run: assembled from a config, trained, evaluated, resumed."""
