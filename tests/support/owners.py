"""Studies as several owners of trials see them, in one process or in many."""

import contextlib
import multiprocessing
import subprocess
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from hpo.storage import ledger, machine
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.study_storage import StudyStorage
from hpo.trial import mainless

NAME = "study"
forked = multiprocessing.get_context("forkserver")
# One fork server for all: the supervisor's tests, in the same process, ask for hpo.execution.launchers.preload.
mainless.SERVER = forkserver._forkserver
forked.set_forkserver_preload(
    [
        "pytest",
        "hpo.storage.opening",
        "sqlalchemy.dialects.sqlite",
        "sqlalchemy.dialects.postgresql.psycopg",
        "hpo.execution.launchers.preload",
        "torch._dynamo",  # an optimizer imports it: seconds, in each process of the tests of several
    ]
)


@contextlib.contextmanager
def opened(url: str, *, owner: Owner | None = None, create: bool = False) -> Iterator[StudyStorage]:
    storage = open_storage(url, create=create, owner=owner)
    try:
        yield storage
    finally:
        storage.close()


def load(storage: StudyStorage, seed: int = 0) -> optuna.Study:
    return optuna.load_study(study_name=NAME, storage=storage, sampler=optuna.samplers.RandomSampler(seed=seed))


def make_study(url: str, n_trials: int | None, enqueued: int = 0) -> None:
    with opened(url, create=True) as storage:
        study = optuna.create_study(study_name=NAME, storage=storage)
        if n_trials is not None:
            storage.set_budget(study._study_id, n_trials)
        for i in range(enqueued):
            study.enqueue_trial({"x": i / 1000}, user_attrs={"ticket": i})


def study_id(storage: StudyStorage) -> int:
    return storage.get_study_id_from_name(NAME)


def running(storage: StudyStorage) -> list[ledger.RunningTrial]:
    with storage.engine.connect() as conn:
        return ledger.running_trials(conn, study_id(storage))


def trials(url: str) -> list[FrozenTrial]:
    with opened(url) as storage:
        return storage.get_all_trials(study_id(storage))


def attempts(url: str) -> list[ledger.Attempt]:
    with opened(url) as storage, storage.engine.connect() as conn:
        return ledger.attempts(conn, study_id(storage))


def dead_owner(**changes: Any) -> Owner:
    """An owner whose process has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    owner = Owner(machine.host_name(), machine.boot_id(), process.pid, 1.0, "dead")
    return Owner(**(vars(owner) | changes))
