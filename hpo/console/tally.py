"""Keeps the state of a study for `hpo run`: from its workers' messages, and for other agents from the database."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from optuna.trial import TrialState

from hpo.console.live import GrantView, StudyView, WorkerView, seconds_left
from hpo.console.snapshot import Looks
from hpo.execution.messages import AgentNews, EpochsEnded, Extended, Failed, Heard, Notice, Started, Tick
from hpo.storage.grants import inherited_by
from hpo.storage.machine import host_name
from hpo.storage.outage import DatabaseAwayError
from hpo.storage.settling import Settled
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot
from hpo.wording import best_list, progress

#: Seconds between two reads of the database, and the largest share of the time that they may take.
_LOOK: Final = 10.0
_LOOK_SHARE: Final = 50
#: Seconds between two reads for a run without workers of its own.
_LOOK_FROM_AFAR: Final = 2.0
_NOTICES: Final = 5


@dataclass(frozen=True)
class _Row:
    """A worker of this run, and when its trial began."""

    view: WorkerView
    since: float = 0.0


class Tally:
    """Keeps the state of a running study.

    Args:
        opened: The study.

    Attributes:
        n_trials: How many trials the study is to finish.
        n_epochs: How many epochs all trials may train together; None without a limit.
        best: The best trial so far, or the Pareto front, as in `hpo.study.status.study_status`.
    """

    def __init__(self, opened: OpenStudy) -> None:
        self._opened, self._looks = opened, Looks(opened)
        self._goals = opened.spec.study.goals
        self._began = time.monotonic()
        self._rows: dict[str, _Row] = {}
        self._elsewhere: list[WorkerView] = []
        self._notices: deque[str] = deque(maxlen=_NOTICES)
        self._outcomes: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._paused: set[int] = set()
        self._trained: dict[int, int] = {}
        self._inherited: dict[int, int] = {}
        self._interval = _LOOK
        self._next_look = 0.0
        self.n_trials = opened.spec.study.n_trials
        self.n_epochs = opened.spec.study.epochs
        self.best: list[dict[str, Any]] = []
        self._look()
        self._trained_before = sum(self._trained.values())

    @property
    def progress(self) -> tuple[int, int, str]:
        """The study's progress, see `hpo.wording.progress`."""
        return progress((self.finished, self.n_trials), (sum(self._trained.values()), self.n_epochs))

    @property
    def finished(self) -> int:
        """How many trials have ended, here or elsewhere."""
        return len(self._outcomes)

    def begin(self, workers: Mapping[str, Slot]) -> None:
        """Record this run's workers; without any, everything that is shown is read from the database."""
        self._interval = _LOOK if workers else _LOOK_FROM_AFAR
        self._rows = {label: _Row(WorkerView(label, slot.label)) for label, slot in workers.items()}

    def heard(self, label: str, message: Heard) -> None:
        """Update the state with a message from a worker or the supervisor."""
        if isinstance(message, Started):
            self._started(label, message)
        elif isinstance(message, Extended):
            self._extended(label, message)
        elif isinstance(message, EpochsEnded):
            self._epochs(label, message)
        elif isinstance(message, TrialReport):
            self._idle(label)
            self._reported(message)
        elif isinstance(message, Settled):
            self._idle(label)
            self._settled(message)
        elif isinstance(message, Failed):
            self._idle(label)
            self._notices.append(f"{label} failed: {message.message}")
        elif isinstance(message, Notice):
            self._notices.append(message.text)
        elif isinstance(message, AgentNews) and message.cause:
            self._notices.append(in_words(message))
        elif isinstance(message, Tick) and time.monotonic() >= self._next_look:
            self._look()

    def view(self) -> StudyView:
        """The study's current state as a view."""
        now = time.monotonic()
        own = [_at(row, now) for row in self._rows.values()]
        workers = [*own, *self._elsewhere]
        counts = Counter(self._outcomes.values())
        return StudyView(
            self._opened.spec.study.name,
            self._goals,
            self.progress,
            {str(outcome): counts[outcome] for outcome in Outcome},
            len(self._waiting),
            len(self._paused),
            self.best,
            front=len(self.best) if len(self._goals) > 1 else 0,
            workers=workers,
            seconds=now - self._began,
            left_s=self._left(now, workers),
            notices=tuple(self._notices),
        )

    def _left(self, now: float, workers: Sequence[WorkerView]) -> float | None:
        done, of, unit = self.progress
        if unit == "epochs":  # at the pace of this run
            here = done - self._trained_before
            # `here` is not positive after a trial went back to its checkpoint.
            return (now - self._began) / here * max(0, of - done) if here > 0 else None
        busy = sum(worker.trial is not None for worker in workers)
        return seconds_left(max(0, of - done - busy), list(self._seconds.values()), workers)

    # ---- messages

    def _started(self, label: str, message: Started) -> None:
        self._paused.discard(message.number)
        self._waiting.discard(message.number)
        self._inherited[message.number] = inherited_by(message.grants)
        if message.grants and (replaced := message.grants[0]["why"].get("replaces")) in self._paused:
            self._paused.discard(replaced)
            self._outcomes[replaced] = Outcome.PRUNED
        if label in self._rows:
            known = self._rows[label].view
            view = WorkerView(label, known.device, message.number, granted=GrantView.of(message.grants))
            self._rows[label] = _Row(view, time.monotonic())

    def _extended(self, label: str, message: Extended) -> None:
        row = self._rows.get(label)
        if row is not None and row.view.trial == message.number:
            self._rows[label] = replace(row, view=replace(row.view, granted=GrantView.of(message.grants)))

    def _epochs(self, label: str, message: EpochsEnded) -> None:
        row = self._rows.get(label)
        if row is None or row.view.trial != message.number:
            return
        epoch = message.first + len(message.values) - 1
        self._trained[message.number] = epoch - self._inherited.get(message.number, 0)
        values = [value for value in message.values if value is not None]
        view = replace(
            row.view,
            epoch=epoch,
            max_epochs=message.max_epochs or None,
            value=values[-1] if values else row.view.value,
            predicted=message.predicted,
            curve=(*row.view.curve, *message.values),
            resumed=epoch if message.resumed else row.view.resumed,
        )
        self._rows[label] = replace(row, view=view)

    def _idle(self, label: str) -> None:
        if label in self._rows:
            known = self._rows[label].view
            self._rows[label] = _Row(WorkerView(label, known.device))

    def _reported(self, report: TrialReport) -> None:
        own = report.epochs - self._inherited.get(report.number, 0)
        self._trained[report.number] = max(own, self._trained.get(report.number, 0))
        if report.paused:
            self._paused.add(report.number)
            self._keep_best(report)
            return
        if report.outcome is None:
            self._waiting.add(report.number)
            if report.reason:
                self._notices.append(f"trial {report.number} is requeued: {report.reason}")
            return
        self._outcomes[report.number] = report.outcome
        self._seconds[report.number] = report.duration_s
        if report.reason:
            self._notices.append(f"trial {report.number}: {report.reason}")
        if report.outcome == Outcome.COMPLETE:
            self._keep_best(report)
        elif any(each["trial"] == report.number for each in self.best):  # it counted while paused
            self._look()

    def _settled(self, settled: Settled) -> None:
        if settled.state == TrialState.WAITING:
            self._waiting.add(settled.number)
            self._notices.append(f"trial {settled.number} is requeued: {settled.reason}")
        else:
            self._outcomes[settled.number] = settled.outcome
            self._paused.discard(settled.number)
        if settled.state == TrialState.FAIL:
            self._notices.append(f"trial {settled.number}: {settled.reason}")

    def _keep_best(self, report: TrialReport) -> None:
        study = self._opened.spec.study
        if len(self._goals) > 1 or study.constraints or report.bounded:  # ranking needs more than the report
            self._look()
            return
        sign = 1 if study.direction == "minimize" else -1
        value = report.value
        if value is not None and (not self.best or sign * value < sign * self.best[0]["value"]):
            self.best = [{"trial": report.number, "value": value, "params": dict(report.params)}]

    # ---- the database

    def _look(self) -> None:
        """Read the database; if it can't be reached, others report that, and it is read later."""
        began = time.monotonic()
        try:
            with self._opened.storage.patience.whole():
                found = self._looks.look()
        except DatabaseAwayError:
            self._next_look = began + _LOOK
            return
        self._next_look = time.monotonic() + max(self._interval, _LOOK_SHARE * (time.monotonic() - began))
        self.n_trials, self._waiting = found.status["n_trials"], set(found.waiting)
        self._outcomes, self._seconds, self._paused = found.outcomes, found.seconds, found.paused
        self.n_epochs, self._trained = found.status["epochs"]["limit"], found.epochs
        self.best = best_list(found.status["best"])
        self._elsewhere = [
            viewed(entry, with_host=True) for entry in found.status["running_trials"] if self._is_far(entry)
        ]

    def _is_far(self, entry: dict[str, Any]) -> bool:
        own = entry["host"] == host_name() and entry["worker"] in self._rows
        return not own and entry["trial"] not in [row.view.trial for row in self._rows.values()]


def _at(row: _Row, now: float) -> WorkerView:
    return row.view if row.view.trial is None else replace(row.view, seconds=now - row.since)


#: Phrases for news of agents that need another verb than "has".
_SAID: Final = {
    "placed": "is placed",
    "found": "is found again",
    "waiting": "waits",
    "running": "runs",
    "requeued": "is requeued",
    "lost": "is lost",
}


def in_words(news: AgentNews) -> str:
    """The news of an agent on one line."""
    on, why = (f" on {news.host}" if news.host else ""), (f": {news.cause}" if news.cause else "")
    said = _SAID.get(news.what, f"has {news.what}")
    logs = f"; its output: {news.logs}" if news.logs else ""
    return f"agent {news.placement} {said}{on}{why}{logs}"


def viewed(entry: dict[str, Any], *, with_host: bool) -> WorkerView:
    """The view of the worker of a running trial, from the trial's entry in `hpo.console.snapshot.Look.status`."""
    return WorkerView(
        f"{entry['worker']}@{entry['host']}" if with_host else str(entry["worker"] or "(no lease)"),
        str(entry["device"] or ""),
        entry["trial"],
        entry["epoch"],
        entry["max_epochs"],
        entry["value"],
        curve=tuple(value for _, value in entry["curve"]),
        seconds=entry["seconds"] or 0.0,
        # Only for the first attempt is the number known: 0, or for a fork the epochs of its parent.
        resumed=inherited_by(entry["grants"]) if entry["attempt"] == 1 else None,
        granted=GrantView.of(entry["grants"]),
    )
