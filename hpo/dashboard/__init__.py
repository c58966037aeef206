"""optuna-dashboard on the study's storage: `serve` starts it behind the `gate`, which asks for a `login`.

Imports from trial and below. Used from above: `serve`.
"""
