"""How a mean over the replicas travels."""
