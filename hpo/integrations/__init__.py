"""Callbacks by which other libraries' trainers train a trial: Lightning's, and that of Transformers."""
