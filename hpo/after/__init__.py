"""After the search: final training over seeds, models and trials to take away."""
