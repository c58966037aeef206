"""The workers of a run: started, given trials, watched, stopped, and replaced when they die.

Imports from the lines below it: checks, study, trial. Used from above: `run` (`run_study`), `messages` (what a
run says) and `supervisor` (`Ending`).
"""
