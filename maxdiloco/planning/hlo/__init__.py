"""Reads the text of a compiled program: what crosses slices, when, and what hides it."""
