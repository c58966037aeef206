"""Checks before a run: the study file against its code, likely mistakes, a trial run on each device, the machine.

Imports from trial and below. The packages above use `checks` (all checks of a study file), `meaning`,
`preflight`, `doctor`, `json_schema` and `findings`.
"""
