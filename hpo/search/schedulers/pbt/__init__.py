"""Population-based training: a scheduler that replaces poor trials by forks of good ones, slightly changed."""
