"""MLflowLogging: copies each training run to an MLflow run."""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from trainer.callback import TrainerView
from trainer.callbacks.cancel_tags import CANCEL_TAGS
from trainer.callbacks.history_file import Record, epoch_record
from trainer.callbacks.mirror import COMPLETE, Mirror, Service, best_of, flat, is_outage, step_record
from trainer.files import aside_name
from trainer.state import INTERRUPTED, PRUNED, Mode
from trainer.step_log import StepRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

Item = TypeVar("Item")

SERVICE: Final = Service("MLflow")
#: The tag by which a resumed run finds its MLflow run.
RUN_KEY_TAG: Final = "trainer.run_key"
_FAILED: Final = "FAILED"
_STATUS: Final = {COMPLETE: "FINISHED", PRUNED: "KILLED", INTERRUPTED: "KILLED"}
# The metrics that number the records and serve as their axes.
_AXES: Final = ("epoch", "step")
# MLflow's limits: characters of a name, and metrics and parameters of one request.
_LONGEST_NAME: Final = 250
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100
# Records that come faster than this are sent together, so that not each one waits for the server.
_SEND_EVERY_S: Final = 1.0
_SQLITE: Final = "sqlite:///"
_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. :/]")


class MLflowLogging(Mirror):
    """Copies each epoch's metrics, and the run's parameters, to MLflow; the step is the number of the epoch.

    With `StepMetrics` each step is shown too, over its own number, under names that begin with ``step/``.
    MLflow mirrors what this run keeps itself: where it can't be reached, or fails in the middle, that is said
    once and training continues; a resumed run sends what MLflow lacks of its history, and nothing twice. The
    run's status ends as ``FINISHED``, as ``KILLED`` if it was pruned or interrupted, else as ``FAILED``; its
    tags say ``outcome`` (see `trainer.callbacks.mirror.outcome_of`) and ``best_epoch``. They are sent about once
    a second, and at the end.

    A run that is given a tag with one of the names ``cancel_tags`` ends its epoch after the running batch, is
    validated, and stops with the reason ``"cancelled"``. A thread asks for the tags.

    Args:
        experiment: MLflow experiment; created if needed.
        name: Name of the run.
        run_key: Stable key of the run, kept as a tag, by which a resumed one continues it.
        params: Parameters shown with the run; those of a `ConfigSaver` where none are given. What a resumed run
            began with stays, as MLflow changes no parameter.
        tags: Tags of the run.
        tracking_uri: The tracking server or database. None: what MLFLOW_TRACKING_URI says, else the SQLite file
            ``mlflow.db`` in ``folder``, which ``mlflow ui --backend-store-uri sqlite:///…`` shows.
        folder: Where that file goes; runs may share it.
        monitor: The metric that says which epoch is best.
        mode: ``"min"`` or ``"max"``.
        timeout_s: Seconds to wait for a server's answer, at least 1. Each request is sent twice at most, unless
            MLflow's own environment variables say otherwise.
        cancel_tags: Names of tags that end the run when someone sets one in MLflow; an empty list: no checks.
        cancel_every_s: Seconds between two checks for these tags.

    Raises:
        ImportError: mlflow is not installed.
        ValueError: A metric is called ``epoch``, or an argument is out of range.

    Example::

        Trainer(model, optimizer, loss, callbacks=[MLflowLogging("digits", name="first", folder="runs")])

        callbacks: {mlflow: {tracking_uri: "http://tracking:5000"}}  # in a study file
    """

    service = SERVICE
    transient = (*Mirror.transient, "_run", "_waiting", "_sent")

    def __init__(
        self,
        experiment: str,
        *,
        name: str | None = None,
        run_key: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        folder: Path | str = ".",
        monitor: str = "val_loss",
        mode: Mode = "min",
        timeout_s: int = 10,
        cancel_tags: Sequence[str] = CANCEL_TAGS,
        cancel_every_s: float = 30.0,
    ) -> None:
        if timeout_s < 1:
            raise ValueError(f"timeout_s is {timeout_s}: give at least 1 second")
        super().__init__(monitor, mode, cancel_tags, cancel_every_s)
        if tags is not None and not isinstance(tags, Mapping):
            raise ValueError(f"tags is {tags!r}: give names and values, {{stage: test}}")
        self.experiment = experiment
        self.run_name = name
        self.run_key = None if run_key is None else _NOT_IN_NAMES.sub("_", run_key)  # it becomes part of a query
        self.params = dict(params or {})
        self.tags = {_name(key): str(value) for key, value in (tags or {}).items()}
        self.tracking_uri = tracking_uri
        self.folder = Path(folder)
        self.timeout_s = int(timeout_s)
        self._run = ""
        self._held: dict[str, set[int]] = {}
        self._waiting: list[Metric] = []
        self._sent = 0.0

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the run, and send the part of the history that it lacks."""
        self._remote, self._error, self._waiting, self._held = None, None, [], {}
        if SERVICE.is_away:
            return
        client_type = _import_client(self.timeout_s)
        try:
            with _sqlalchemys_warning_ignored():
                uri = self._uri()
                _make_database(client_type, uri)
                self._open(client_type(tracking_uri=uri), self.params or flat(trainer.state.config))
        except Exception as error:  # noqa: BLE001 - training continues when MLflow can't start
            what = "this run is not shown in MLflow, which could not be started"
            SERVICE.failed(what, error, away=is_outage(error))
            return
        SERVICE.answered()
        watching, run = client_type(tracking_uri=uri), self._run
        self._cancel.watch(lambda: watching.get_run(run).data.tags)
        for epoch, metrics in enumerate(trainer.state.history, start=1):
            self._add("epoch", epoch_record(epoch, metrics))
        for record in trainer.state.step_log or ():
            self._add("step", step_record(record))
            if len(self._waiting) >= _METRICS_AT_ONCE:
                self._send()
        self._send()

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Add the steps, and send all waiting metrics if it is time."""
        for record in records:
            self._add("step", step_record(record))
        self._send_in_time()

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Add the epoch, and send all waiting metrics if it is time."""
        self._add("epoch", epoch_record(trainer.state.epoch, metrics))
        self._send_in_time()

    def teardown(self, trainer: TrainerView) -> None:
        """Send the rest, and close the run."""
        outcome = self._outcome(trainer)
        if self._remote is None:
            return
        ends = {"outcome": outcome, **best_of(trainer.state, self.monitor, self.mode)}
        self._send()
        self._mirror(lambda client: client.log_batch(self._run, tags=_tags(ends)))
        self._mirror(lambda client: client.set_terminated(self._run, _STATUS.get(outcome, _FAILED)))
        self._remote = None

    def _uri(self) -> str:
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        return uri or f"{_SQLITE}{(self.folder / 'mlflow.db').resolve()}"

    def _open(self, client: MlflowClient, shown: Mapping[str, Any]) -> None:
        """Find the run of an earlier attempt, or make one."""
        experiment = self._experiment_id(client)
        found = self._find(client, experiment)
        shown = {_name(name): value for name, value in shown.items()}
        if found is None:
            key = {} if self.run_key is None else {RUN_KEY_TAG: self.run_key}
            self._run = client.create_run(experiment, run_name=self.run_name, tags=self.tags | key).info.run_id
        else:
            self._run = found
            client.update_run(found, status="RUNNING")
            # MLflow refuses new values, for example after the length of the run was raised.
            began_with = client.get_run(found).data.params
            shown = {name: value for name, value in shown.items() if name not in began_with}
            # The number of an epoch or step is sent as its last metric: if it is there, all of its metrics are.
            self._held = {
                axis: {metric.step for metric in client.get_metric_history(found, axis)} for axis in _AXES
            }
        try:
            for params in _cut(_params(shown), _PARAMS_AT_ONCE):
                client.log_batch(self._run, params=params)
        except Exception:
            with contextlib.suppress(Exception):  # otherwise the run would be shown as running
                client.set_terminated(self._run, _FAILED)
            raise
        self._remote = client

    def _experiment_id(self, client: MlflowClient) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        local = self._uri().startswith(_SQLITE)  # its artifacts would go to the working directory
        place = (self.folder / "mlartifacts").resolve().as_uri() if local else None
        try:
            return str(client.create_experiment(self.experiment, artifact_location=place))
        except MlflowException:  # another worker was faster
            found = client.get_experiment_by_name(self.experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def _find(self, client: MlflowClient, experiment: str) -> str | None:
        if self.run_key is None:
            return None
        runs = client.search_runs([experiment], f"tags.`{RUN_KEY_TAG}` = '{self.run_key}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _add(self, axis: str, record: Record) -> None:
        """Add the record of an epoch or a step to the waiting metrics, unless MLflow has it."""
        number = int(record.pop(axis))
        if self._remote is None or number in self._held.get(axis, ()):
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [*record.items(), (axis, number)]
        self._waiting += [Metric(_name(name), value, now, number) for name, value in numbers]

    def _send_in_time(self) -> None:
        if time.monotonic() - self._sent >= _SEND_EVERY_S:
            self._send()

    def _send(self) -> None:
        for metrics in _cut(self._waiting, _METRICS_AT_ONCE):
            self._mirror(lambda client, metrics=metrics: client.log_batch(self._run, metrics=metrics))  # type: ignore[misc]
        self._waiting = []
        self._sent = time.monotonic()


def _import_client(timeout_s: int) -> type[MlflowClient]:
    # MLflow reads these at each request; by default, it would retry for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(timeout_s))
    # Nothing is sent anywhere but to the run's tracking server.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise ImportError("MLflowLogging needs the mlflow package: pip install 'hpo-service[mlflow]'") from error
    return MlflowClient


@contextlib.contextmanager
def _sqlalchemys_warning_ignored() -> Iterator[None]:
    """Ignore a deprecation warning of SQLAlchemy 2.1 about how MLflow 3.17 maps its tables."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy is deprecated")
        yield


def _make_database(client_type: type[MlflowClient], uri: str) -> None:
    """Make a SQLite file with MLflow's tables atomically, if it does not exist.

    MLflow itself makes the tables one by one, so two workers that start together would interfere.
    """
    if not uri.startswith(_SQLITE):
        return
    path = Path(uri.removeprefix(_SQLITE))
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_name(path)
    try:
        client_type(tracking_uri=f"{_SQLITE}{aside}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another worker was faster
            path.hardlink_to(aside)
    finally:
        aside.unlink(missing_ok=True)


def _params(params: Mapping[str, Any]) -> list[Param]:
    from mlflow.entities import Param

    return [Param(name, str(value)) for name, value in params.items()]


def _tags(tags: Mapping[str, Any]) -> list[RunTag]:
    from mlflow.entities import RunTag

    return [RunTag(_name(name), str(value)) for name, value in tags.items()]


def _name(name: str) -> str:
    """The name without what MLflow refuses in names, which it treats as paths."""
    parts = [part for part in _NOT_IN_NAMES.sub("_", name).split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:_LONGEST_NAME].rstrip("/") or "_"


def _cut(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
