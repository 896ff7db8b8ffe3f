"""What a run needs of a link, and which way to synchronise fits one: arithmetic, nothing is run."""
