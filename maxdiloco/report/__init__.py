"""The HTML report of runs: what their folders hold, the tables and panels made of it, the page."""
