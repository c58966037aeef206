"""Trials of functions that train by another library's trainer, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpo.study.open_study import OpenStudy
from hpo.trial.report import TrialReport
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import FunctionCode
from tests.support import attempts
from trainer.recorded import Metrics

Function = Callable[[Session], object]


def run(
    view: OpenStudy, function: Function, request: StopRequest | None = None
) -> tuple[TrialReport, list[Metrics]]:
    """One attempt at the next trial: what came of it, and the history."""
    code = FunctionCode(function)
    return attempts.run(view, code, request=request), list(code.history)


def reason(view: OpenStudy, function: Function) -> str:
    """The error that a trial ends with."""
    report, _ = run(view, function)
    assert report.outcome == "error", report
    return report.reason


class StopAt:
    """Asks that the run stops at the n-th call.

    Attributes:
        request: The run's.
    """

    def __init__(self, calls: int) -> None:
        self.request = StopRequest()
        self._left = calls

    def __call__(self, *_: Any, **__: Any) -> None:
        self._left -= 1
        if not self._left:
            self.request.leave()
