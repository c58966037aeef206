"""A study's trials as plain data, one entry each: the JSON of `hpo trials`, and of the best trials."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.search.predicted_loss.audit import Condemned
from hpo.storage import ledger
from hpo.storage.attributes import (
    BEST_ATTR,
    PREDICTION_ATTR,
    PRUNED_ATTR,
    REASON_ATTR,
    SAME_AS_ATTR,
    TRACEBACK_ATTR,
)
from hpo.storage.grants import grants_of
from hpo.storage.ledger import Attempt
from hpo.storage.lineage import epochs_reached, forked_from
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.outlines import id_before_last, trials_without_curves
from hpo.study.internals import parted_metrics, queued_with
from hpo.study.lineage import end_of_paused, forks_by_replaced
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, finite, leading_value, outcome_of, unclaimed
from hpo.study.own_trials import own_among, trial_value
from hpo.study.timing import took
from hpo.wording import condemned, never_asked, pruned_by, same_as


def study_trials(opened: OpenStudy, last: int | None = None, *, brief: bool = False) -> list[dict[str, Any]]:
    """One entry per trial, by number; ``last``: only that many trials with the highest numbers.

    ``duration_s`` is the time of all attempts at a trial together, for a paused trial so far; None while it runs
    or waits.

    ``brief`` leaves out ``metrics``, and of ``internals`` all but which worker ran it: enough for a table.

    ``params`` have the values of the study file, such as lists and mappings. A waiting trial has those that it was
    queued with; the others are drawn when it starts. ``metrics`` are those of the best epoch that a person asked
    for (`hpo.study.internals.parted_metrics`), empty before there is one. ``traceback`` is that of a failed trial,
    else None. ``reason`` says why a trial failed or diverged; that it was paused when the study ended, or a fork
    took its place; why a pruner pruned it, or let it run on as an audit; that it took over the result of a trial
    with equal parameters and has no epochs of its own; or that it was queued with a parameter that its function
    never asked for.

    ``internals`` has what hpo records besides: the other metrics of that epoch, the first ``prediction`` with its
    actual result, the seed, and ``attempts``, the first one first; worker and device are the last attempt's.
    ``grants`` are those of the scheduler, the first one first: up to which epoch (``until``, None for the end),
    and ``why``: `hpo.search.schedulers.scheduler.Why`. ``fork`` says from which trial a fork began, after which
    epoch, and whose place it took (`hpo.storage.lineage.Forked`); ``replaced_by`` says which fork took this
    trial's place. ``epochs`` include those of a fork's parent.
    """
    above = -1 if last is None else id_before_last(opened.storage, opened.study_id, last)
    with opened.storage.engine.connect() as conn:
        attempts = ledger.attempts_by_trial(conn, opened.study_id, after=above)
    minimize = opened.spec.study.direction == "minimize"
    trials = own_among(trials_without_curves(opened.storage, opened.study_id, minimize=minimize, after=above))
    forks = forks_by_replaced(trials)
    return [
        {
            "trial": trial.number,
            "outcome": outcome_of(trial),
            "value": finite(trial_value(opened, trial)),
            **_values(opened, trial),
            "params": opened.spec.values(_params(opened, trial)),
            **({} if brief else {"metrics": parted_metrics(opened.spec, _metrics(trial))[0]}),
            "epochs": epochs_reached(trial),
            "duration_s": took(trial, [each.seconds for each in attempts[id_of_trial(trial)]]),
            **_cause(trial, forks.get(trial.number), opened.spec.study.pruner.name),
            "internals": {
                **({} if brief else _internals(opened, trial) | _replaced(forks.get(trial.number))),
                **_history(attempts[id_of_trial(trial)]),
            },
        }
        for trial in trials
    ]


def _params(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    if trial.state != TrialState.WAITING:
        return trial.params
    return queued_with(opened.space, trial) | trial.params


def _cause(trial: FrozenTrial, fork: FrozenTrial | None, pruner: str) -> dict[str, Any]:
    """The reason and traceback of a trial's entry; see `study_trials`.

    What an earlier lost attempt left is ignored if the trial ended well later.
    """
    if SAME_AS_ATTR in trial.user_attrs:
        return {"reason": same_as(trial.user_attrs[SAME_AS_ATTR]), "traceback": None}
    if (reason := end_of_paused(trial, fork)) is not None:
        return {"reason": reason, "traceback": None}
    decision = Condemned.of(trial)
    if decision is not None and trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
        return {"reason": condemned(**decision.stored()), "traceback": None}
    if trial.state == TrialState.PRUNED and PRUNED_ATTR in trial.user_attrs:
        return {"reason": pruned_by(trial.user_attrs[PRUNED_ATTR], pruner), "traceback": None}
    if outcome_of(trial) == Outcome.COMPLETE and (names := unclaimed(trial)):
        return {"reason": never_asked(names), "traceback": None}
    failed = trial.state == TrialState.FAIL or outcome_of(trial) == Outcome.DIVERGED
    attrs = trial.user_attrs if failed else {}
    return {"reason": attrs.get(REASON_ATTR), "traceback": attrs.get(TRACEBACK_ATTR)}


def _history(attempts: list[Attempt]) -> dict[str, Any]:
    last = attempts[-1] if attempts else None
    return {
        "worker": last.worker if last else None,
        "device": last.device if last else None,
        "attempts": [
            {
                "attempt": each.attempt,
                "worker": each.worker,
                "host": each.host,
                "device": each.device,
                "code": each.code,
                "started": _instant(each.started_at),
                "ended": _instant(each.ended_at),
                "outcome": each.outcome,
                "reason": each.reason,
            }
            for each in attempts
        ],
    }


def _instant(seconds: float | None) -> str | None:
    """A time in ISO 8601, in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _metrics(trial: FrozenTrial) -> dict[str, float | None]:
    """The metrics of a trial's best epoch."""
    found: dict[str, float | None] = finite((trial.user_attrs.get(BEST_ATTR) or {}).get("metrics", {}))
    return found


def _internals(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    """What hpo records of a trial besides what a person asked for; see `study_trials`."""
    return {
        "metrics": parted_metrics(opened.spec, _metrics(trial))[1],
        "prediction": finite(trial.user_attrs.get(PREDICTION_ATTR)),
        "seed": opened.trial_seed(trial.number, queued_with(opened.space, trial) | trial.params),
        "grants": list(grants_of(trial)),
        "fork": forked_from(trial),
    }


def _replaced(fork: FrozenTrial | None) -> dict[str, Any]:
    return {"replaced_by": None if fork is None else fork.number}


def best_entry(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    """The entry of one of the best trials, in the JSON of `status` and `best`."""
    kept = trial.user_attrs.get(BEST_ATTR) or {}
    relative = kept.get("checkpoint")
    return {
        "study": opened.spec.study.name,
        "trial": trial.number,
        "value": finite(leading_value(trial)),
        **_values(opened, trial),
        "params": opened.spec.values(trial.params),
        "epoch": kept.get("epoch"),
        "metrics": parted_metrics(opened.spec, _metrics(trial))[0],
        "checkpoint": None if relative is None else str(opened.spec.output_dir / relative),
        "internals": _internals(opened, trial),
    }


def _values(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    """A trial's value by objective, where there are several, and how far it violates each bound, if any.

    A number up to 0 means that the bound is kept.
    """
    study = opened.spec.study
    found: dict[str, Any] = {}
    if study.objectives:
        found["values"] = dict(zip(study.goals, finite(trial.values or [None] * len(study.goals)), strict=True))
    if study.constraints:
        found["constraints"] = finite(trial.constraints)
    return found
