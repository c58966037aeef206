"""One trial: built from its config, trained, watched, and its end turned into an outcome.

Imports from study and below, and from `trainer`. Used from above: `run` (`TrialRun`), `builder` (`Builder`: the
objects that a config names), `resources` (devices and cores), `run_length`, `forks`.
"""
