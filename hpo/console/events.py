"""`hpo run --json`: one event a line.

Each line is a JSON object with ``event`` (its name), ``time`` (ISO 8601, UTC), and:

=================  ====================================================================================
``study_started``  ``study``, ``goals`` (each metric with its direction), ``n_trials``, ``n_epochs``,
                   ``finished``, ``workers`` (their devices), ``agents`` (null, or with ``--on`` the engine
                   ``on``, the ``fewest`` and the ``most``), ``storage``, ``output_dir``
``trial_started``  ``trial``, ``worker``, ``epochs`` that it has finished before, ``granted``: what the study's
                   scheduler lets it train, and why, as the last of the ``grants`` of `hpo trials --json`; null
                   without a scheduler. The ``why`` of a fork's first grant has ``parent``, the ``epoch`` after
                   which it begins, and ``replaces``: that trial, if it was paused, has ended as pruned
``trial_granted``  ``trial``, ``worker``, ``granted``: its grant has ended, and it trains on without a pause
``epoch_ended``    ``trial``, ``worker``, ``epoch``, ``max_epochs``, ``value`` of the study's (first) metric,
                   ``predicted`` final loss
``trial_ended``    ``trial``, ``worker``, ``outcome``, ``value``, ``params``, ``epochs``, ``duration_s`` of the
                   last attempt, ``reason``; of one that was reaped from a dead worker, or was paused when the
                   study ended, ``trial``, ``worker``, ``outcome``, ``reason``
``trial_requeued`` ``trial``, ``worker``, ``reason``: interrupted, or reaped from a dead worker; resumes later
``trial_paused``   ``trial``, ``worker``, ``epochs`` that it has finished, ``value``: the scheduler may resume it
``notice``         ``text``
``worker_failed``  ``worker``, ``reason``
``agent_placed``   ``placement`` (the engine's id of it), ``host``, ``cause``, ``logs``; in the same way
                   ``agent_found`` (an earlier driver has placed it), ``agent_waiting`` (for a machine, for half a
                   minute or more), ``agent_running``, ``agent_requeued`` (its engine starts it again),
                   ``agent_ended``, ``agent_died``, ``agent_lost`` (with its machine)
``study_ended``    ``ending`` (``done``, ``timeout``, ``goal``, ``interrupted``, ``stopped`` by `hpo stop`, of an
                   agent also ``idle``, with ``--on`` also ``detached``, or ``left`` after SIGTERM or SIGHUP; or
                   ``failed``), ``reason`` of a failure, and ``status`` as `hpo status --json` has it (null where
                   it can't be read)
=================  ====================================================================================

A missing value, or a number that is not finite, is null. An epoch is reported once: those before the epoch that
a trial resumes from are not reported again. Names stay the same; new events and entries may be added.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TextIO

from optuna.trial import TrialState

from hpo.console.output import BestEffort
from hpo.errors import StudyError
from hpo.execution.messages import AgentNews, EpochsEnded, Extended, Failed, Heard, Notice, Placed, Started
from hpo.storage.engines import display_url
from hpo.storage.settling import Settled
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import finite
from hpo.study.status import study_status
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot


class EventWriter:
    """Writes a line for each event; the module's docstring lists the events.

    Args:
        opened: The study.
        out: The stream to write to.
    """

    def __init__(self, opened: OpenStudy, out: TextIO) -> None:
        self._opened = opened
        self._out = out
        self._output = BestEffort()

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        """Write that the study starts; raises OSError as `heard` does."""
        spec, status = self._opened.spec, study_status(self._opened)
        self._write(
            "study_started",
            study=spec.study.name,
            goals=dict(spec.study.goals),
            n_trials=status["n_trials"],
            n_epochs=status["epochs"]["limit"],
            finished=status["finished"],
            workers=[slot.label for slot in workers.values()],
            agents=None if placed is None else asdict(placed),
            storage=display_url(spec.storage_url),
            output_dir=str(spec.output_dir),
        )

    def heard(self, label: str, message: Heard) -> None:
        """Write the event of a message from a worker or the supervisor.

        Raises:
            OSError: The reader is gone.
        """
        if isinstance(message, Started):
            granted = message.grants[-1] if message.grants else None
            self._write(
                "trial_started", trial=message.number, worker=label, epochs=message.epochs, granted=granted
            )
        elif isinstance(message, Extended):
            self._write("trial_granted", trial=message.number, worker=label, granted=message.grants[-1])
        elif isinstance(message, EpochsEnded):
            self._epochs(label, message)
        elif isinstance(message, TrialReport):
            self._reported(label, message)
        elif isinstance(message, Settled):
            waits = message.state == TrialState.WAITING
            ending = {} if waits else {"outcome": message.outcome}
            name = "trial_requeued" if waits else "trial_ended"
            self._write(name, trial=message.number, worker=label or None, **ending, reason=message.reason)
        elif isinstance(message, Notice):
            self._write("notice", text=message.text)
        elif isinstance(message, AgentNews):
            about = {"placement": message.placement, "host": message.host or None}
            self._write(f"agent_{message.what}", **about, cause=message.cause or None, logs=message.logs or None)
        elif isinstance(message, Failed):
            self._write("worker_failed", worker=label, reason=message.message)

    def end(self, ending: str, reason: str | None = None) -> None:
        """Write that the run has ended; raises OSError as `heard` does."""
        try:
            with self._opened.storage.patience.whole():
                status = study_status(self._opened)
        except StudyError:  # the database can't be reached
            status = None
        self._write("study_ended", ending=ending, reason=reason, status=status)

    def close(self) -> None:
        """Do nothing: every line is written already."""

    def _epochs(self, label: str, message: EpochsEnded) -> None:
        if message.resumed:
            return
        last = message.first + len(message.values) - 1
        for epoch, value in enumerate(message.values, start=message.first):
            self._write(
                "epoch_ended",
                trial=message.number,
                worker=label,
                epoch=epoch,
                max_epochs=message.max_epochs or None,
                value=value,
                predicted=message.predicted if epoch == last else None,
            )

    def _reported(self, label: str, report: TrialReport) -> None:
        if report.paused:
            self._write(
                "trial_paused", trial=report.number, worker=label, epochs=report.epochs, value=report.value
            )
            return
        if report.outcome is None:
            self._write("trial_requeued", trial=report.number, worker=label, reason=report.reason or None)
            return
        self._write(
            "trial_ended",
            trial=report.number,
            worker=label,
            outcome=str(report.outcome),
            value=report.value,
            params=self._opened.spec.values(report.params),
            epochs=report.epochs,
            duration_s=report.duration_s,
            reason=report.reason or None,
        )

    def _write(self, event: str, **entries: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps(finite({"event": event, "time": time, **entries}), allow_nan=False)
        with contextlib.redirect_stdout(self._out), self._output.printing():
            print(line)
