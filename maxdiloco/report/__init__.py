"""The HTML report of runs: read their folders, make tables and panels, and write the page."""
