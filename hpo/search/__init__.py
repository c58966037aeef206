"""What trials try and when they stop early: samplers, pruners, the prediction of a loss, replayed decisions.

Imports from storage and config. Used from above: `samplers` and `pruners` (by name from a study file),
`predicted_loss`, `replay`, `distinct` (points that have been tried).
"""
