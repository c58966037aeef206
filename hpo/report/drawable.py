"""Copies a study's trials into memory for Optuna's plots, with escaped names.

Optuna's plots show parameter names and choices unchanged, and plotly.js reads text as HTML. So they are escaped
before Optuna gets them.
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
#: Larger values, of either sign, are drawn at this one: differences between them overflow.
LARGEST_DRAWN: Final = 1e300


def is_too_large(value: float) -> bool:
    """Whether a value is finite, and larger than `LARGEST_DRAWN` in size."""
    return LARGEST_DRAWN < abs(value) < math.inf


def drawn_value(value: float) -> float:
    """A value as figures draw it."""
    return math.copysign(LARGEST_DRAWN, value) if is_too_large(value) else value


def drawn_text(text: str) -> str:
    """A text escaped for plotly.js; quotes stay, as plotly.js does not decode their entities."""
    return html.escape(text, quote=False)


def snapshot(
    trials: Iterable[FrozenTrial], goals: Mapping[str, Direction], text: Text = str, *, curves: bool = False
) -> optuna.Study:
    """The trials as a study in memory, with their numbers.

    Diverged trials become failed ones, as Optuna's plots warn about each value that is not finite. User attributes
    are left out: the plots would show all of them, including tracebacks.

    Args:
        trials: The trials; a missing number becomes an empty failed trial.
        goals: Metrics and directions.
        text: Converts parameter names and choices.
        curves: Copy the reported values and nothing else; few plots need them, and they are most of a study. All
            trials become pruned ones then, as Optuna's plot leaves out failed and waiting trials.
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
