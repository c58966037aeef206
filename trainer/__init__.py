"""A callback-driven PyTorch training loop that stands on its own."""
