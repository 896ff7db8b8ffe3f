"""Output, signals, several processes as one run, lost peers."""
