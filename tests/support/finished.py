"""A study with a few trials at their end, trained once for all tests of a file that look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpo.study.open_study import OpenStudy
from tests.support.attempts import run
from tests.support.studies import Studies


@contextmanager
def finished_study(folder: Path, ready: Path, *overrides: str, n_trials: int = 3) -> Iterator[OpenStudy]:
    """The study in this folder, opened, with its trials trained."""
    with Studies(folder, ready).open(*overrides) as (view,):
        for _ in range(n_trials):
            run(view)
        yield view
