"""What a process tells its user and the other processes of a run."""
