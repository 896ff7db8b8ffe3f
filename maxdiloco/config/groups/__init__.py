"""The keys, by group. A group is a class; its cross-key checks are methods below its keys."""
