"""Stopping trials: the pruner that predicts, what pruning saved, and decisions run again."""
