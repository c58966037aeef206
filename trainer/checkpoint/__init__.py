"""Writes checkpoints atomically, reads them back without unpickling objects, and decides which are kept."""
