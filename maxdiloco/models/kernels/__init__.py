"""Backend-specific implementations, and the one function that chooses them (choice.py).

A module of `models/` asks a `Kernels` for a product, for attention or for a loss reduction. It does
not know on which backend it runs.
"""
