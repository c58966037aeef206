"""After the search: final training from a trial's checkpoint or over several seeds, and the export of models.

Imports from trial and below. The packages above use `training`, `seeds`, `seed_run`, `models`, `export_model`.
"""
