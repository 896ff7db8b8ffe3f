"""The decoder: layers, attention kernels, loss, generation."""
