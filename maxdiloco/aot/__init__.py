"""Programs compiled ahead of time, and what their schedules say."""
