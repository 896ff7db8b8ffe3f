"""Plans and compile reports: the mode that fits a link, by arithmetic or by compiling a run."""
