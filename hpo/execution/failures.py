"""Decides when failures mean that the study itself is broken, and not just some of its trials."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from optuna.trial import TrialState

from hpo.errors import StudyError, for_the_disk
from hpo.execution.messages import Failed, Message
from hpo.storage.settling import LOST, Settled, Verdict
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import STATE_OF, Outcome
from hpo.trial.report import TrialReport

#: This many trials or workers that fail alike before any trial has succeeded stop the study.
_ALIKE: Final = 3
#: This many deaths for each worker, with no trial finished or paused in between, stop the study.
_DEATHS: Final = 3
#: Outcomes for which the trial is to blame; LOST is left out, because there the worker died.
_FAILURES: Final = frozenset(end for end in Outcome if STATE_OF[end] == TrialState.FAIL) - {Outcome.LOST}
# What may differ between two errors of the same cause: sizes, addresses, process ids.
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


class Failures:
    """Counts failures, and raises StudyError when it is useless to continue.

    Args:
        opened: The study.
        workers: How many workers there are.
    """

    def __init__(self, opened: OpenStudy, workers: int) -> None:
        self._opened = opened
        # A trial that kills its workers must use up its retries and fail before the study is stopped.
        self._deaths_allowed = max(_DEATHS, opened.spec.run.max_retries + 1) * workers
        self._deaths = 0
        self._succeeded = opened.count(TrialState.COMPLETE, TrialState.PRUNED) > 0 or opened.has_paused()
        self._for_the_disk = 0
        self._first: dict[str, list[str]] = {"workers": [], "trials": []}

    def hear(self, message: Message, log: Path) -> None:
        """Note a worker's message.

        Args:
            message: The message.
            log: File with what the worker has printed outside of trials.

        Raises:
            StudyError: Everything has failed in the same way from the start, or no worker can work here.
        """
        if isinstance(message, Failed) and message.final:
            raise StudyError(message.message)
        if isinstance(message, Failed):
            self._failed("workers", message.message, str(log))
        elif isinstance(message, TrialReport) and message.outside:
            self._deaths = 0
        elif isinstance(message, TrialReport) and (message.outcome is not None or message.paused):
            self._deaths = 0
            if message.outcome in _FAILURES:
                self._trial_failed(message.number, message.reason)
            else:
                self._succeeded = True
            if message.outcome == Outcome.COMPLETE or message.paused:  # a pruned trial may have written nothing
                self._for_the_disk = 0

    def settled(self, trials: Sequence[Settled]) -> None:
        """Note trials that were taken back from dead workers.

        Raises:
            StudyError: As in `hear`.
        """
        for trial in trials:
            if trial.state == TrialState.FAIL:
                self._deaths = 0
                self._trial_failed(trial.number, trial.reason)

    def _trial_failed(self, number: int, reason: str) -> None:
        if for_the_disk(reason):
            self._for_the_disk += 1
            if self._for_the_disk == _ALIKE:
                raise StudyError(
                    f"{_ALIKE} trials could not write to a disk, and none has got further meanwhile:\n  {reason}\n"
                    "  fix: make room; then requeue them with `hpo retry --failed`, and resume with `hpo run`"
                )
        folder = self._opened.spec.output_dir / "trials"
        self._failed("trials", reason, f"the log of trial {number} in {folder}")

    def died(self, verdict: Verdict, log: Path) -> None:
        """Note a worker that is gone without having finished an epoch of its trial.

        Args:
            verdict: The verdict on what it held.
            log: File with what it has printed outside of trials.

        Raises:
            StudyError: Too many workers have died with no trial finished in between.
        """
        self._deaths += verdict.outcome == LOST
        if self._deaths >= self._deaths_allowed:
            raise StudyError(
                f"{self._deaths} workers died without a trial finished in between\n"
                f"  the last one: {verdict.reason}\n  fix: see {log}"
            )

    def _failed(self, what: str, reason: str, where: str) -> None:
        first = self._first[what]
        if self._succeeded or len(first) == _ALIKE:
            return
        first.append(reason)
        # Errors that differ are faults of single trials or workers.
        if len(first) == _ALIKE and len({_NUMBER.sub("#", each) for each in first}) == 1:
            raise StudyError(
                f"the first {_ALIKE} {what} failed alike:\n  {first[0]}\n"
                f"  fix: see {where}; `hpo retry --failed` requeues failed trials"
            )
