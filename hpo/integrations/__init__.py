"""Callbacks with which the trainers of other libraries train a trial: Lightning and Transformers."""
