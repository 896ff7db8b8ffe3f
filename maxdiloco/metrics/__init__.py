"""What a run reports while it trains."""
