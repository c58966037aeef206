"""Optuna's storage with what parallel workers need: a budget, a ledger of attempts, fenced writes, patience.

Imports nothing of hpo but `errors`, `signals` and `wording`. Start reading at `study_storage` (the storage),
`opening` (`open_storage`), `ledger` (who works on which trial), `recovery` (trials whose workers are gone) and
`outage` (waiting for a database that is away).
"""
