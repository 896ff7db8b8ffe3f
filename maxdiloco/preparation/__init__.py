"""Text tokenised once, by all cores, into a folder of shards (data/shards.py)."""
