"""Defines Finding: a warning about a study file that can be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpo.config.spec import StudySpec
from hpo.errors import InputError


@dataclass(frozen=True)
class Finding:
    """A warning about one place in a study file; its text has the layout of an `InputError`.

    Attributes:
        problem: What is odd, as one short clause.
        path: Dotted path of the key.
        file: The file it stands in, or ``command line``; None if it was not written.
        line: Line in that file, counted from 1.
        value: The value as the person wrote it.
        fix: What to do, as one sentence.
    """

    problem: str
    path: str = ""
    file: str | None = None
    line: int | None = None
    value: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return str(
            InputError(
                self.problem, file=self.file, line=self.line, path=self.path, value=self.value, fix=self.fix
            )
        )


def finding(spec: StudySpec, problem: str, *, path: str, value: Any = "", fix: str = "") -> Finding:
    """A finding at a dotted path of a study file."""
    return as_finding(spec.error(problem, path=path, value=value, fix=fix))


def as_finding(error: InputError) -> Finding:
    """An error as a warning."""
    file = None if error.file is None else str(error.file)
    return Finding(error.problem, error.path, file, error.line, error.value, error.fix)
