"""Readers of text files, cut into spans that processes read independently."""
