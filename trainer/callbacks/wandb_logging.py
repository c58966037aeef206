"""WandbLogging: copies each training run to a W&B run."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainer.callback import TrainerView
from trainer.callbacks.cancel_tags import CANCEL_TAGS
from trainer.callbacks.history_file import epoch_record
from trainer.callbacks.mirror import Mirror, Service, best_of, epoch_place, is_outage, sequence, step_places
from trainer.checkpoint.manager import verified_checkpoint
from trainer.state import ERROR, INTERRUPTED, Mode, TrainState
from trainer.step_log import StepRecord

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

SERVICE: Final = Service("W&B")
#: Seconds between writes of an offline run's file, the most that a killed process loses. W&B's own default is 15.
_FLUSH_S: Final = 1.0
#: Seconds that reading an offline file may take.
_READING_S: Final = 60.0


class NotLoggedInError(Exception):
    """There is no login to W&B on this machine."""


class WandbLogging(Mirror):
    """Copies each epoch's metrics to Weights & Biases, one record per epoch, and with `StepMetrics` each step's.

    W&B's own step is the number of the epoch; with `StepMetrics` it counts the steps and epochs before the record,
    and charts are drawn over ``epoch``, or ``step`` for the names that begin with ``step/``.

    ``WANDB_MODE=offline`` writes the run to disk, and ``wandb sync`` sends it later. W&B only gets a copy: if
    there is no login, or W&B can't be reached or fails, a warning is logged once and training continues. A resumed
    run first sends the epochs of its history that W&B lacks. W&B's server says which these are; offline, where
    each attempt has its own file, the files of the earlier attempts do, so that their steps join without overlap.

    The run's summary ends with ``outcome`` (``complete``, ``pruned``, ``diverged``, ``out_of_memory``, ``error``,
    ``interrupted``), ``stop_reason``, ``best_epoch`` and the ``best_`` value of ``monitor``. A run that ended with
    an exception is marked as failed, unless it was pruned, or interrupted by Ctrl-C.

    A run that is tagged with one of ``cancel_tags`` on its page ends its epoch after the running batch, is
    validated, and stops with the reason ``"cancelled"``. A thread asks W&B's server for the tags, but not offline.

    Args:
        project: W&B project.
        group: Group of the run, such as the study.
        job_type: What kind of run it is, such as ``trial``.
        name: Name of the run.
        run_id: Stable id of the run, so that a resumed one continues it. A run that
            starts over from the first epoch needs another id.
        config: Parameters shown with the run; those of a `ConfigSaver` where none are given.
        notes: A text shown with the run.
        folder: Where W&B keeps its files; made if needed.
        earlier: The ``folder`` of each earlier attempt at this run.
        entity: W&B user or team; None for the login's default.
        tags: Tags of the run.
        monitor: The metric that says which epoch is best.
        mode: ``"min"`` or ``"max"``.
        log_model: Whether to send the best epoch's checkpoint as an artifact when the run has ended.
        checkpoints: Folders in which to look for that checkpoint.
        timeout_s: Seconds that opening the run may wait for W&B, and closing it for what is still to be sent;
            what is not sent by then stays on disk, for ``wandb sync``.
        cancel_tags: Tags that end the run when someone adds one of them in W&B; an empty list: no checks.
        cancel_every_s: Seconds between two checks for these tags.

    Raises:
        ImportError: wandb is not installed.
        ValueError: A metric is called ``epoch``, or an argument is out of range.

    Example::

        Trainer(model, optimizer, loss, callbacks=[WandbLogging("digits", name="first", run_id="first")])

        callbacks: {wandb: {project: digits, tags: [baseline], log_model: true}}  # in a study file
    """

    service = SERVICE
    transient = (*Mirror.transient, "_axes")

    def __init__(
        self,
        project: str,
        *,
        group: str | None = None,
        job_type: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        notes: str | None = None,
        folder: Path | str = ".",
        earlier: Sequence[Path | str] = (),
        entity: str | None = None,
        tags: Sequence[str] = (),
        monitor: str = "val_loss",
        mode: Mode = "min",
        log_model: bool = False,
        checkpoints: Sequence[Path | str] = (),
        timeout_s: float = 30.0,
        cancel_tags: Sequence[str] = CANCEL_TAGS,
        cancel_every_s: float = 30.0,
    ) -> None:
        if isinstance(tags, str):
            raise ValueError(f"tags is {tags!r}: give a list, [{tags}]")  # noqa: TRY004 - as for other arguments
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}: give seconds above 0")
        super().__init__(monitor, mode, cancel_tags, cancel_every_s)
        self.project = project
        self.group = group
        self.job_type = job_type
        self.run_name = name
        self.run_id = run_id
        self.config = dict(config or {})
        self.notes = notes
        self.folder = Path(folder)
        self.earlier = tuple(map(Path, earlier))
        self.entity = entity
        self.tags = tuple(tags)
        self.log_model = log_model
        self.checkpoints = tuple(map(Path, checkpoints))
        self.timeout_s = timeout_s
        self._held: set[int] = set()
        self._axes: set[str] | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the run, and send the part of the history that it lacks."""
        self._error = None
        self._held = set()
        self._remote = self._opened(trainer.state)
        if self._remote is None:
            return
        if self._remote.url:
            self._cancel.watch(tags_of(self._remote.path, self.timeout_s))
        first = self._remote.starting_step  # the step after the last one of a resumed run, else 0
        self._axes = set() if trainer.state.step_log is not None else None
        for place, record in sequence(trainer.state):
            if place >= first:
                self._log(place, record)

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Log each step as one record."""
        for place, record in step_places(records):
            self._log(place, record)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Log the epoch as one record."""
        epoch = trainer.state.epoch
        self._log(epoch_place(trainer.state, epoch), epoch_record(epoch, metrics))

    def teardown(self, trainer: TrainerView) -> None:
        """Send the summary, and the model if asked for, and close the run."""
        state, outcome = trainer.state, self._outcome(trainer)
        summary = {"outcome": outcome, "stop_reason": state.stop_reason, **best_of(state, self.monitor, self.mode)}
        self._mirror(lambda run: run.summary.update(summary))
        if self.log_model and outcome != INTERRUPTED:
            self._mirror(lambda run: self._send_model(run, state))
        exit_code = 1 if state.stop_reason == ERROR else 0
        self._mirror(lambda run: run.finish(exit_code=exit_code))
        self._remote = None

    def _opened(self, state: TrainState) -> wandb.Run | None:
        """The opened run; None, with a warning, if it can't be opened."""
        if SERVICE.is_away:
            return None
        files, run = self._files(), None
        _see_wandb()
        try:
            run = self._open(self.config or dict(state.config))
            if getattr(run, "offline", False):
                self._held = {step for file in files for step in _logged_steps(file)}
        except NotLoggedInError:
            fix = "run `wandb login`, or set WANDB_MODE to offline or disabled"
            SERVICE.failed("this run is not shown in W&B", f"not logged in; {fix}")
        except Exception as error:  # noqa: BLE001 - training continues when W&B can't start
            away = is_outage(error)
            fix = " (WANDB_MODE=offline keeps runs on disk)" if away else ""
            SERVICE.failed(f"this run is not shown in W&B, which could not be started{fix}", error, away=away)
            if run is not None:
                with contextlib.suppress(Exception):
                    run.finish(exit_code=1)
            _drop_service()
        else:
            SERVICE.answered()
            return run
        return None

    def _files(self) -> list[Path]:
        """The offline files of earlier attempts, oldest first."""
        pattern = f"wandb/offline-run-*/run-{glob.escape(self.run_id)}.wandb" if self.run_id else None
        return [file for folder in (*self.earlier, self.folder) if pattern for file in folder.glob(pattern)]

    def _open(self, config: dict[str, Any]) -> wandb.Run:
        import wandb

        _require_login()
        self.folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            job_type=self.job_type,
            name=self.run_name,
            notes=self.notes,
            id=self.run_id,
            resume="allow" if self.run_id else None,
            config=config,
            dir=str(self.folder),
            tags=self.tags,
            reinit="finish_previous",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=self.timeout_s,
                finish_timeout=self.timeout_s,
                finish_timeout_raises=True,
                x_transaction_log_flush_interval=_FLUSH_S,
            ),
        )

    def _log(self, place: int, record: Mapping[str, float]) -> None:
        if place in self._held:
            return
        if self._axes is not None:  # draw steps and epochs each over their own number
            axis = next(iter(record))
            for name in record.keys() - self._axes - {axis}:
                self._mirror(lambda run, name=name: run.define_metric(name, step_metric=axis))  # type: ignore[misc]
            self._axes |= record.keys()
        self._mirror(lambda run: run.log(dict(record), step=place))

    def _send_model(self, run: wandb.Run, state: TrainState) -> None:
        import wandb

        best = best_of(state, self.monitor, self.mode)
        found = verified_checkpoint(self.checkpoints, best["best_epoch"]) if best else None
        if found is None:
            logger.warning("W&B gets no model: there is no checkpoint of the best epoch")
            return
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=best)
        artifact.add_file(str(found.path))
        run.log_artifact(artifact)

    def _let_go(self) -> None:
        _drop_service()


def tags_of(path: str, timeout_s: float) -> Callable[[], Sequence[str]]:
    """A function that asks W&B's server for the present tags of a run.

    Args:
        path: The run's path: entity, project and id.
        timeout_s: Seconds to wait for an answer.
    """
    asked: list[Any] = []

    def ask() -> Sequence[str]:
        import wandb

        if asked:
            asked[0].load(force=True)
        else:
            asked.append(wandb.Api(timeout=math.ceil(timeout_s)).run(path))
        tags: Sequence[str] = asked[0].tags
        return tags

    return ask


def _see_wandb() -> None:
    try:
        import wandb  # noqa: F401 - only to see that it is installed
    except ImportError as error:
        raise ImportError("WandbLogging needs the wandb package: pip install 'hpo-service[wandb]'") from error


def _require_login() -> None:
    """Refuse to start without a login: on a terminal, `wandb.init` would ask for one and wait."""
    import wandb

    online = wandb.setup().settings.mode in {"online", "shared"}
    # If other code has a run open, there is a login.
    if online and wandb.run is None and not wandb.login(prompt=False, verify=False):
        raise NotLoggedInError


def _logged_steps(file: Path) -> Iterator[int]:
    """The steps in a run's offline file, read by W&B's own command.

    The command leaves out an incomplete last record, which a killed process may leave.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    quiet = os.environ | {"WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False, timeout=_READING_S)
    if done.returncode:
        logger.warning("W&B can't read %s; its epochs are sent again: %s", file, done.stderr.strip())
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if record["type"] == "history":
            yield record["history"]["item"]["_step"]


def _drop_service() -> None:
    """Drop W&B's service process: if it is dead, all later runs of this process would fail."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
