"""After the search: final training from a trial's checkpoint, over seeds too, and models to take away.

Imports from trial and below. Used from above: `training`, `seeds`, `seed_run`, `models`, `export_model`.
"""
