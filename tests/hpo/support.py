"""Studies of a few trials in a real database, opened as workers open them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from hpo.config.spec import StudySpec, load_spec
from hpo.storage.ledger import Owner
from hpo.study.open_study import OpenStudy, load_study, start_study
from tests.acceptance.support import MODEL, STUDY, make_study


@dataclass(frozen=True)
class Studies:
    """Opens studies; their database is a copy of one that has the tables.

    Attributes:
        folder: A study goes here when it is not told where.
        ready: The database to copy.
    """

    folder: Path
    ready: Path

    def spec(self, *overrides: str, text: str = STUDY, code: str = MODEL, at: str = "") -> StudySpec:
        """The study file of a folder, written if it is not there."""
        file = self.folder / at / "study.yaml"
        if not file.exists():
            make_study(file.parent, text, code)
        return load_spec(file, overrides)

    @contextmanager
    def open(
        self, *overrides: str, text: str = STUDY, code: str = MODEL, at: str = "", views: int = 1
    ) -> Iterator[list[OpenStudy]]:
        """The study as several workers see it: each has a storage, a cache and a sampler of its own."""
        spec = self.spec(*overrides, text=text, code=code, at=at)
        file = spec.output_dir / "study.db"
        if spec.run.storage is None and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.ready, file)
        start_study(spec).storage.close()
        studies = [load_study(spec, Owner.current(worker=f"worker-{index}")) for index in range(views)]
        try:
            yield studies
        finally:
            for study in studies:
                study.storage.close()


def ask(view: OpenStudy) -> tuple[optuna.Trial, dict[str, Any]]:
    """The next trial and its parameters."""
    trial = view.study.ask()
    return trial, view.space.suggest(trial)
