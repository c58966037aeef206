"""Freeze-thaw search: a curve model and successive halving share one study's trials, which pause and resume."""
