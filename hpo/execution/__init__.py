"""Runs a study: starts workers, gives them trials, watches and stops them, and replaces those that die.

Imports only from lower layers (checks, study, trial, search, storage, config). The packages above use `run`
(`run_study`), `placing` (`hpo run --on`, `hpo submit`), `agent` (`hpo worker`) and `messages` (what a run says).
"""
