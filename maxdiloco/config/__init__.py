"""The configuration of a run: typed keys, loading, checks, MaxText's names. It needs no JAX.

`keys.Config` has every key, `groups/` declares them, and `config.load` reads a command line.
"""
