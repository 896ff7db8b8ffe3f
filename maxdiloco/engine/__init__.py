"""The algorithm bound to programs, arrays and a mesh."""
