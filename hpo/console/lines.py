"""Prints the output of `hpo run`: a line for each event, on a terminal with a live picture below the lines."""

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
from hpo.storage.settling import Settled
from hpo.study.open_study import OpenStudy
from hpo.study.status import best_in_words, study_status
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot
from hpo.wording import are, best_list, count_of, granted, parameter, shown, study_progress, taken


class Reporter:
    """Prints a line for each event.

    Args:
        opened: The study.
        quiet: Print only what went wrong.
    """

    def __init__(self, opened: OpenStudy, *, quiet: bool = False) -> None:
        self._opened = opened
        self._quiet = quiet
        self._shown = ""
        self._pruned_at_end = 0
        self._tally = Tally(opened)
        self._output = BestEffort()

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        """Print what is about to run; raises OSError as `heard` does."""
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
        """Print a message from a worker or the supervisor.

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
        """Do nothing at the end of the run: `print_summary` prints its result."""
        if self._pruned_at_end:
            self._say(f"{count_of(self._pruned_at_end, 'paused trial')} pruned, as the study has ended")

    def close(self) -> None:
        """Restore the terminal; nothing to do here."""

    def _say(self, text: str, *, trouble: bool = False) -> None:
        """Print a line; a quiet run prints only trouble, on standard error."""
        if trouble or not self._quiet:
            print(text, file=sys.stderr if self._quiet else sys.stdout)

    def _settled(self, settled: Settled) -> None:
        if settled.state == TrialState.WAITING:
            self._say(f"trial {settled.number} is requeued: {settled.reason}", trouble=True)
            return
        if settled.state == TrialState.PRUNED:  # a paused trial; there may be hundreds
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
        """Print a grant and its reason; without a scheduler, the start of a trial prints nothing."""
        if not message.grants:
            return
        until, why = message.grants[-1]["until"], message.grants[-1]["why"]
        if isinstance(message, Started):
            self._say(taken(message.number, message.epochs, until, why))
        else:
            after = granted_after(message.grants)
            self._say(f"trial {message.number} trains on after epoch {after}, {granted(until, why)}")

    def _why(self, reason: str) -> str:
        """The reason on its own line, `(as before)` if it was the last one shown; empty without a reason."""
        if not reason or reason == self._shown:
            return "" if not reason else " (as before)"
        self._shown = reason
        return f"\n    {reason}"

    def _line(self, report: TrialReport) -> str:
        """The result of a trial on a line for 80 columns, with a remark if it is the best so far."""
        metric = self._opened.spec.study.metric
        unit = "epoch " if report.epochs == 1 else "epochs"
        return (
            f"{self._count()} trial {report.number:<4} "
            f"{report.outcome or PAUSED:<8}  {metric} {shown(report.value, 5):<10} {report.epochs:>3} {unit} "
            f"{report.duration_s:>7.1f} s  {self._rank(report.number)}"
        ).rstrip()

    def _rank(self, number: int) -> str:
        """A remark if a trial is the best so far, or on the Pareto front."""
        if number not in [each["trial"] for each in self._tally.best]:
            return ""
        return "best" if len(self._opened.spec.study.goals) == 1 else "on the front"

    def _count(self) -> str:
        done, of, unit = self._tally.progress
        return f"[{done:>{len(str(of))}}/{of}{'' if unit == 'trials' else f' {unit}'}]"


class LiveReporter(Reporter):
    """A `Reporter` with a live picture of the study below the lines."""

    def __init__(self, opened: OpenStudy) -> None:
        super().__init__(opened)
        self._screen = Screen()

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        """Print what is about to run, and draw the picture."""
        super().begin(workers, placed)
        self._screen.open()
        self._screen.show(self._picture, now=True)

    def heard(self, label: str, message: Heard) -> None:
        """Print a message and redraw the picture; raises OSError if the terminal is closed."""
        super().heard(label, message)
        self._screen.show(self._picture, now=isinstance(message, TrialReport | Settled))

    def close(self) -> None:
        """Remove the picture; the lines stay."""
        self._screen.close()

    def _granted(self, message: Started | Extended) -> None:
        """Do nothing: the picture shows grants."""

    def _picture(self) -> Picture:
        return Picture(self._tally.view())


def print_summary(opened: OpenStudy, arguments: str, ending: str) -> None:
    """Print the study's result, and what to do next.

    Args:
        opened: The study.
        arguments: The arguments for the next commands, see `kept_arguments`.
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
    """Print why the run has ended before its budget was used, if it has."""
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
    """Print the Pareto front, one trial a line: none is better than another in every objective."""
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
    """The arguments that the next commands on this study need, quoted for a shell, without passwords of URLs."""
    options = {"--storage": storage, "--output-dir": output_dir}
    kept = [str(study), *(overrides or ())]
    for name, value in options.items():
        kept += [] if value is None else [name, value]
    return shlex.join(map(without_password, kept))


def same_command() -> str:
    """The running command, quoted for a shell, without passwords of URLs."""
    # Without --submission: a person's run is not a start of the submitted driver, and has its own time limit.
    words = [without_password(word) for word in sys.argv[1:] if not word.startswith("--submission=")]
    return f"{_command()} {shlex.join(words)}"


def _command() -> str:
    """The command's name or path, as a shell would find it again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m hpo"
    return "hpo" if shutil.which("hpo") or called.name == str(called) else shlex.quote(str(called))
