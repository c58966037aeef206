"""What `hpo run` prints: plain lines, one for each thing that happens."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from hpo.cli.output import flushed
from hpo.database import display_url
from hpo.notice import Notice
from hpo.objective import TrialReport
from hpo.progress import study_status
from hpo.recovery import Settled
from hpo.study import OpenStudy
from hpo.worker import Failed, Message


class Reporter:
    """Prints a line for each thing that happens."""

    def __init__(self, opened: OpenStudy) -> None:
        self._opened = opened
        self._status = study_status(opened)
        self._finished: int = self._status["finished"]
        self._total: int = self._status["n_trials"]
        self._shown = ""
        self._best: tuple[float, int] | None = None
        if self._status["best"] is not None:
            self._best = (self._status["best"]["value"], self._status["best"]["trial"])

    def begin(self, slots: list[Any]) -> None:
        """Say what is about to run; OSError as in `heard`."""
        spec = self._opened.spec
        devices = ", ".join(dict.fromkeys(slot.label for slot in slots))
        before = f", {self._finished} of them done" if self._finished else ""
        with flushed():
            print(f"study {spec.study.name}: {self._total} trials{before}, {len(slots)} workers on {devices}")
            print(f"storage {display_url(spec.storage_url)}")

    def heard(self, label: str, message: Message | Settled | Notice) -> None:
        """Print what a worker or the supervisor says.

        Raises:
            OSError: Nobody reads it: the terminal or the pipe is closed.
        """
        with flushed():
            if isinstance(message, Notice):
                print(message.text, file=sys.stderr)
            elif isinstance(message, Failed):
                print(f"{label} failed{self._why(message.message)}", file=sys.stderr)
            elif isinstance(message, Settled):
                self._settled(message)
            elif isinstance(message, TrialReport):
                self._reported(message)

    def _settled(self, settled: Settled) -> None:
        if settled.state == TrialState.WAITING:
            print(f"trial {settled.number} goes on later: {settled.reason}")
            return
        self._finished += 1
        why = self._why(settled.reason)
        print(f"{self._count()} trial {settled.number:<4} {settled.outcome}{why}")

    def _reported(self, report: TrialReport) -> None:
        if report.outcome is None:
            if report.reason:
                print(f"trial {report.number} goes on later: {report.reason}")
            return
        self._finished += 1
        self._keep_best(report)
        print(self._line(report) + self._why(report.reason))

    def _why(self, reason: str) -> str:
        """The reason on a line of its own; one that has just been shown is not shown again."""
        if not reason or reason == self._shown:
            return "" if not reason else " (as before)"
        self._shown = reason
        return f"\n    {reason}"

    def _keep_best(self, report: TrialReport) -> None:
        if report.outcome != "complete" or report.value is None:
            return
        sign = 1 if self._opened.spec.study.direction == "minimize" else -1
        if self._best is None or sign * report.value < sign * self._best[0]:
            self._best = (report.value, report.number)

    def _line(self, report: TrialReport) -> str:
        value = "-" if report.value is None else f"{report.value:.5g}"
        metric = self._opened.spec.study.metric
        best = "" if self._best is None else f"best {self._best[0]:.5g} (trial {self._best[1]})"
        return (
            f"{self._count()} trial {report.number:<4} "
            f"{report.outcome:<13} {metric} {value:<10} {report.epochs:>4} epochs "
            f"{report.duration_s:>7.1f} s   {best}"
        )

    def _count(self) -> str:
        return f"[{self._finished:>{len(str(self._total))}}/{self._total}]"


def print_summary(opened: OpenStudy, arguments: str, timed_out: bool) -> None:
    """Say what the study has come to, and what to do next."""
    status = study_status(opened)
    counts = ", ".join(f"{count} {name}" for name, count in status["outcomes"].items() if count)
    print(f"\n{status['finished']} of {status['n_trials']} trials finished: {counts or 'none'}")
    if timed_out:
        print(f"the time is over; {status['waiting']} trials wait to go on with the next `hpo run`")
    elif status["n_trials"] < opened.spec.study.n_trials:
        print(f"the grid is exhausted: it has {status['n_trials']} points")
    if status["running"]:
        print(f"{status['running']} trials are still running elsewhere")
    if status["best"] is not None:
        _print_best(opened, status["best"], arguments)


def _print_best(opened: OpenStudy, best: dict[str, Any], arguments: str) -> None:
    spec = opened.spec
    print(f"best: trial {best['trial']}, {spec.study.metric} {best['value']:.6g}")
    for name, value in best["params"].items():
        print(f"    {name} = {value:.6g}" if isinstance(value, float) else f"    {name} = {value}")
    print("  metrics: " + ", ".join(f"{k} {v:.4g}" for k, v in best["metrics"].items() if v is not None))
    print(f"  checkpoint: {best['checkpoint']}")
    print("next:")
    print(f"  {_command()} trials {arguments}")
    print(f"  {_command()} train {arguments} --trial best")
    print(f"  {_command()} dashboard {arguments}")


def kept_arguments(study: Path, overrides: list[str] | None, storage: str | None, output_dir: str | None) -> str:
    """What the next commands on this study need as well, as a shell reads it."""
    options = {"--storage": storage, "--output-dir": output_dir}
    kept = [str(study), *(overrides or ())]
    for name, value in options.items():
        kept += [] if value is None else [name, value]
    return shlex.join(kept)


def same_command() -> str:
    """The command that is running, as a shell reads it."""
    return f"{_command()} {shlex.join(sys.argv[1:])}"


def _command() -> str:
    """How this command was called, in words that a shell finds again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m hpo"
    return "hpo" if shutil.which("hpo") or called.name == str(called) else shlex.quote(str(called))
