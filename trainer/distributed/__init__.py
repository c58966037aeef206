"""Runs of several processes: which of them this one is."""
