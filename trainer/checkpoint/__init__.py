"""Checkpoints: written whole or not at all, read back without unpickling, and which of them stay."""
