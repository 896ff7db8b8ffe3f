"""What it is trained on."""
