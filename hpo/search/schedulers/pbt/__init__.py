"""Population-based training: a scheduler that forks the leaders of a population, with perturbed parameters."""
