"""CometLogging: copies each training run to a Comet experiment."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainer.callback import TrainerView
from trainer.callbacks.cancel_tags import CANCEL_TAGS
from trainer.callbacks.history_file import Record, epoch_record
from trainer.callbacks.mirror import Mirror, Service, best_of, flat, is_outage, step_record
from trainer.state import ERROR, Mode, TrainState
from trainer.step_log import StepRecord

SERVICE: Final = Service("Comet")
#: The tag of a run that ended with an error.
FAILED_TAG: Final = "failed"
#: The metrics that number the records.
_AXES: Final = ("epoch", "step")
#: Options that switch off everything that Comet would log by itself.
_NOTHING_BY_ITSELF: Final = {
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_env_details": False,
    "parse_args": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_log_co2": False,
    "display_summary_level": 0,
}


class CometLogging(Mirror):
    """Copies each epoch's metrics to Comet, and with `StepMetrics` each step's.

    Comet mirrors what this run keeps itself: without an API key, while Comet is away, or when it fails in the
    middle, that is said once and training continues. A resumed run continues its experiment: it asks Comet which
    epochs and steps are there, and sends the others. ``COMET_START_ONLINE=false`` writes an archive into
    ``folder`` that ``comet upload`` sends later; each attempt's holds the whole history, so the newest is enough.

    The experiment ends with ``outcome`` (see `trainer.callbacks.mirror.outcome_of`), ``stop_reason``,
    ``best_epoch`` and the ``best_`` value of ``monitor`` among its other values; one that ended with an exception
    other than Ctrl-C has the tag ``failed``. A run whose experiment is tagged with one of ``cancel_tags`` on its
    page ends its epoch after the running batch, is validated, and stops with the reason ``"cancelled"``; a thread
    asks for the tags.

    Nothing is logged but what this run hands over: Comet's own observation of other libraries is switched off, and
    so are its reports about itself, unless its environment variables say otherwise.

    Args:
        project: Comet project.
        name: Name of the experiment.
        run_key: Stable key of the run, by which a resumed one continues its experiment.
        params: Parameters shown with the run; those of a `ConfigSaver` where none are given.
        tags: Tags of the experiment.
        workspace: Comet workspace; None for the account's default.
        folder: Where archives of offline experiments go; made if needed.
        monitor: The metric that says which epoch is best.
        mode: ``"min"`` or ``"max"``.
        timeout_s: Seconds to wait, when closing the experiment, for what is still to be sent; at least 1.
        cancel_tags: Tags that end the run when someone adds one of them in Comet; an empty list: no checks.
        cancel_every_s: Seconds between two checks for these tags.

    Raises:
        ImportError: comet_ml is not installed.
        ValueError: A metric is called ``epoch``, or an argument is out of range.

    Example::

        Trainer(model, optimizer, loss, callbacks=[CometLogging("digits", name="first")])

        callbacks: {comet: {workspace: team, tags: [baseline]}}  # in a study file
    """

    service = SERVICE

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        run_key: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        workspace: str | None = None,
        folder: Path | str = ".",
        monitor: str = "val_loss",
        mode: Mode = "min",
        timeout_s: int = 30,
        cancel_tags: Sequence[str] = CANCEL_TAGS,
        cancel_every_s: float = 30.0,
    ) -> None:
        if isinstance(tags, str):
            raise ValueError(f"tags is {tags!r}: give a list, [{tags}]")  # noqa: TRY004 - as for other arguments
        if timeout_s < 1:
            raise ValueError(f"timeout_s is {timeout_s}: give at least 1 second")
        super().__init__(monitor, mode, cancel_tags, cancel_every_s)
        self.project = project
        self.run_name = name
        # Comet accepts keys of 32 to 50 letters and digits.
        self.key = None if run_key is None else hashlib.sha256(run_key.encode()).hexdigest()[:40]
        self.params = dict(params or {})
        self.tags = tuple(tags)
        self.workspace = workspace
        self.folder = Path(folder)
        self.timeout_s = int(timeout_s)
        self._held: dict[str, set[int]] = {}

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the experiment, and send the part of the history that it lacks."""
        self._remote, self._held, self._error = None, {}, None
        if SERVICE.is_away:
            return
        comet_ml = _import_comet(self.timeout_s)
        try:
            self._open(comet_ml, trainer.state)
        except Exception as error:  # noqa: BLE001 - training continues when Comet can't start
            fix = "run `comet login`, or set COMET_START_ONLINE=false, which keeps runs on disk"
            what = f"this run is not shown in Comet, which could not be started ({fix})"
            SERVICE.failed(what, error, away=is_outage(error))
            return
        SERVICE.answered()
        for epoch, metrics in enumerate(trainer.state.history, start=1):
            self._log("epoch", epoch_record(epoch, metrics))
        self.on_log_steps(trainer, list(trainer.state.step_log or ()))

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Log each step."""
        for record in records:
            self._log("step", step_record(record))

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Log the epoch; Comet's step is the number of finished epochs."""
        self._log("epoch", epoch_record(trainer.state.epoch, metrics))

    def teardown(self, trainer: TrainerView) -> None:
        """Log how the run ended, and close the experiment."""
        state = trainer.state
        ends = {"outcome": self._outcome(trainer), "stop_reason": state.stop_reason}
        self._mirror(lambda one: one.log_others({**ends, **best_of(state, self.monitor, self.mode)}))
        if state.stop_reason == ERROR:
            self._mirror(lambda one: one.add_tag(FAILED_TAG))
        self._mirror(lambda one: one.end())
        self._remote = None

    def _open(self, comet_ml: Any, state: TrainState) -> None:
        online = comet_ml.get_config().get_bool(None, "comet.start.online", default=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        made = comet_ml.start(
            workspace=self.workspace,
            project_name=self.project,
            experiment_key=self.key,
            mode="get_or_create",
            online=online,
            experiment_config=comet_ml.ExperimentConfig(
                name=self.run_name, tags=list(self.tags), offline_directory=str(self.folder), **_NOTHING_BY_ITSELF
            ),
        )
        try:
            made.log_parameters(self.params or flat(state.config))
            if online:
                seen = comet_ml.APIExperiment(previous_experiment=made.get_key())
                if not state.is_new:
                    self._held = {axis: {int(at["step"]) for at in seen.get_metrics(axis)} for axis in _AXES}
                self._cancel.watch(lambda: seen.get_tags() or ())
        except Exception:
            with contextlib.suppress(Exception):  # otherwise its threads would remain
                made.end()
            raise
        self._remote = made

    def _log(self, axis: str, record: Record) -> None:
        at = int(record[axis])
        if at not in self._held.get(axis, ()):
            self._mirror(lambda one: one.log_metrics(record, step=at))


def _import_comet(timeout_s: int) -> Any:
    os.environ.setdefault("COMET_TIMEOUT_CLEANING", str(timeout_s))
    # By default, Comet would watch all libraries that it knows, and report its own errors to its makers.
    os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
    os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")
    try:
        import comet_ml
    except ImportError as error:
        raise ImportError("CometLogging needs the comet_ml package: pip install 'hpo-service[comet]'") from error
    # Its own messages would go to the console.
    logging.getLogger("comet_ml").setLevel(logging.ERROR)
    return comet_ml
