"""The configuration of a run: typed keys, loading, checks and MaxText's names, without JAX.

`keys.Config` has every key, `groups/` declares them, and `config.load` reads a command line.
"""
