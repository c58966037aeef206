"""What `hpo run` prints: a line for each thing that happens, on a terminal with a picture below them."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from hpo.console.live import Picture
from hpo.console.output import BestEffort
from hpo.console.screen import Screen
from hpo.console.tally import Tally, in_words
from hpo.errors import without_password
from hpo.execution.messages import AgentNews, Extended, Failed, Heard, Notice, Placed, Started
from hpo.search.samplers import ExhaustiveSampler
from hpo.storage.engines import display_url
from hpo.storage.grants import granted_after
from hpo.storage.pausing import PAUSED
from hpo.storage.recovery import Settled
from hpo.study.open_study import OpenStudy
from hpo.study.status import best_in_words, study_status
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot
from hpo.wording import are, best_list, count_of, granted, parameter, shown, study_progress, taken


class Reporter:
    """Prints a line for each thing that happens.

    Args:
        opened: The study.
        quiet: Print what went wrong, and nothing else.
    """

    def __init__(self, opened: OpenStudy, *, quiet: bool = False) -> None:
        self._opened = opened
        self._quiet = quiet
        self._shown = ""
        self._pruned_at_end = 0
        self._tally = Tally(opened)
        self._output = BestEffort()

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        """Say what is about to run; OSError as in `heard`."""
        spec, (done, of, unit) = self._opened.spec, self._tally.progress
        self._tally.begin(workers)
        devices = ", ".join(dict.fromkeys(slot.label for slot in workers.values()))
        where = f"{count_of(len(workers), 'worker')} on {devices}"
        if placed is not None:
            where = f"up to {count_of(placed.most, 'agent')} on {placed.on}"
        trials = count_of(of, unit.removesuffix("s")) + (f", {done} done" if done else "")
        with self._output.printing():
            self._say(f"study {spec.study.name}: {trials}, {where}")
            self._say(f"storage {display_url(spec.storage_url)}")

    def heard(self, label: str, message: Heard) -> None:
        """Print what a worker or the supervisor says.

        Raises:
            OSError: The reader is gone: the terminal or the pipe is closed.
        """
        self._tally.heard(label, message)
        with self._output.printing():
            if isinstance(message, Notice):
                print(message.text, file=sys.stderr)
            elif isinstance(message, Failed):
                print(f"{label} failed{self._why(message.message)}", file=sys.stderr)
            elif isinstance(message, AgentNews):
                self._say(in_words(message), trouble=message.what in ("died", "lost"))
            elif isinstance(message, Settled):
                self._settled(message)
            elif isinstance(message, TrialReport):
                self._reported(message)
            elif isinstance(message, Started | Extended):
                self._granted(message)

    def end(self, ending: str, reason: str | None = None) -> None:  # noqa: ARG002 - the interface of listeners
        """The run has ended; what it has come to is said by `print_summary`."""
        if self._pruned_at_end:
            self._say(f"{count_of(self._pruned_at_end, 'paused trial')} pruned, as the study has ended")

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _say(self, text: str, *, trouble: bool = False) -> None:
        """Print a line; a quiet run prints only trouble, on standard error."""
        if trouble or not self._quiet:
            print(text, file=sys.stderr if self._quiet else sys.stdout)

    def _settled(self, settled: Settled) -> None:
        if settled.state == TrialState.WAITING:
            self._say(f"trial {settled.number} is requeued: {settled.reason}", trouble=True)
            return
        if settled.state == TrialState.PRUNED:  # it was paused: there may be hundreds
            self._pruned_at_end += 1
            return
        failed = settled.state == TrialState.FAIL
        why = self._why(settled.reason) if failed else f", {settled.reason}"
        self._say(f"{self._count()} trial {settled.number:<4} {settled.outcome}{why}", trouble=failed)

    def _reported(self, report: TrialReport) -> None:
        if report.outcome is None and not report.paused:
            if report.reason:
                self._say(f"trial {report.number} is requeued: {report.reason}", trouble=True)
            return
        self._say(self._line(report) + self._why(report.reason), trouble=bool(report.reason))

    def _granted(self, message: Started | Extended) -> None:
        """A grant, and why; without a scheduler a trial starts without a word."""
        if not message.grants:
            return
        until, why = message.grants[-1]["until"], message.grants[-1]["why"]
        if isinstance(message, Started):
            self._say(taken(message.number, message.epochs, until, why))
        else:
            after = granted_after(message.grants)
            self._say(f"trial {message.number} trains on after epoch {after}, {granted(until, why)}")

    def _why(self, reason: str) -> str:
        """The reason on a line of its own; one that has just been shown is not shown again."""
        if not reason or reason == self._shown:
            return "" if not reason else " (as before)"
        self._shown = reason
        return f"\n    {reason}"

    def _line(self, report: TrialReport) -> str:
        """What a trial has come to, in a terminal of 80 columns; the best one so far says so."""
        metric = self._opened.spec.study.metric
        unit = "epoch " if report.epochs == 1 else "epochs"
        return (
            f"{self._count()} trial {report.number:<4} "
            f"{report.outcome or PAUSED:<8}  {metric} {shown(report.value, 5):<10} {report.epochs:>3} {unit} "
            f"{report.duration_s:>7.1f} s  {self._rank(report.number)}"
        ).rstrip()

    def _rank(self, number: int) -> str:
        """That a trial is the best so far, or one on the Pareto front."""
        if number not in [each["trial"] for each in self._tally.best]:
            return ""
        return "best" if len(self._opened.spec.study.goals) == 1 else "on the front"

    def _count(self) -> str:
        done, of, unit = self._tally.progress
        return f"[{done:>{len(str(of))}}/{of}{'' if unit == 'trials' else f' {unit}'}]"


class LiveReporter(Reporter):
    """As `Reporter`, with a picture of the study below the lines."""

    def __init__(self, opened: OpenStudy) -> None:
        super().__init__(opened)
        self._screen = Screen()

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        """Say what is about to run, and draw it."""
        super().begin(workers, placed)
        self._screen.open()
        self._screen.show(self._picture, now=True)

    def heard(self, label: str, message: Heard) -> None:
        """Print what is said, and draw what has come of it; OSError where the terminal is closed."""
        super().heard(label, message)
        self._screen.show(self._picture, now=isinstance(message, TrialReport | Settled))

    def close(self) -> None:
        """Take the picture away; the lines stay."""
        self._screen.close()

    def _granted(self, message: Started | Extended) -> None:
        """The picture shows it."""

    def _picture(self) -> Picture:
        return Picture(self._tally.view())


def print_summary(opened: OpenStudy, arguments: str, ending: str) -> None:
    """Say what the study has come to, and what to do next.

    Args:
        opened: The study.
        arguments: What the next commands need, see `kept_arguments`.
        ending: Why the run has ended, see `hpo.execution.supervisor.Ending`.
    """
    status = study_status(opened)
    counts = ", ".join(f"{count} {name}" for name, count in status["outcomes"].items() if count)
    paused = f", {status['paused']} paused" if status["paused"] else ""
    done, of, unit = study_progress(status)
    trials = f"{done} of {of} {unit}"
    if unit == "epochs":
        trials = f"{trials}, {count_of(status['finished'], 'trial')}"
    print(f"\n{trials} finished{counts and f': {counts}'}{paused}")
    _print_ending(opened, status, ending)
    if status["running"]:
        print(f"{are(status['running'], 'trial')} still running elsewhere")
    best = best_list(status["best"])
    if not best:
        for _, text in best_in_words(opened.spec, status):
            print(text)
    elif len(opened.spec.study.goals) > 1:
        _print_front(best, arguments)
    else:
        _print_best(opened, best[0], arguments)


def _print_ending(opened: OpenStudy, status: dict[str, Any], ending: str) -> None:
    """Why the run has ended before its budget was used, if it has."""
    done, of, unit = study_progress(status)
    if ending == "timeout":
        unfinished = status["waiting"] + status["paused"]
        print(f"the time limit is reached; the next `hpo run` resumes {count_of(unfinished, 'trial')}")
    elif status["n_trials"] < (wanted := opened.spec.study.n_trials):
        if isinstance(sampler := opened.study.sampler, ExhaustiveSampler):
            if ending == "done":
                print(f"the grid is exhausted: it has {count_of(len(sampler), 'point')}")
        else:
            theirs = f"another run has set the study to {count_of(status['n_trials'], 'trial')}"
            print(f"{theirs} since this one began; the same command continues it up to {wanted}")
    elif ending == "done" and done < of and not status["running"]:
        left = f"; {count_of(of - done, 'epoch')} of the budget not used" if unit == "epochs" else ""
        why = "the scheduler starts no more trials: those that it has started have trained to their ends"
        if status["finished"] >= status["n_trials"]:
            why = "all of the study's trials have ended"
        print(why + left)


def _print_front(front: list[dict[str, Any]], arguments: str) -> None:
    """The Pareto front, a line a trial: none of them is better than another in every objective."""
    print(f"Pareto front: {count_of(len(front), 'trial')}")
    for entry in front:
        values = ", ".join(f"{name} {shown(value, 5)}" for name, value in entry["values"].items())
        print(f"    trial {entry['trial']}: {values}")
    print(f"next:\n  {_command()} trials {arguments}\n  {_command()} dashboard {arguments}")


def _print_best(opened: OpenStudy, best: dict[str, Any], arguments: str) -> None:
    spec = opened.spec
    print(f"best: trial {best['trial']}, {spec.study.metric} {best['value']:.6g}")
    for name, value in best["params"].items():
        print(f"    {name} = {parameter(value)}")
    print("  metrics: " + ", ".join(f"{k} {v:.4g}" for k, v in best["metrics"].items() if v is not None))
    print(f"  checkpoint: {best['checkpoint'] or 'none'}")
    print("next:")
    print(f"  {_command()} trials {arguments}")
    print(f"  {_command()} train {arguments} --trial best")
    print(f"  {_command()} dashboard {arguments}")


def kept_arguments(study: Path, overrides: list[str] | None, storage: str | None, output_dir: str | None) -> str:
    """What the next commands on this study need as well, as a shell reads it; without passwords of URLs."""
    options = {"--storage": storage, "--output-dir": output_dir}
    kept = [str(study), *(overrides or ())]
    for name, value in options.items():
        kept += [] if value is None else [name, value]
    return shlex.join(map(without_password, kept))


def same_command() -> str:
    """The command that is running, as a shell reads it; without passwords of URLs."""
    # A person who runs it has all of its time limit, and is no start of a submitted driver.
    words = [without_password(word) for word in sys.argv[1:] if not word.startswith("--submission=")]
    return f"{_command()} {shlex.join(words)}"


def _command() -> str:
    """How this command was called, in words that a shell finds again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m hpo"
    return "hpo" if shutil.which("hpo") or called.name == str(called) else shlex.quote(str(called))
