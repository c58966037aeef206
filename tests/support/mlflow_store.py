"""A local MLflow with its tables made once for all tests: that takes seconds."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.callbacks import mlflow_logging

if TYPE_CHECKING:
    from mlflow import MlflowClient  # takes seconds: it waits until it is needed

#: A SQLite file with this MLflow's tables, to copy; it stays for the processes of all later tests.
_EMPTY = Path(tempfile.gettempdir()) / f"hpo-tests-{os.getuid()}" / f"mlflow-{version('mlflow-skinny')}.db"


@cache
def _folder() -> Path:
    """This process's own, until it ends."""
    folder = Path(tempfile.mkdtemp(prefix="mlflow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _copy_to(file: Path) -> Path:
    """Put an empty one there, and make the first if there is none yet."""
    from mlflow import MlflowClient

    with mlflow_logging._sqlalchemys_warning_ignored():  # once in a process, where this is imported first
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    if not _EMPTY.exists():
        made = _folder() / "made.db"
        mlflow_logging._make_database(MlflowClient, f"sqlite:///{made}")
        _EMPTY.parent.mkdir(mode=0o700, exist_ok=True)
        made.replace(_EMPTY)  # whole for whoever looks
    return Path(shutil.copy(_EMPTY, file))


@cache
def uri() -> str:
    """The tracking URI of a SQLite file that all tests share."""
    return f"sqlite:///{_copy_to(_folder() / 'mlflow.db')}"


def client(of: str | None = None) -> MlflowClient:
    """Reads what is in it, or at another tracking URI."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=of or uri())


def put_copy(folder: Path) -> None:
    """Put an empty ``mlflow.db`` into a folder, where a callback with no tracking URI looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    _copy_to(folder / "mlflow.db")
