"""Text tokenised once: a folder of shards, how it is written and how it is read."""
