"""Runs of several processes, one for each device: which of them this one is, and what they do together."""
