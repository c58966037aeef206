"""MetricSaver: writes the latest metrics to JSON files, at chosen steps and at the end."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.callback import Callback, TrainerView
from trainer.callbacks.metric_names import MetricNames
from trainer.checks import check_count
from trainer.events import LOG_PRIORITY
from trainer.files import json_number, replacing
from trainer.step_log import StepRecord

logger = logging.getLogger(__name__)


class MetricSaver(Callback):
    """Writes the latest metrics as a JSON object: ``metrics.json`` when a fit ends, and one file per chosen step.

    A file has ``step``, ``epoch``, the latest epoch's metrics, and with `StepMetrics` those of the step, which
    take the place of an epoch's of the same name. ``metrics-step-<step>.json`` is written for the first recorded
    step at or after each that is asked for; without `StepMetrics` that is the end of an epoch. Numbers that are
    not finite are strings, as in `JSONLogging`. A file that can't be written is left out with a warning.

    Example::

        Trainer(model, optimizer, loss, callbacks=[MetricSaver("run", ["val_*"], at_steps=[100, 1000])])

        callbacks: {metric_saver: {metrics: ["val_*"], every_n_steps: 500}}

    Args:
        folder: Where the files go; made if needed.
        metrics: Patterns such as ``val_*`` for the metrics to write; None: all.
        every_n_steps: Optimizer steps between two files, at least 1; None: no such files.
        at_steps: Further optimizer steps to write a file for.

    Raises:
        ValueError: A number is not an integer of at least 1, or a metric is called ``step`` or ``epoch``.
    """

    priority = LOG_PRIORITY
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_begun", "_latest")

    def __init__(
        self,
        folder: Path | str,
        metrics: Sequence[str] | None = None,
        every_n_steps: int | None = None,
        at_steps: Sequence[int] = (),
    ) -> None:
        check_count("every_n_steps", every_n_steps, optional=True)
        for step in at_steps:
            check_count("a step in at_steps", step)
        self.folder = Path(folder)
        self.metrics = MetricNames(metrics)
        self.every_n_steps = every_n_steps
        self.at_steps = tuple(sorted(at_steps))
        self._looked: int | None = None  # the step up to which files are written
        self._begun = False
        self._latest: dict[str, float] = {}

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Resume after the step up to which files are written; a file that is due since then is still written."""
        step = trainer.state.step
        looked = None if trainer.state.is_new else self._looked
        self._looked = step if looked is None else min(looked, step)
        self._begun, self._latest = True, {}
        for record in trainer.state.step_log or ():  # the fit may end without another record
            self._latest = record.values

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        """Write the steps that are due."""
        for record in records:
            self._latest = record.values
            if self._passes(record.step):
                self._write(f"metrics-step-{record.step:08d}.json", trainer, record.step, record.epoch)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Without records of single steps, write the end of the epoch if a step is due."""
        state = trainer.state
        self._record(trainer, state.step, state.epoch)  # refuses a metric's name now, not at the end of the run
        if state.step_log is None and self._passes(state.step):
            self._write(f"metrics-step-{state.step:08d}.json", trainer, state.step, state.epoch)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Write the last metrics."""
        if self._begun:
            self._begun = False
            self._write("metrics.json", trainer, trainer.state.step, trainer.state.epoch)

    def state_dict(self) -> dict[str, Any]:
        """The step up to which files are written."""
        return {"looked": self._looked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._looked = state["looked"]

    def _passes(self, step: int) -> bool:
        """Whether a chosen step is after the previous call's step and not after this one."""
        before = step if self._looked is None else self._looked
        self._looked = max(step, before)
        fixed = bisect_right(self.at_steps, step) > bisect_right(self.at_steps, before)
        every = self.every_n_steps
        return fixed or (every is not None and step // every > before // every)

    def _write(self, name: str, trainer: TrainerView, step: int, epoch: int) -> None:
        record = {name: json_number(value) for name, value in self._record(trainer, step, epoch).items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / name) as file:
                json.dump(record, file, ensure_ascii=False, allow_nan=False)
        except OSError as error:
            logger.warning("%s can't be written: %s", self.folder / name, error)

    def _record(self, trainer: TrainerView, step: int, epoch: int) -> dict[str, float]:
        values = {**trainer.state.metrics, **self._latest}
        return StepRecord(
            step, epoch, {name: value for name, value in values.items() if name in self.metrics}
        ).flat()
