"""Runs one trial: builds its objects from the config, trains and watches it, and stores its outcome.

Imports from study and below, and from `trainer`. Packages above use `run` (`TrialRun`), `trainer_code` and
`training_code` (code that trains on a `session`), `report` (`TrialReport`), `builder` (`Builder`, which makes the
objects that a config names), `resources` (devices and cores), `run_length` and `process_forks`.
"""
