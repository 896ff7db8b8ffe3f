"""The parts of bandwidth_model.py."""
