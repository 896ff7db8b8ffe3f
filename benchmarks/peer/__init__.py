"""The parts of peer_torch.py."""
