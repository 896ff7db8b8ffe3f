"""The report of runs as one HTML page: what is read, what is shown, and how it is drawn."""
