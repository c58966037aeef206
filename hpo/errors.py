"""The errors whose texts users read; each has the exit code of a command that it ends."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

#: At most this many characters of a path are shown.
_SHOWN: Final = 160
#: The error numbers of a disk that is full, over its quota or read-only.
_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: The names under which database drivers take a password in a URL's query.
PASSWORD_KEYS: Final = frozenset({"password", "passwd", "sslpassword", "ssl_key_password"})
#: A URL's password: before its host, and in its query.
_PASSWORD: Final = re.compile(r"(?<=://)([^\s:/@]*):\S+@")
_IN_QUERY: Final = re.compile(rf"(?<=[?&])({'|'.join(sorted(PASSWORD_KEYS))})=[^&\s\"'`]+")


class HpoError(Exception):
    """Base class of all errors whose message is meant for users.

    ``exit_code`` is the exit code of a command that ends with this error.
    """

    exit_code = 3


class InputError(HpoError):
    """A study file, an override, an option or an argument can't be used.

    Its text is ``FILE:LINE: dotted.path: what is wrong`` followed by the value and the fix, each on its own line;
    parts that are not known are left out. No part shows the password of a URL.

    Args:
        problem: What is wrong, as one short clause.
        file: The file that contains it; for an override, the text ``command line``.
        line: Line number in that file, counted from 1.
        path: Dotted path of the offending key.
        value: The offending value as the person wrote it; left out of the text when empty.
        fix: What to do, as one sentence.
    """

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        file: Path | str | None = None,
        line: int | None = None,
        path: str = "",
        value: str = "",
        fix: str = "",
    ) -> None:
        self.problem = without_password(problem)
        self.file = file
        self.line = line
        self.path = without_password(path)
        self.value = without_password(value)
        self.fix = without_password(fix)
        super().__init__(str(self))

    def __str__(self) -> str:
        where = "" if self.file is None else f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        path = self.path if len(self.path) <= _SHOWN else self.path[: _SHOWN - 1] + "…"
        first = where + (f"{path}: " if path else "") + self.problem
        lines = [first]
        if self.value:
            lines.append(f"  value: {self.value}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def without_password(text: str) -> str:
    """The text with the passwords of its URLs replaced by stars."""
    return _IN_QUERY.sub(r"\1=***", _PASSWORD.sub(r"\1:***@", text))


class SeveralInputError(InputError):
    """Several input errors at once: its text has all of them, and its attributes are those of the first.

    Attributes:
        errors: The single errors.
    """

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(
            first.problem, file=first.file, line=first.line, path=first.path, value=first.value, fix=first.fix
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return SeveralInputError, (self.errors,)


def each_error(error: InputError) -> tuple[InputError, ...]:
    """The single errors that an error combines, or the error itself."""
    return error.errors if isinstance(error, SeveralInputError) else (error,)


@contextlib.contextmanager
def collected(errors: list[InputError]) -> Iterator[None]:
    """Catch an InputError of the block and append it to `errors`; raise them all later, see `together`."""
    try:
        yield
    except InputError as error:
        errors += each_error(error)


def together(errors: Sequence[InputError]) -> InputError:
    """Combine one or more errors into one, without duplicates and in the order of their lines."""
    different = list(
        {(str(error.file), error.line, error.path, error.problem): error for error in errors}.values()
    )
    if len(different) == 1:
        return different[0]
    several = SeveralInputError(sorted(different, key=lambda error: error.line or 0))
    several.__cause__ = several.errors[0].__cause__
    return several


def refuse_other_systems() -> None:
    """Refuse an operating system that can't fork workers.

    Raises:
        StudyError: The system is Windows (outside of WSL).
    """
    if os.name != "posix":
        raise StudyError(
            "hpo runs on Linux, on macOS and in WSL; Windows itself can't fork the processes that trials run in\n"
            "  fix: install WSL with `wsl --install`, and install and run hpo in it"
        )


def refuse_process_groups() -> None:
    """Refuse to run as one of several processes that torchrun has started.

    Raises:
        InputError: torchrun started this process: each process would run the study, with workers in the group.
    """
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"this is one of {os.environ['WORLD_SIZE']} processes that torchrun has started, and each would work "
            "on the study as if it were alone",
            fix="start hpo without torchrun: `--workers` starts processes, each with trials of its own",
        )


class StudyError(HpoError):
    """The study failed, or lacks what was asked for (no finished trial, no storage, …)."""


class BudgetExhaustedError(StudyError):
    """Every trial of the study's budget has been claimed; a worker that sees it has nothing more to do."""


class ForkedProcessError(StudyError):
    """A fork of the process that runs a trial wants to use the storage, which is that process's alone."""


class LeaseLostError(StudyError):
    """Another attempt owns the trial now; nothing of this attempt may be stored any more."""


class OtherCodeError(StudyError):
    """The study's code is neither that which it was started with nor a change that a person accepted."""


def for_the_disk(reason: str) -> bool:
    """Whether a trial failed for a disk that takes nothing more: so will the next one, however many succeeded."""
    return any(os.strerror(number) in reason for number in _DISK)
