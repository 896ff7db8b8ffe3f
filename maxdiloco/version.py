"""The version of the package, for --version and a run's environment.json; setup.py repeats it."""

__version__ = "0.1.0"
