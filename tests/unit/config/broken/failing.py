"""Fails when it is imported."""

raise RuntimeError("no GPU was found")
