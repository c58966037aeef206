"""A study's status as plain data: the JSON of `hpo status` and `hpo best`.

It is read from the database alone: Optuna's tables, and the ledger beside them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.search.auto_sampler import chosen_sampler
from hpo.storage import ledger
from hpo.storage.attributes import EPOCHS_ATTR, MAX_EPOCHS_ATTR
from hpo.storage.lineage import epochs_trained
from hpo.storage.optuna_private import id_of_trial, user_attrs_of
from hpo.study.agents import agents_at_work
from hpo.study.code_record import CodeRecord, codes_of
from hpo.study.goals import goal_reached
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import UNFINISHED, Outcome, outcome_of
from hpo.study.own_trials import outlined
from hpo.study.pruning_summary import PruningSummary, best_count, summarize_pruning
from hpo.study.ranking import best_among, is_outside, judged, ranked
from hpo.study.trial_entries import best_entry
from hpo.wording import best_list, described_best


def study_status(opened: OpenStudy, trials: Sequence[FrozenTrial] | None = None) -> dict[str, Any]:
    """Counts by state and outcome, the best trial (or None), what pruning saved, and which agents are at work.

    ``epochs`` says how many epochs all trials have trained, and how many they may train. With several objectives
    the best is a list, the Pareto front; ``outside`` are the trials that have no rank only because they violate
    the study's constraints. ``goal`` says why the study is done early, if it is. ``sampler`` names the sampler,
    and why it was chosen where the study file leaves that open. See `hpo.study.pruning_summary.PruningSummary` for
    ``pruning``, and `hpo.study.agents.agents_at_work` for ``agents``.

    Args:
        opened: The study.
        trials: Its own trials, if the caller has them (`own_trials`); None: what is needed of them is read.
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
    """The hash of the study's code, and all its versions since the start, the first version first.

    ``trials`` of a version are those that ran under it alone; ``mixed_trials`` ran under several. Both are None
    where there is only one version.
    """
    record = CodeRecord.of(user_attrs_of(opened.study))
    versions = [] if record is None else [asdict(each) for each in record.versions]
    wholly, mixed = _by_code(opened, trials) if len(versions) > 1 else ({}, None)
    for each in versions:
        each["trials"] = None if mixed is None else wholly.get(each["hash"], [])
    return {"hash": None if record is None else record.hash, "versions": versions, "mixed_trials": mixed}


def _by_code(opened: OpenStudy, trials: Iterable[FrozenTrial]) -> tuple[dict[str, list[int]], list[int]]:
    """Trials that ran under one version of the code, by its hash, and those that ran under several."""
    with opened.storage.engine.connect() as conn:
        attempts = ledger.attempts_by_trial(conn, opened.study_id)
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

    ``metrics`` and ``internals`` are as in `hpo.study.trial_entries.study_trials`, without attempts.

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
        fix = "`hpo trials` says how its trials ended; `hpo run` trains more, where the study has any left"
        return StudyError(f"the study {opened.spec.study.name} has no complete trial yet\n  fix: {fix}")
    fix = "run more trials, or start a study with looser bounds"
    return StudyError(f"{_none_within(opened.spec, complete, outside)}\n  fix: {fix}")


def best_in_words(spec: StudySpec, status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The best of a status with its title, or that no trial meets the constraints; empty before both."""
    complete, outside = status["outcomes"][Outcome.COMPLETE], status["outside"]
    if not best_list(status["best"]) and (complete or outside) and spec.study.constraints:
        return [("best", _none_within(spec, complete, outside))]
    return described_best([*spec.study.goals], status["best"])


def _none_within(spec: StudySpec, complete: int, outside: int) -> str:
    number, noun = (complete, "complete trial") if complete else (outside, "trial")
    which, verb = f"none of the {number} {noun}s", "meets"
    if number == 1:
        which, verb = f"the only {noun}", "does not meet"
    bounds = ", ".join(f"{name} {text}" for name, text in spec.study.constraints.items())
    return f"{which} of {spec.study.name} {verb} its constraints: {bounds}"


def refuse_without_result(opened: OpenStudy) -> None:
    """Refuse a study whose trials have ended without one among them that can be the best.

    Raises:
        StudyError: It is such a one; the error says what they ended as.
    """
    ended = [trial for trial in outlined(opened) if trial.state.is_finished()]
    ends = Counter(map(outcome_of, ended))
    # A study may end with paused trials before one is complete: then their best epochs are its result.
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
    found = [best_entry(opened, _whole(opened, trial)) for trial in best_among(order, opened.spec.study.goals)]
    return found if opened.spec.study.objectives else next(iter(found), None)


def _whole(opened: OpenStudy, outline: FrozenTrial) -> FrozenTrial:
    """The full trial of an outline, with the values that it is ranked by."""
    trial = opened.storage.get_trial(id_of_trial(outline))
    trial.values = outline.values
    return trial
