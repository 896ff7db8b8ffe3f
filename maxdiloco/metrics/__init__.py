"""Metrics, tables and lines of a run while it trains."""
