"""Optuna's tables and what parallel workers add: a budget, a ledger of attempts, fenced writes, patience.

Imports `hpo.errors` alone. Used from above: `opening` (`open_storage`), `study_storage`, `ledger` (who
works on which trial), `recovery` (trials whose workers are gone), `outage` (`patient`, `DatabaseError`),
`engines` (URLs), `budget` and `cache`. The rest is theirs.
"""
