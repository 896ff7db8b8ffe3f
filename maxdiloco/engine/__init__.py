"""The trainers: the algorithms of `diloco` as compiled programs on the arrays of a mesh."""
