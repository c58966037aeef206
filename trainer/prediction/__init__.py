"""Predicts the loss of a run's last epoch from the epochs so far."""
