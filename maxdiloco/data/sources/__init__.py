"""The files that text comes in, cut into spans that processes read on their own."""
