"""WandbLogging: one W&B run per training run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.callback import Callback, TrainerView
from trainer.history_file import epoch_record
from trainer.state import ERROR

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)


class WandbLogging(Callback):
    """Mirrors every epoch's metrics to Weights & Biases, one record an epoch.

    ``WANDB_MODE=offline`` writes a run on disk that ``wandb sync`` sends later. W&B mirrors what this run keeps
    itself, so when it fails in the middle it is said once and training goes on. A resumed run first sends the
    epochs of its history that W&B lacks (offline, or under a new id: all of them); those that W&B has, stay.
    A run that ended with an exception is marked as failed, unless it was pruned.

    Args:
        project: W&B project.
        group: Group of the run, such as the study.
        name: Name of the run.
        run_id: Stable id of the run, so that a resumed one goes on in it.
        config: Parameters shown with the run.
        folder: Where W&B keeps its files; made if needed.
        entity: W&B user or team; None for the login's default.
        tags: Tags of the run.

    Raises:
        ImportError: wandb is not installed.
        ValueError: A metric is called ``epoch``.

    Example::

        Trainer(model, optimizer, loss, callbacks=[WandbLogging("digits", name="first", run_id="first")])
    """

    priority = 80
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_run",)

    def __init__(
        self,
        project: str,
        *,
        group: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        folder: Path | str = ".",
        entity: str | None = None,
        tags: tuple[str, ...] | list[str] = (),
    ) -> None:
        self.project = project
        self.group = group
        self.run_name = name
        self.run_id = run_id
        self.config = dict(config or {})
        self.folder = Path(folder)
        self.entity = entity
        self.tags = tuple(tags)
        self._run: wandb.Run | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Open the run, and send what it lacks of the history."""
        self._run = self._open()
        first = self._run.starting_step  # of a resumed run the step after its last one, else 0
        for epoch, metrics in enumerate(trainer.state.history, start=1):
            if epoch >= first:
                self._log(epoch, metrics)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Log the epoch as one record; its step is the number of finished epochs."""
        self._log(trainer.state.epoch, metrics)

    def teardown(self, trainer: TrainerView) -> None:
        """Close the run."""
        exit_code = 1 if trainer.state.stop_reason == ERROR else 0
        self._mirror(lambda run: run.finish(exit_code=exit_code))
        self._run = None

    def _open(self) -> wandb.Run:
        import wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            name=self.run_name,
            id=self.run_id,
            resume="allow" if self.run_id else None,
            config=self.config,
            dir=str(self.folder),
            tags=self.tags,
            reinit="finish_previous",
            settings=wandb.Settings(console="off", silent=True),
        )

    def _log(self, epoch: int, metrics: Mapping[str, float]) -> None:
        record = epoch_record(epoch, metrics)
        self._mirror(lambda run: run.log(record, step=epoch))

    def _mirror(self, action: Callable[[wandb.Run], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:  # noqa: BLE001 - whatever its service process dies of, training goes on
            logger.warning("W&B failed and gets nothing more of this run: %s", error)
            self._run = None
            _drop_service()


def _drop_service() -> None:
    """Let go of W&B's service process; if it is dead, every later run of this process would fail on it."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
