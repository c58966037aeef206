"""A local MLflow with its tables made once for all tests of this process: that takes seconds."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from mlflow import MlflowClient

from trainer.callbacks import mlflow_logging


@cache
def uri() -> str:
    """The tracking URI of a SQLite file that all tests share."""
    folder = Path(tempfile.mkdtemp(prefix="mlflow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = f"sqlite:///{folder / 'mlflow.db'}"
    with mlflow_logging._sqlalchemys_warning_ignored():
        mlflow_logging._make_database(MlflowClient, made)
    return made


def client() -> MlflowClient:
    """Reads what is in it."""
    return MlflowClient(tracking_uri=uri())


def put_copy(folder: Path) -> None:
    """Put an empty ``mlflow.db`` into a folder, where a callback with no tracking URI looks for it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(uri().removeprefix("sqlite:///"), folder / "mlflow.db")
