"""Chooses the trials of a very large study that a worker reads: an even sample of the finished ones, and the best.

A worker of plain Optuna that reads 50,000 trials takes a minute of processor time and 1.3 GB (docs/scale.md). The
sample has every trial whose number is a multiple of a power of two. So its quantiles are close to the study's, and
all workers have the same sample, whenever they started. The best trials are added, because TPE, for one, needs
them. Paused trials are sampled like finished ones, because a scheduler leaves most trials paused. All waiting and
running trials are read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, Final

import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.optuna_private import TRIALS, VALUES

#: How many of the best trials a sample has: the most that Optuna's TPE uses as its good ones.
BEST: Final = 25

_STUDY = TRIALS.c.study_id == sa.bindparam("study", type_=sa.Integer)
_EXTENT = sa.select(sa.func.count(), sa.func.max(TRIALS.c.trial_id)).where(_STUDY)
_BEST = (
    sa.select(TRIALS.c.trial_id)
    .join(VALUES, VALUES.c.trial_id == TRIALS.c.trial_id)
    .where(_STUDY, TRIALS.c.state == TrialState.COMPLETE, VALUES.c.objective == 0, VALUES.c.value_type == "FINITE")
    .limit(BEST)
)


def stride(trials: int, most: int) -> int:
    """The least power of two with at most ``most`` multiples among the trials' numbers; 1 if all fit."""
    return 1 << ((trials - 1) // most).bit_length()


def extent(conn: sa.Connection, study_id: int) -> tuple[int, int]:
    """How many trials a study has, and the highest of their ids (0 if it has none)."""
    trials, last = conn.execute(_EXTENT, {"study": study_id}).one()
    return trials, last or 0


def best_ids(conn: sa.Connection, study_id: int, *, maximize: bool) -> list[int]:
    """The ids of a study's best complete trials, at most `BEST` of them."""
    best = _BEST.order_by(VALUES.c.value.desc() if maximize else VALUES.c.value, TRIALS.c.number)
    return list(conn.execute(best, {"study": study_id}).scalars())


def in_sample(every: int, best: Sequence[int], paused: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """The condition on trials that are read: they wait or run, are in the even sample, or among the best.

    Args:
        every: The sample's stride.
        best: Ids of the best trials.
        paused: A column that is NULL for a trial that is not paused.
    """
    running = sa.and_(TRIALS.c.state == TrialState.RUNNING, paused.is_(None))
    sampled = sa.or_(TRIALS.c.number % every == 0, TRIALS.c.trial_id.in_(best))
    return sa.or_(TRIALS.c.state == TrialState.WAITING, running, sampled)


def thinned(trials: Iterable[FrozenTrial], every: int, *, maximize: bool) -> list[FrozenTrial]:
    """The trials in the sample, among these finished ones, in the same order."""
    known = list(trials)
    complete = [trial for trial in known if trial.state == TrialState.COMPLETE and _is_finite(trial)]
    sign = -1.0 if maximize else 1.0
    best = heapq.nsmallest(BEST, complete, key=lambda trial: (sign * trial.values[0], trial.number))
    numbers = {trial.number for trial in best}
    return [trial for trial in known if trial.number % every == 0 or trial.number in numbers]


def _is_finite(trial: FrozenTrial) -> bool:
    return bool(trial.values) and abs(trial.values[0]) < float("inf")
