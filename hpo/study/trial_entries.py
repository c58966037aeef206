"""A study's trials as plain data, one entry each: the JSON of `trials`, and of the best ones."""

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
    """One entry a trial, in the order of their numbers; ``last``: of so many with the highest numbers.

    ``duration_s`` is what all attempts at a trial took together, of a paused one so far; None while it runs or
    waits.

    ``brief`` leaves out ``metrics``, and of ``internals`` all but who ran it: a table of trials needs no more.

    ``params`` are as the study file has them, lists and mappings among them; of a trial that waits in the queue
    those that it was queued with, the others are drawn when it starts. ``metrics`` are those of its best
    epoch that a person asked for (`hpo.study.internals.parted_metrics`), empty before there is one. The traceback
    is that of a failed trial, None for any other; the reason is that of a failed or diverged one, of one that was
    paused when the study ended or a fork took its place, of one that a pruner pruned or, to audit itself, let run
    on, of one that took over the result of a trial with the same parameters, and has no epochs of its own, or of
    one that was queued with a parameter which its function never asked for.

    What hpo keeps beside it is in ``internals``: the other metrics of that epoch, the first ``prediction`` beside
    what came of it, the seed, and ``attempts``, the first one first; worker and device are the last attempt's.
    ``grants`` are those of the scheduler, the first one first: up to which epoch (``until``, None for the end),
    and ``why``: `hpo.search.schedulers.scheduler.Why`. ``fork`` says of a fork which trial it began from, after
    which epoch, and in whose place (`hpo.storage.lineage.Forked`), ``replaced_by`` which fork stands in the place
    of this trial; ``epochs`` count those of a fork's parent, too.
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
    """Why a trial failed or diverged, is pruned, was audited or has another one's result; see `study_trials`.

    What a lost attempt left on a trial that ended well later is not about its end.
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
    """A time as ISO 8601 has it, in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _metrics(trial: FrozenTrial) -> dict[str, float | None]:
    """The metrics of a trial's best epoch."""
    found: dict[str, float | None] = finite((trial.user_attrs.get(BEST_ATTR) or {}).get("metrics", {}))
    return found


def _internals(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    """What hpo keeps of a trial beside what was asked for; see `study_trials`."""
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
