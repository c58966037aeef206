"""One trial: built from its config, trained, watched, and its end turned into an outcome.

Imports from study and below, and from `trainer`. Used from above: `run` (`TrialRun`), `trainer_code` and
`training_code` (what trains on a `session`), `report` (`TrialReport`), `builder` (`Builder`: the objects that a
config names), `resources` (devices and cores), `run_length`, `forks`.
"""
