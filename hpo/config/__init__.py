"""Study files: YAML or Python objects in, a checked `StudySpec` out, errors with their lines.

Imports only `hpo.errors`. All packages above use it: `spec` (the study file as a whole), `space`
(its search space as Optuna's distributions), `targets` and `study_modules` (the code that its `_target_`s name),
`code` (the hash of that code), `paths` and `marks` (dotted paths and the lines where they are written).
"""
