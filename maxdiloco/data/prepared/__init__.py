"""Tokenise a source once into a folder of shards, by a program or at the first start of a run."""
