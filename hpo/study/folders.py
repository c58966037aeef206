"""The layout of a study's output folder, and the redirection of printed output into a trial's log."""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.wording import listed

#: The folders that a study makes in its output folder, and that are removed with it.
OWN_FOLDERS: Final = ("trials", "artifacts", "final", "logs", "agents")
#: The file that says to which study the output folder belongs.
OWNER_FILE: Final = "study-name.txt"
#: The folder with the checkpoints of one attempt.
CHECKPOINTS: Final = "checkpoints"
_STOP_NOTE: Final = "stopped.txt"
#: Logs that may be older than the study: of workers, from an earlier version, and of an engine (`hpo submit`).
_EARLY_LOGS: Final = ("logs/*worker-*.log", "agents/driver*.log", "agents/agent-*.log")
#: The reason given for a note that a full disk has left empty.
_CUT_OFF: Final = "the disk was full"
#: What a stream raises if it is incomplete or closed, or its disk is full.
_UNUSABLE: Final = (AttributeError, OSError, ValueError)


def make_output_folder(spec: StudySpec) -> None:
    """Make the output folder and the folder for workers' logs, and write down to which study it belongs.

    Raises:
        InputError: The folder belongs to another study.
        StudyError: It can't be made.
    """
    file = spec.output_dir / OWNER_FILE
    try:
        worker_logs(spec).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), file.open("x", encoding="utf-8") as new:
            new.write(f"{spec.study.name}\n")
    except OSError as error:
        raise unwritable(spec, error) from error
    refuse_output_of_others(spec)


def refuse_output_of_others(spec: StudySpec) -> None:
    """Refuse an output folder in which another study, or a person, has files where this study would write.

    Two studies would resume from each other's checkpoints, and `hpo delete` would remove both.

    Raises:
        InputError: It is such a folder.
    """
    owner = _owner(spec)
    foreign: list[str] = []
    if owner is None and not _has_trials(spec):  # as of versions without that file
        foreign = [name for name in OWN_FOLDERS if _holds_others(spec.output_dir / name)]
    problem = f"it holds {listed(foreign)}, which no study has made" if foreign else ""
    if owner not in (None, "", spec.study.name):
        problem = f"the study {owner} lies there"
    if problem:
        fix = "name another folder, or leave it out: then each study has its own"
        raise spec.error(problem, path="run.output_dir", value=spec.output_dir, fix=fix)


def _owner(spec: StudySpec) -> str | None:
    """The study that owns the output folder; empty if its process was killed; None without an owner file."""
    try:
        return (spec.output_dir / OWNER_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _has_trials(spec: StudySpec) -> bool:
    try:
        return any((spec.output_dir / "trials").glob("[0-9]*"))
    except OSError:  # this user can't read it, which is reported by whatever writes to the folder
        return False


def _holds_others(folder: Path) -> bool:
    """Whether the folder contains anything but logs that may be older than the study."""
    try:
        return not all(any(map(each.match, _EARLY_LOGS)) for each in folder.iterdir())
    except OSError:  # there is no such folder
        return False


def unwritable(spec: StudySpec, error: OSError) -> StudyError:
    """The error for an output folder that can't be made or written to."""
    problem = f"{spec.output_dir}: can't make the output folder: {error.strerror or error}"
    file, line = spec.location("run.output_dir")
    here = f" ({file}:{line})" if line is not None and spec.is_written("run.output_dir") else ""
    return StudyError(f"{problem}\n  fix: give another one with `run.output_dir`{here}, or `--output-dir`")


@contextlib.contextmanager
def rights_explained(spec: StudySpec) -> Iterator[None]:
    """Turn a PermissionError inside into an error that names the file.

    Raises:
        StudyError: In place of the PermissionError.
    """
    try:
        yield
    except PermissionError as error:
        problem = f"{error.filename or spec.output_dir}: can't be read: {error.strerror or error}"
        raise StudyError(f"{problem}\n  fix: ask its owner for the right to read it") from error


def worker_logs(spec: StudySpec) -> Path:
    """Folder for what workers print outside of trials, one file per worker."""
    return spec.output_dir / "logs"


def trial_folder(spec: StudySpec, number: int) -> Path:
    """Folder of one trial."""
    return spec.output_dir / "trials" / str(number)


def attempt_folder(spec: StudySpec, number: int, attempt: int) -> Path:
    """Folder of one attempt at a trial, made if needed; only that attempt writes there."""
    folder = trial_folder(spec, number) / f"attempt-{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def set_aside(spec: StudySpec, number: int, attempt: int, known: Callable[[], Collection[int]]) -> list[str]:
    """Rename existing folders of the attempt that begins now and of later attempts.

    Such folders were written for another database, which was removed or restored to an earlier state. A trial
    with other parameters must not resume from them.

    Args:
        spec: The study.
        number: The trial.
        attempt: The attempt that begins.
        known: Returns the trial's attempts in the database, whose folders are in use: this process may have been
            stopped for a while and have lost the trial to a later attempt. It is called after the folders have
            been listed, since a folder is made later than its attempt's row.

    Returns:
        The new names.
    """
    there = [folder for folder in attempt_folders(spec, number) if attempt_of(folder) >= attempt]
    later = set(known()) - {attempt} if there else set()
    names = []
    for folder in there:
        if attempt_of(folder) in later:
            continue
        count = 1
        while (aside := folder.with_name(f"{folder.name}.other-database-{count}")).exists():
            count += 1
        names.append(folder.rename(aside).name)
    return names


def attempt_folders(spec: StudySpec, number: int) -> list[Path]:
    """Folders of all attempts at a trial so far, the first attempt first."""
    found = (folder for folder in trial_folder(spec, number).glob("attempt-*") if is_attempt(folder.name))
    return sorted(found, key=attempt_of)


def attempt_of(folder: Path) -> int:
    """The number of the attempt whose folder it is."""
    return int(folder.name.removeprefix("attempt-"))


def is_attempt(name: str) -> bool:
    """Whether a folder of this name belongs to an attempt; a copy such as ``attempt-1.bak`` does not."""
    return name.startswith("attempt-") and name.removeprefix("attempt-").isdecimal()


def note_stop(spec: StudySpec, number: int, attempt: int, reason: str) -> None:
    """Write into an attempt's folder why it ends, where that can't be stored; see `stop_note`."""
    with contextlib.suppress(OSError):  # the disk itself may have failed
        (attempt_folder(spec, number, attempt) / _STOP_NOTE).write_text(reason, encoding="utf-8")


def stop_note(spec: StudySpec, number: int, attempt: int) -> str | None:
    """Why an attempt ended through no fault of its trial, if that was noted in its folder; else None."""
    file = trial_folder(spec, number) / f"attempt-{attempt}" / _STOP_NOTE
    try:
        return file.read_text(encoding="utf-8", errors="replace") or _CUT_OFF
    except OSError:
        return None


@contextlib.contextmanager
def redirect_output(log: Path) -> Iterator[None]:
    """Redirect all that this process and its children print to ``log``, including output not from Python."""
    flush_output()
    kept = [os.dup(1), os.dup(2)]
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        flush_output()
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def print_error(text: str) -> None:
    """Print to standard error, also where a study's code has replaced Python's own streams."""
    flush_output()
    with contextlib.suppress(OSError):  # the descriptor is closed, or the disk is full
        os.write(2, f"{text.rstrip()}\n".encode(errors="backslashreplace"))


def print_notice(text: str) -> None:
    """Print to standard output, where that can be written: see `flush_output`."""
    with contextlib.suppress(*_UNUSABLE):
        print(text)
    flush_output()


def flush_output() -> None:
    """Flush Python's own streams.

    A study's code may have replaced or closed one; an error in printing must not change how a trial ends.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(*_UNUSABLE):
            stream.flush()
