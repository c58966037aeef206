"""A study in memory for Optuna's plots: its own trials only, and every name in it safe to be drawn.

Optuna's plots show a study's parameter names and choices as they are, and plotly.js reads text as HTML. Here they
are escaped before Optuna sees them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.config.schema_study import Direction
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.ranking import study_directions

Text = Callable[[str], str]
#: Larger values, of either sign, are drawn at it: a float does not hold the differences between them.
LARGEST_DRAWN: Final = 1e300


def is_too_large(value: float) -> bool:
    """Whether a value is finite and beyond `LARGEST_DRAWN`."""
    return LARGEST_DRAWN < abs(value) < math.inf


def drawn_value(value: float) -> float:
    """A value as figures have it."""
    return math.copysign(LARGEST_DRAWN, value) if is_too_large(value) else value


def drawn_text(text: str) -> str:
    """Text that plotly.js shows as it is; quotes stay, for it has no entity for them."""
    return html.escape(text, quote=False)


def snapshot(
    trials: Iterable[FrozenTrial], goals: Mapping[str, Direction], text: Text = str, *, curves: bool = False
) -> optuna.Study:
    """The trials as a study in memory, with their numbers.

    Diverged trials are failed ones in it, because Optuna's plots warn of each value that is not finite. Attributes
    of the user are left out: the plots would show all of them, tracebacks included.

    Args:
        trials: The trials; where numbers are missing, an empty failed trial stands in.
        goals: Metrics and directions.
        text: What parameter names and choices pass.
        curves: Whether it is to hold what the trials reported, and nothing else: few plots ask for it, and it is
            most of a study. All are pruned trials then: Optuna's plot leaves out those that failed or wait.
    """
    numbered = {trial.number: trial for trial in trials}
    study = optuna.create_study(directions=study_directions(goals), storage=optuna.storages.InMemoryStorage())
    study.add_trials(
        (_curve(numbered[number]) if curves else _copied(numbered[number], text))
        if number in numbered
        else create_trial(state=TrialState.FAIL)
        for number in range(max(numbered, default=-1) + 1)
    )
    return study


def _curve(trial: FrozenTrial) -> FrozenTrial:
    return create_trial(
        state=TrialState.PRUNED,
        system_attrs=trial.system_attrs,  # the bounds
        intermediate_values={step: drawn_value(value) for step, value in trial.intermediate_values.items()},
    )


def _copied(trial: FrozenTrial, text: Text) -> FrozenTrial:
    diverged = outcome_of(trial) == Outcome.DIVERGED
    return FrozenTrial(
        number=trial.number,
        trial_id=trial.number,
        state=TrialState.FAIL if diverged else trial.state,
        value=None,
        values=None if diverged or trial.values is None else [drawn_value(value) for value in trial.values],
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_complete,
        params={text(name): _value(value, text) for name, value in trial.params.items()},
        distributions={text(name): _distribution(each, text) for name, each in trial.distributions.items()},
        user_attrs={},
        system_attrs=trial.system_attrs,
        intermediate_values={},
    )


def _value(value: Any, text: Text) -> Any:
    return text(value) if isinstance(value, str) else value


def _distribution(distribution: BaseDistribution, text: Text) -> BaseDistribution:
    if not isinstance(distribution, CategoricalDistribution):
        return distribution
    return CategoricalDistribution([_value(choice, text) for choice in distribution.choices])
