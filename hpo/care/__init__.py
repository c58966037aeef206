"""Mending and cleaning: trials whose workers are gone, failed trials, checkpoints that nobody needs."""
