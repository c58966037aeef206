"""`hpo logs`."""

from __future__ import annotations

import codecs
import time
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec, uncollected
from hpo.console.output import flushed, read_by_others
from hpo.errors import StudyError

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.study.open_study import OpenStudy

#: Seconds between two reads of the log, and how many of these follow each query of the database.
_PAUSE: Final = 0.2
_LOOKS: Final = 5
_CHUNK: Final = 1 << 20


def logs(
    study: StudyFile,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", min=0, help="The trial's number.", show_default=False)],
    overrides: Overrides = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the trial ends.")] = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Print the output of a trial, of all its attempts.

    Example: hpo logs study.yaml 7 -f
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    with uncollected():
        from hpo.study.open_study import load_study

        opened = load_study(spec)
    with opened:
        outcome = _outcome(opened, trial)
        log = _Log(opened, trial)
        with read_by_others():
            if follow:
                _follow(opened, log)
            else:
                log.print_new()
        if not log.found:
            raise _no_log(opened, trial, outcome)


def _follow(opened: OpenStudy, log: _Log) -> None:
    """Print until the database says that the trial has ended; while it can't be reached, printing continues."""
    from hpo.storage.outage import DatabaseAwayError

    looks, ended = 0, False
    while not ended:
        if looks % _LOOKS == 0:
            try:
                with opened.storage.patience.whole():
                    # Queried before the log is read: all output of a trial is written before its end.
                    ended = log.trial_has_ended()
            except DatabaseAwayError:
                ended = False
        log.print_new()
        looks += 1
        if not ended:
            time.sleep(_PAUSE)


class _Log:
    """The logs of a trial's attempts, and how far each has been printed."""

    def __init__(self, opened: OpenStudy, number: int) -> None:
        self._opened = opened
        self._number = number
        self._read: dict[Path, tuple[int, codecs.IncrementalDecoder]] = {}
        self._last: Path | None = None
        self._inside_line = False

    @property
    def found(self) -> bool:
        """Whether there is a log, even an empty one."""
        return bool(self._read)

    def trial_has_ended(self) -> bool:
        """Whether the trial has ended, so that it prints nothing more."""
        from hpo.study.outcome import UNFINISHED

        return _outcome(self._opened, self._number) not in UNFINISHED

    def print_new(self) -> None:
        """Print what was written since the last time; raises OSError if the reader is gone."""
        from hpo.study.folders import attempt_folders, rights_explained

        spec = self._opened.spec
        with rights_explained(spec):
            logs = [folder / "log.txt" for folder in attempt_folders(spec, self._number)]
            there = [log for log in logs if log.is_file()]
        for log in there:
            self._print(log, named=len(logs) > 1)

    def _print(self, log: Path, *, named: bool) -> None:
        position, decoder = self._read.setdefault(log, (0, codecs.getincrementaldecoder("utf-8")("replace")))
        with _readable(log) as file:
            file.seek(position)
            while chunk := file.read(_CHUNK):
                text = decoder.decode(chunk)
                with flushed():
                    if named and self._last != log:
                        attempt = log.parent.name.replace("-", " ")
                        print(f"{chr(10) if self._inside_line else ''}==> {attempt} <==")
                    print(text, end="")
                self._last, self._inside_line = log, not text.endswith("\n")
                self._read[log] = file.tell(), decoder


def _readable(log: Path) -> BinaryIO:
    try:
        return log.open("rb")
    except OSError as error:
        problem = f"{log}: can't be read: {error.strerror or error}"
        raise StudyError(f"{problem}\n  fix: ask its owner for the right to read it") from error


def _outcome(opened: OpenStudy, number: int) -> str:
    """A trial's outcome, or its state if it has not ended.

    Raises:
        StudyError: The study has no such trial, or has been deleted.
    """
    from hpo.study.outcome import outcome_of
    from hpo.study.own_trials import own_trials

    outcomes = {trial.number: outcome_of(trial) for trial in own_trials(opened)}
    if number not in outcomes:
        opened.refuse_deleted()
        which, fix = "yet", "run the study first, with `hpo run`"
        if outcomes:
            which, fix = str(number), f"its trials are 0 to {max(outcomes)}"
        raise StudyError(f"the study {opened.spec.study.name} has no trial {which}\n  fix: {fix}")
    return outcomes[number]


def _no_log(opened: OpenStudy, number: int, outcome: str) -> StudyError:
    from hpo.study.folders import trial_folder
    from hpo.study.outcome import UNFINISHED

    if outcome in UNFINISHED:
        fix = "`--follow` waits for it"
        return StudyError(f"trial {number} is {outcome} and has no log yet\n  fix: {fix}")
    folder = trial_folder(opened.spec, number)
    fix = "it lies in the output folder of the machine that ran the trial: name that with `--output-dir`"
    return StudyError(f"trial {number} has no log in {folder}\n  fix: {fix}")
