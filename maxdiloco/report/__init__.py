"""The HTML report of runs: reading their folders, its tables and panels, and the page."""
