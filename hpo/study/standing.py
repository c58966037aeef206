"""Reads a study from the storage into the `Standing` that its scheduler sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from optuna.trial import FrozenTrial, TrialState

from hpo.search.schedulers.columns import Columns
from hpo.search.schedulers.mending import lasting_bounds, may_mend, violated
from hpo.search.schedulers.scheduler import Standing
from hpo.search.schedulers.seen import Seen, state_of
from hpo.storage.attributes import (
    BUDGET_ATTR,
    EPOCHS_ATTR,
    GRANTED_ATTR,
    IMPORTED_ATTR,
    MAX_EPOCHS_ATTR,
    ORIGIN_ATTR,
    RETRIES_ATTR,
    SAME_AS_ATTR,
    SCHEDULER_ATTR,
)
from hpo.storage.grants import granted_until, grants_of
from hpo.storage.lineage import forked_from, inherited_epochs
from hpo.storage.optuna_private import fixed_params, user_attrs_of
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.ranking import is_feasible
from hpo.study.timing import timing_of

_NONE: Final[Mapping[int, float]] = {}


def standing_of(opened: OpenStudy, here: int | None = None, values: Mapping[int, float] = _NONE) -> Standing:
    """The study now; its trials or columns are read when they are first used.

    Args:
        opened: The study.
        here: A running trial whose grant ends; it is shown as if it had paused.
        values: Values by epoch that this trial has reported but that are not stored yet; they are shown too.
    """
    minimize = opened.spec.study.direction == "minimize"
    attrs: Mapping[str, Any]
    read_columns: Callable[[], Columns] | None
    if opened.scheduler.reads_trials:
        attrs, read_columns = user_attrs_of(opened.study), None
    elif here is None:
        attrs, read_columns = user_attrs_of(opened.study), opened.progress.look
    else:  # where a grant ends, the columns are always needed, so both are read together
        attrs, now = opened.progress.look_at_study()
        read_columns = partial(now.with_paused, here, values, minimize=minimize)
    return Standing(
        read=lambda: _seen(opened, here, values),
        read_columns=read_columns,
        space=opened.space.distributions,
        conditions=opened.space.conditions,
        where=opened.space.where,
        horizon=attrs.get(MAX_EPOCHS_ATTR),
        longest=opened.spec.longest_trial,
        minimize=minimize,
        bounded=bool(opened.spec.study.bounds),
        seed=opened.spec.seed,
        planned=opened.spec.run.workers or 1,
        n_trials=attrs.get(BUDGET_ATTR),
        n_epochs=attrs.get(EPOCHS_ATTR),
        state=attrs.get(SCHEDULER_ATTR, {}),
        granted=attrs.get(GRANTED_ATTR),
        retries=attrs.get(RETRIES_ATTR, 0),
        here=here,
    )


def _seen(opened: OpenStudy, here: int | None, values: Mapping[int, float]) -> Sequence[Seen]:
    opened.forget_looks()
    kept, found, trials = opened.seen, [], opened.study.get_trials(deepcopy=False)
    for trial in trials:
        known = kept.get(trial.number)
        # An ended or paused trial is read once and stays the same object.
        if known is None or known[0] is not trial:
            known = trial, seen(trial)
            if trial.state.is_finished() or known[1].state == "paused":
                kept[trial.number] = known
        found.append(known[1])
    if opened.spec.study.bounds:
        found = mended(found, trials)
    return [
        replace(each, state="paused", values={**each.values, **values}) if each.number == here else each
        for each in found
    ]


def seen(trial: FrozenTrial) -> Seen:
    """A trial as a scheduler sees it."""
    outcome = outcome_of(trial)
    return Seen(
        number=trial.number,
        params=fixed_params(trial) | trial.params,
        values=trial.intermediate_values,
        state=state_of(trial),
        until=granted_until(trial),
        kinds=[grant["why"].get("kind", "") for grant in grants_of(trial)],
        whole=outcome == Outcome.COMPLETE,
        failed=trial.state == TrialState.FAIL,
        diverged=outcome == Outcome.DIVERGED,
        switch=timing_of(trial).switch,
        imported=IMPORTED_ATTR in trial.system_attrs,
        source=trial.system_attrs.get(ORIGIN_ATTR, (None,))[0],
        feasible=is_feasible(trial),
        measured=bool(trial.constraints),
        inherited=inherited_epochs(trial),
        taken_over=SAME_AS_ATTR in trial.user_attrs,
        replaces=None if (fork := forked_from(trial)) is None else fork["replaces"],
    )


def mended(found: Sequence[Seen], trials: Sequence[FrozenTrial]) -> list[Seen]:
    """All trials as a scheduler sees them, with ``mends`` set where training may bring them within the bounds."""
    lasting = lasting_bounds(trials)
    return [
        replace(each, mends=not each.imported and may_mend(violated(trial.constraints), lasting))
        if not each.feasible
        else each
        for each, trial in zip(found, trials, strict=True)
    ]
