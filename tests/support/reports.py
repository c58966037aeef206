"""Reports of made-up trials, without a storage: for names that no study file can have, and for large studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.report.data import StudyReport
from hpo.report.timeline import Work
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.pruning_summary import compared_predictions
from hpo.study.ranking import best_of, ranked


def trial_of(
    number: int,
    params: Mapping[str, Any],
    distributions: Mapping[str, Any],
    value: float,
    *,
    curve: Mapping[int, float] | None = None,
    state: TrialState = TrialState.COMPLETE,
    attrs: Mapping[str, Any] | None = None,
) -> FrozenTrial:
    """A trial of this number that ended so."""
    made = create_trial(
        state=state,
        value=value if state == TrialState.COMPLETE else None,
        params=dict(params),
        distributions=dict(distributions),
        intermediate_values=dict(curve or {}),
        user_attrs=dict(attrs or {}),
    )
    made.number = number
    return made


def work_of(
    trial: int,
    worker: str = "worker-1",
    *,
    start: float | None = None,
    end: float | None = None,
    outcome: str = "complete",
    attempt: int = 1,
    host: str = "here",
    reason: str | None = None,
) -> Work:
    """An attempt at a trial; its times in seconds."""
    start = 10.0 * trial if start is None else start
    end = start + 9.0 if end is None else end
    return Work(trial, attempt, worker, host, "cpu", start, end, outcome, reason)


def report_of(
    trials: Sequence[FrozenTrial],
    *,
    goals: Mapping[str, Any] | None = None,
    work: Sequence[Work] = (),
    bounds: Mapping[str, str] | None = None,
    name: str = "made-up",
) -> StudyReport:
    """The report of these trials."""
    goals = goals or {"val_loss": "minimize"}
    ended = [outcome_of(trial) for trial in trials if trial.state.is_finished()]
    pruning: dict[str, Any] = {"pruned": 0, "ended": len(ended), "epochs_used": 0, "audited": 0}
    pruning |= dict.fromkeys(("epochs_unpruned", "alpha"))
    status = {
        "study": name,
        "n_trials": len(trials),
        "finished": len(ended),
        "running": len(trials) - len(ended),
        "waiting": 0,
        "paused": 0,
        "epochs": {"trained": sum(trial.last_step or 0 for trial in trials), "limit": None},
        "sampler": {"name": "tpe", "why": None},
        "outcomes": {str(outcome): ended.count(outcome) for outcome in Outcome},
        "code": {"hash": None, "versions": [], "mixed_trials": None},
        "pruning": pruning,
    }
    return StudyReport(
        status=status,
        goals=goals,
        bounds=bounds or {},
        trials=trials,
        ranked=ranked(trials, goals),
        best=best_of(trials, goals),
        compared=compared_predictions(trials),
        work=work,
        config={"study": {"name": name}},
        environment=None,
        made=datetime(2026, 1, 2, tzinfo=UTC),
    )
