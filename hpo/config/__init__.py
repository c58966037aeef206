"""Study files: YAML or Python objects in, a checked `StudySpec` out, errors with their lines.

Imports `hpo.errors` alone. Everything above may read from here: `spec` (the study file as a whole), `space`
(its search space as Optuna's distributions), `targets` and `study_modules` (what its `_target_`s name), `code`
(the hash of that code), `paths` and `marks` (dotted paths and the lines that they came from).
"""
