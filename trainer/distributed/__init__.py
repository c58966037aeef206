"""Runs training in several processes, one per device: finds this process's rank, and what they do together."""
