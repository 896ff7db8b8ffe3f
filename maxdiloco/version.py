"""The version of the package: of --version and a run's environment.json; setup.py has it too."""

__version__ = "0.1.0"
