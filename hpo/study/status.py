"""What a study has come to, as plain data: the JSON of `status`, `best` and `trials`.

All of it is read from the database: Optuna's tables, and the ledger beside them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.search.auto_sampler import chosen_sampler
from hpo.search.predicted_loss.audit import Condemned
from hpo.storage import ledger
from hpo.storage.attributes import (
    BEST_ATTR,
    EPOCHS_ATTR,
    MAX_EPOCHS_ATTR,
    PREDICTION_ATTR,
    PRUNED_ATTR,
    REASON_ATTR,
    SAME_AS_ATTR,
    TRACEBACK_ATTR,
)
from hpo.storage.grants import grants_of
from hpo.storage.ledger import Attempt
from hpo.storage.lineage import epochs_reached, epochs_trained, forked_from
from hpo.storage.optuna_private import id_of_trial, user_attrs_of
from hpo.storage.outlines import id_before_last, trials_without_curves
from hpo.storage.pausing import paused_at, pruned_at_end
from hpo.study.agents import agents_at_work
from hpo.study.code_record import CodeRecord, codes_of
from hpo.study.goals import goal_reached
from hpo.study.internals import parted_metrics, queued_with
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import UNFINISHED, Outcome, finite, leading_value, outcome_of, unasked
from hpo.study.own_trials import outlined, own_among, trial_value
from hpo.study.pruning_summary import PruningSummary, best_count, summarize_pruning
from hpo.study.ranking import best_among, is_outside, judged, ranked
from hpo.wording import (
    best_list,
    condemned,
    count_of,
    described_best,
    never_asked,
    paused_at_end,
    pruned_by,
    replaced_by,
    same_as,
)


def study_status(opened: OpenStudy, trials: Sequence[FrozenTrial] | None = None) -> dict[str, Any]:
    """Counts by state and outcome, the best trial (or None), what pruning saved, and who runs what.

    ``epochs`` has how many all trials have trained, and how many they may. With several objectives the best is a
    list, the Pareto front; ``outside`` are those that would have a rank if they met the study's constraints.
    ``goal`` says why the study is done early, if it is; ``sampler`` which it is, and why where the study file
    leaves that open. See `hpo.study.pruning_summary.PruningSummary` for ``pruning``, and
    `hpo.study.agents.agents_at_work` for ``agents``.

    Args:
        opened: The study.
        trials: Its own trials, if they are at hand (`own_trials`); otherwise it reads of each what it needs.
    """
    trials = outlined(opened) if trials is None else trials
    order = ranked(trials, opened.spec.study.goals)
    outcomes, unfinished = dict.fromkeys(map(str, Outcome), 0), dict.fromkeys(UNFINISHED, 0)
    for trial in trials:
        (outcomes if trial.state.is_finished() else unfinished)[outcome_of(trial)] += 1
    return {
        "study": opened.spec.study.name,
        "n_trials": opened.budget(),
        "epochs": {
            "trained": sum(map(epochs_trained, trials)),
            "limit": opened.study.user_attrs.get(EPOCHS_ATTR),
        },
        "finished": sum(outcomes.values()),
        **unfinished,
        "outcomes": outcomes,
        "best": _best(opened, order),
        "outside": sum(map(is_outside, trials)),
        "code": _code(opened, trials),
        "goal": goal_reached(opened.spec.study, trials),
        "sampler": asdict(chosen_sampler(opened.spec)),
        "pruning": asdict(study_pruning(opened, trials, order)),
        "running_trials": running_trials(opened),
        "agents": agents_at_work(opened),
    }


def _code(opened: OpenStudy, trials: Iterable[FrozenTrial]) -> dict[str, Any]:
    """The hash of the study's code, and what was accepted as its code since the start, the first version first.

    ``trials`` of a version are those that ran wholly under it; ``mixed_trials`` ran under more than one. They are
    None where there is one version only.
    """
    record = CodeRecord.of(user_attrs_of(opened.study))
    versions = [] if record is None else [asdict(each) for each in record.versions]
    wholly, mixed = _by_code(opened, trials) if len(versions) > 1 else ({}, None)
    for each in versions:
        each["trials"] = None if mixed is None else wholly.get(each["hash"], [])
    return {"hash": None if record is None else record.hash, "versions": versions, "mixed_trials": mixed}


def _by_code(opened: OpenStudy, trials: Iterable[FrozenTrial]) -> tuple[dict[str, list[int]], list[int]]:
    """Trials that ran under one code, by its hash, and those that ran under several."""
    with opened.storage.engine.connect() as conn:
        attempts = _by_trial(ledger.attempts(conn, opened.study_id))
    wholly: defaultdict[str, list[int]] = defaultdict(list)
    mixed = []
    for trial in trials:
        codes = codes_of(attempts[id_of_trial(trial)])
        if len(codes) > 1:
            mixed.append(trial.number)
        elif codes:
            wholly[codes[0]].append(trial.number)
    return wholly, mixed


def study_pruning(
    opened: OpenStudy, trials: Iterable[FrozenTrial], order: Sequence[FrozenTrial]
) -> PruningSummary:
    """What pruning saved among these trials of the study, ranked so, and how often an audit found it wrong."""
    pruner = opened.spec.study.pruner
    return summarize_pruning(
        trials,
        order,
        horizon=opened.study.user_attrs.get(MAX_EPOCHS_ATTR),
        top_k=best_count(pruner.name, pruner.kwargs),
    )


def running_trials(opened: OpenStudy) -> list[dict[str, Any]]:
    """One entry a running trial: its attempt, whose it is, and when that was last heard of (seconds ago).

    ``alive`` is whether its worker's process lives; None where that can't be known here, as of another machine's.
    All but the number is None for a trial that runs without a lease, as one of another tool does.
    """
    with opened.storage.engine.connect() as conn:
        running = ledger.running_trials(conn, opened.study_id)
    now = time.time()
    return [
        {
            "trial": trial.number,
            "attempt": lease.attempt if lease else None,
            "worker": lease.worker if lease else None,
            "host": lease.host if lease else None,
            "device": lease.device if lease else None,
            "last_beat_s": max(0.0, now - lease.beat_at) if lease else None,
            "alive": lease.owner_is_alive() if lease else None,
        }
        for trial in running
        for lease in (trial.lease,)
    ]


def study_best(opened: OpenStudy) -> dict[str, Any] | list[dict[str, Any]]:
    """The best trial: value, metrics and checkpoint of its best epoch; with several objectives the Pareto front.

    ``metrics`` and ``internals`` are as in `study_trials`, without attempts.

    Raises:
        StudyError: No trial is complete yet, or none keeps to the constraints.
    """
    trials = outlined(opened)
    best: dict[str, Any] | list[dict[str, Any]] | None = _best(opened, ranked(trials, opened.spec.study.goals))
    if best:
        return best
    raise no_best(opened, trials)


def no_best(opened: OpenStudy, trials: Iterable[FrozenTrial]) -> StudyError:
    """Why there is no best trial among these."""
    trials = list(trials)
    complete = sum(outcome_of(trial) == Outcome.COMPLETE for trial in trials)
    outside = sum(map(is_outside, trials))
    if not (complete or outside):
        return StudyError(f"the study {opened.spec.study.name} has no complete trial yet")
    fix = "run more trials, or start a study with looser bounds"
    return StudyError(f"{_none_within(opened.spec, complete, outside)}\n  fix: {fix}")


def best_in_words(spec: StudySpec, status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The best of a status with its title, or that no trial meets the constraints; empty before both."""
    complete, outside = status["outcomes"][Outcome.COMPLETE], status["outside"]
    if not best_list(status["best"]) and (complete or outside) and spec.study.constraints:
        return [("best", _none_within(spec, complete, outside))]
    return described_best([*spec.study.goals], status["best"])


def _none_within(spec: StudySpec, complete: int, outside: int) -> str:
    some = f"{complete} complete trials" if complete else count_of(outside, "trial")
    bounds = ", ".join(f"{name} {text}" for name, text in spec.study.constraints.items())
    return f"none of the {some} of {spec.study.name} meets its constraints: {bounds}"


def refuse_without_result(opened: OpenStudy) -> None:
    """Refuse a study whose trials have ended without one among them that can be the best.

    Raises:
        StudyError: It is such a one; the error says what they ended as.
    """
    ended = [trial for trial in outlined(opened) if trial.state.is_finished()]
    ends = Counter(map(outcome_of, ended))
    # A study of paused trials may end before one is complete: their best epochs are its result.
    if not ends or Outcome.COMPLETE in ends or any(judged(trial, opened.spec.study.goals) for trial in ended):
        return
    if any(map(is_outside, ended)):
        raise no_best(opened, ended)
    counts = ", ".join(f"{ends[each]} {each.replace('_', ' ')}" for each in map(str, Outcome) if ends[each])
    spec = opened.spec
    retry = "then requeue failed trials with `hpo retry --failed`, or"
    then = retry if any(trial.state == TrialState.FAIL for trial in ended) else "and"
    raise StudyError(
        f"no trial of {spec.study.name} is complete: {counts}\n"
        f"  fix: `hpo trials` lists them, and their logs are in {spec.output_dir / 'trials'}; correct the cause, "
        f"{then} start a study of another name"
    )


def _best(opened: OpenStudy, order: Sequence[FrozenTrial]) -> Any:
    """The best of ranked trials, or their Pareto front."""
    found = [_described(opened, _whole(opened, trial)) for trial in best_among(order, opened.spec.study.goals)]
    return found if opened.spec.study.objectives else next(iter(found), None)


def _whole(opened: OpenStudy, outline: FrozenTrial) -> FrozenTrial:
    """A trial with all that it has, and the value that it is ranked by."""
    trial = opened.storage.get_trial(id_of_trial(outline))
    trial.values = outline.values
    return trial


def study_trials(opened: OpenStudy, last: int | None = None, *, brief: bool = False) -> list[dict[str, Any]]:
    """One entry a trial, in the order of their numbers; ``last``: of so many with the highest numbers.

    ``duration_s`` is what all attempts at a trial took together, of a paused one so far; None while it runs or
    waits.

    ``brief`` leaves out ``metrics``, and of ``internals`` all but who ran it: a table of trials needs no more.

    ``params`` are as the study file has them, lists and mappings among them. ``metrics`` are those of its best
    epoch that a person asked for (`hpo.study.internals.parted_metrics`), empty before there is one. The traceback
    is that of a failed trial, None for any other; the reason is that of a failed one, of one that was paused when
    the study ended or a fork took its place, of one that a pruner pruned or, to audit itself, let run on, of one
    that took over the result of a trial with the same parameters, and has no epochs of its own, or of one that was
    queued with a parameter which its function never asked for.

    What hpo keeps beside it is in ``internals``: the other metrics of that epoch, the first ``prediction`` beside
    what came of it, the seed, and ``attempts``, the first one first; worker and device are the last attempt's.
    ``grants`` are those of the scheduler, the first one first: up to which epoch (``until``, None for the end),
    and ``why``: `hpo.search.schedulers.scheduler.Why`. ``fork`` says of a fork which trial it began from, after
    which epoch, and in whose place (`hpo.storage.lineage.Forked`), ``replaced_by`` which fork stands in the place
    of this trial; ``epochs`` count those of a fork's parent, too.
    """
    above = -1 if last is None else id_before_last(opened.storage, opened.study_id, last)
    with opened.storage.engine.connect() as conn:
        attempts = _by_trial(ledger.attempts(conn, opened.study_id, after=above))
    minimize = opened.spec.study.direction == "minimize"
    trials = own_among(trials_without_curves(opened.storage, opened.study_id, minimize=minimize, after=above))
    forks = {fork["replaces"]: trial for trial in trials if (fork := forked_from(trial)) is not None}
    return [
        {
            "trial": trial.number,
            "outcome": outcome_of(trial),
            "value": finite(trial_value(opened, trial)),
            **_values(opened, trial),
            "params": opened.spec.values(trial.params),
            **({} if brief else {"metrics": parted_metrics(opened.spec, _metrics(trial))[0]}),
            "epochs": epochs_reached(trial),
            "duration_s": _took(trial, attempts[id_of_trial(trial)]),
            **_cause(trial, forks.get(trial.number), opened.spec.study.pruner.name),
            "internals": {
                **({} if brief else _internals(opened, trial) | _replaced(forks.get(trial.number))),
                **_history(attempts[id_of_trial(trial)]),
            },
        }
        for trial in trials
    ]


def _by_trial(attempts: list[Attempt]) -> defaultdict[int, list[Attempt]]:
    found: defaultdict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        found[attempt.trial_id].append(attempt)
    return found


def _took(trial: FrozenTrial, attempts: Sequence[Attempt]) -> float | None:
    """Seconds of work at a trial that does not run; Optuna's time from start to end of one without attempts.

    That time has all that a trial waited while it was paused, and after a requeue the last attempt alone.
    """
    if attempts and (trial.state.is_finished() or paused_at(trial) is not None):
        return sum(each.seconds for each in attempts)
    return None if trial.duration is None else trial.duration.total_seconds()


def _cause(trial: FrozenTrial, fork: FrozenTrial | None, pruner: str) -> dict[str, Any]:
    """Why a trial failed, is pruned, was audited or has another one's result; see `study_trials`.

    What a lost attempt left on a trial that ended well later is not about its end.
    """
    if SAME_AS_ATTR in trial.user_attrs:
        return {"reason": same_as(trial.user_attrs[SAME_AS_ATTR]), "traceback": None}
    if (epoch := pruned_at_end(trial)) is not None:
        return {"reason": paused_at_end(epoch), "traceback": None}
    if fork is not None and trial.state == TrialState.PRUNED:
        begun = forked_from(fork)
        assert begun is not None
        return {"reason": replaced_by(epochs_reached(trial), fork.number, begun["parent"]), "traceback": None}
    decision = Condemned.of(trial)
    if decision is not None and trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
        return {"reason": condemned(**decision.stored()), "traceback": None}
    if trial.state == TrialState.PRUNED and PRUNED_ATTR in trial.user_attrs:
        return {"reason": pruned_by(trial.user_attrs[PRUNED_ATTR], pruner), "traceback": None}
    if outcome_of(trial) == Outcome.COMPLETE and (names := unasked(trial)):
        return {"reason": never_asked(names), "traceback": None}
    attrs = trial.user_attrs if trial.state == TrialState.FAIL else {}
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


def _described(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
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
