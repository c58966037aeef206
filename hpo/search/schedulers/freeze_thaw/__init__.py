"""Freeze-thaw search: a scheduler in which a curve model and successive halving choose which trials to resume."""
