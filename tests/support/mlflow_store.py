"""A local MLflow with its tables made once for all tests of this process: that takes seconds."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.callbacks import mlflow_logging

if TYPE_CHECKING:
    from mlflow import MlflowClient  # takes seconds: it waits until it is needed


@cache
def _empty() -> Path:
    """A SQLite file with MLflow's tables, to copy."""
    from mlflow import MlflowClient

    folder = Path(tempfile.mkdtemp(prefix="mlflow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with mlflow_logging._sqlalchemys_warning_ignored():
        mlflow_logging._make_database(MlflowClient, f"sqlite:///{folder / 'empty.db'}")
    return folder / "empty.db"


@cache
def uri() -> str:
    """The tracking URI of a SQLite file that all tests share."""
    return f"sqlite:///{shutil.copy(_empty(), _empty().with_name('mlflow.db'))}"


def client(of: str | None = None) -> MlflowClient:
    """Reads what is in it, or at another tracking URI."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=of or uri())


def put_copy(folder: Path) -> None:
    """Put an empty ``mlflow.db`` into a folder, where a callback with no tracking URI looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(_empty(), folder / "mlflow.db")
