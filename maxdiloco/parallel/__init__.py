"""Mesh, shardings, and the map over replicas."""
