"""Before a run: imports, meaning, a try on each device, the machine.

Imports from trial and below. Used from above: `checks` (all of a study file's checks), `meaning`, `preflight`,
`doctor`, `json_schema` and `findings`.
"""
