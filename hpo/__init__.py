"""Hyperparameter optimisation for PyTorch: parallel Optuna studies over a callback-driven Trainer."""

__version__ = "0.1.0"
