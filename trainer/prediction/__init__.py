"""The loss of a run's last epoch, predicted from the epochs so far."""
