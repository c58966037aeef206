"""Studies of a few trials in a real database, opened as workers open them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch

from hpo.config.spec import StudySpec, load_spec
from hpo.search.schedulers.scheduler import Wait
from hpo.storage.ledger import Lease, Owner
from hpo.study.folders import attempt_folder, attempt_folders
from hpo.study.open_study import OpenStudy, load_study, start_study
from hpo.study.taking import Taker, begin
from hpo.trial.checkpoints import Checkpoints
from hpo.trial.reports import Reports
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from tests.support.commands import MODEL, STUDY, make_study


@dataclass(frozen=True)
class Studies:
    """Opens studies; their database is a copy of one that has the tables.

    Attributes:
        folder: A study goes here unless it names a folder.
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


def at_once(work: Callable[[OpenStudy], None], views: list[OpenStudy]) -> None:
    """Do the work of several workers, each in a thread with a view of its own, to their ends."""
    threads = [threading.Thread(target=work, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def session_of(
    view: OpenStudy,
    trial: optuna.Trial,
    *,
    kind: type[Reports] = Reports,
    request: StopRequest | None = None,
    pulse: Callable[[Session], None] = lambda _: None,
) -> Session:
    """A session of a running trial, without a `TrialRun` around it."""
    spec, attempt = view.spec, view.storage.attempt_of(trial._trial_id)
    folder = attempt_folder(spec, trial.number, attempt)
    params = view.space.suggest(trial)
    return Session(
        number=trial.number,
        params=params,
        config=spec.resolve(params),
        folder=folder,
        device=torch.device("cpu"),
        seed=view.trial_seed(trial.number, params),
        mode=spec.study.mode,
        reports=kind(trial, spec.study.metric, view.scheduler),
        checkpoints=Checkpoints(attempt_folders(spec, trial.number)),
        request=request or StopRequest(),
        lease=Lease(trial._trial_id, attempt),
        process=view.storage.process,
        pulse=pulse,
    )


def ask(view: OpenStudy) -> tuple[optuna.Trial, dict[str, Any]]:
    """The next trial and its parameters."""
    trial = view.study.ask()
    return trial, view.space.suggest(trial)


def take(view: OpenStudy) -> optuna.Trial | Wait | None:
    """As `Taker.take`, the trial begun."""
    taken = Taker(view).take()
    return begin(view, taken) if isinstance(taken, Lease) else taken
