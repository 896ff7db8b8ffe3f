"""Read the text of a compiled program: cross-slice traffic, its schedule, and FLOPs."""
