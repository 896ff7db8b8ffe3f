"""Files that survive: folders of runs, locks, object stores."""
