"""The errors this package raises for people to read; the command line maps each to its exit code."""

from pathlib import Path
from typing import Final

#: Characters of a path that are shown.
_SHOWN: Final = 160


class HpoError(Exception):
    """Base of every error with a message meant for a person.

    ``exit_code`` is what the command line ends with when the error reaches it.
    """

    exit_code = 3


class InputError(HpoError):
    """What a person wrote (a study file, an override, an option) can't be used.

    Its text is ``FILE:LINE: dotted.path: what is wrong`` followed by the value and the fix, each on a line of
    its own; the location parts are left out where there are none.

    Args:
        problem: What is wrong, as one short clause.
        file: The file it stands in; for an override, the text ``command line``.
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
        self.problem = problem
        self.file = file
        self.line = line
        self.path = path
        self.value = value
        self.fix = fix
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
