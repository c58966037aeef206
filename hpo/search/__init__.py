"""The search itself: samplers choose each trial's parameters, pruners and schedulers decide how long it trains.

Imports from storage and config. Packages above use `samplers` and `pruners` (built by name from a study file),
`schedulers`, `predicted_loss`, `replay` (decisions on recorded curves) and `distinct` (points already tried).
"""
