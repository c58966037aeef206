"""TensorBoardLogging: writes each epoch's metrics, and the run's parameters, to event files."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.callback import Callback, TrainerView
from trainer.callbacks.hparams import session_end, session_start
from trainer.callbacks.mirror import COMPLETE, flat, outcome_of, step_record
from trainer.events import LOG_PRIORITY
from trainer.state import INTERRUPTED, PRUNED
from trainer.step_log import StepLog, StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

# The end of the names of this callback's event files, by which they differ from others in the folder.
_SUFFIX = ".epochs"


class TensorBoardLogging(Callback):
    """Writes each epoch's metrics for TensorBoard: one scalar per metric; the step is the number of the epoch.

    The history is the truth: a fit writes it into a new event file, at the times that its epochs were first
    logged at, and empties this callback's older ones. So epochs that a resumed run has forgotten are gone, what
    was missing is there, and a TensorBoard that is open drops what it had (``purge_step``). It
    drops all scalars of the folder, so others should not write theirs into it.

    With `StepMetrics` the folder ``steps`` in it has a run of its own, with a scalar per metric and step, under
    names that begin with ``step/``. A resumed run continues it: TensorBoard drops the steps that come again.

    The file is flushed every epoch. TensorBoard mirrors what the run keeps itself, so when it can't be written
    in the middle, it warns once and training continues; the next fit writes all of it again. Scalars are stored
    in single precision, NaN and infinities as such.

    With ``hparams`` the run is a row of the HParams tab, beside the latest value of each metric: a session that
    ends as a success, where it was pruned too, or as a failure. An interrupted one continues in the next fit.

    Args:
        folder: The event files' folder, one for each run; made if needed.
        hparams: The run's parameters by name: numbers, booleans, texts; anything else is shown as text.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: The folder can't be written when a fit starts.

    Example::

        Trainer(model, optimizer, loss, callbacks=[TensorBoardLogging("runs/first")])  # tensorboard --logdir runs
    """

    priority = LOG_PRIORITY
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient = ("_shown", "_writer", "_steps", "_error")

    def __init__(self, folder: Path | str, hparams: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.hparams = dict(hparams or {})
        self._shown: Mapping[str, Any] = {}
        self._writer: SummaryWriter | None = None
        self._steps: SummaryWriter | None = None
        self._error: BaseException | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Write the history into a new event file, in place of the older ones."""
        self._error = None
        writer_type = _import_writer()
        older = sorted(self.folder.glob(f"events.out.tfevents.*{_SUFFIX}"))
        times = _epoch_times(older)
        for file in older:
            _clear(file)
        # ``purge_step`` in the first file too, as TensorBoard takes a run's first one for its start.
        self._writer = writer_type(str(self.folder), purge_step=1, filename_suffix=_SUFFIX)
        self._shown = self.hparams or flat(trainer.state.config)
        self._start_session(self._writer, times.get(0))
        for epoch, metrics in enumerate(trainer.state.history, start=1):
            _add_scalars(self._writer, epoch, metrics, times.get(epoch))
        self._writer.flush()
        if trainer.state.step_log is not None:
            self._steps = self._continued_steps(writer_type, trainer.state.step_log)

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Write the steps to the disk."""
        if self._steps is None:
            return
        try:
            _add_steps(self._steps, records)
        except OSError as error:
            self._give_up(error)

    def on_log_metrics(self, trainer: TrainerView, metrics: Mapping[str, float]) -> None:
        """Write the epoch to the disk."""
        if self._writer is None:
            return
        try:
            _add_scalars(self._writer, trainer.state.epoch, metrics)
            self._writer.flush()
        except OSError as error:
            self._give_up(error)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Note the error of the training."""
        self._error = error

    def teardown(self, trainer: TrainerView) -> None:
        """Write how the run ended, and close the event files."""
        outcome, self._error = outcome_of(trainer, self._error), None
        if self._writer is None:
            return
        try:
            self._end_session(self._writer, outcome, trainer.state.epoch)
            self._writer.close()
            if self._steps is not None:
                self._steps.close()
        except OSError as error:
            self._give_up(error)
        self._writer, self._steps = None, None

    @property
    def _steps_folder(self) -> Path:
        return self.folder / "steps"

    @property
    def _lacking(self) -> Path:
        """A file that marks the steps' files as incomplete, so that the next fit writes all of them again."""
        return self._steps_folder / "incomplete"

    def _step_files(self) -> list[Path]:
        return sorted(self._steps_folder.glob("events.out.tfevents.*"))

    def _continued_steps(self, writer_type: type[SummaryWriter], log: StepLog) -> SummaryWriter:
        """The writer of the steps; from where its file begins, TensorBoard drops the steps of older files."""
        if self._lacking.exists():
            for file in self._step_files():
                file.write_bytes(b"")  # not removed, as a reader may have it open
        known = any(file.stat().st_size for file in self._step_files())
        last = max((record.step for record in log), default=0)
        writer = writer_type(str(self._steps_folder), purge_step=last + 1 if known else 1)
        if not known:
            _add_steps(writer, log)
        writer.flush()
        self._lacking.unlink(missing_ok=True)
        return writer

    def _start_session(self, writer: SummaryWriter, at: float | None) -> None:
        """Write the parameters, as step 0."""
        if self._shown:
            at = time.time() if at is None else at
            _add_to_session(writer, session_start(self._shown, at), 0, at)

    def _end_session(self, writer: SummaryWriter, outcome: str, epoch: int) -> None:
        if self._shown and outcome != INTERRUPTED:
            ended = session_end(time.time(), success=outcome in {COMPLETE, PRUNED})
            _add_to_session(writer, ended, epoch, time.time())

    def _give_up(self, error: OSError) -> None:
        logger.warning("TensorBoard gets nothing more of this run, %s can't be written: %s", self.folder, error)
        for writer in (self._writer, self._steps):
            # Not SummaryWriter.close, which flushes first and so fails before it ends its thread.
            file_writers: dict[str, Any] = {} if writer is None else writer.all_writers or {}
            for file_writer in file_writers.values():
                with contextlib.suppress(OSError):
                    file_writer.close()
        if self._steps is not None:
            with contextlib.suppress(OSError):
                self._lacking.touch()
        self._writer, self._steps = None, None


def _import_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoardLogging needs the tensorboard package: pip install 'hpo-service[tensorboard]'"
        ) from error
    return SummaryWriter


def _add_scalars(
    writer: SummaryWriter, step: int, metrics: Mapping[str, float], wall_time: float | None = None
) -> None:
    at = time.time() if wall_time is None else wall_time
    for name, value in metrics.items():
        writer.add_scalar(name, float(value), step, walltime=at)


def _add_steps(writer: SummaryWriter, records: Iterable[StepRecord]) -> None:
    for record in records:
        shown = step_record(record)
        _add_scalars(writer, int(shown.pop("step")), shown)
    writer.flush()


def _add_to_session(writer: Any, summary: Any, step: int, at: float) -> None:
    writer._get_file_writer().add_summary(summary, step, at)  # noqa: SLF001 - add_hparams would open another run


def _clear(file: Path) -> None:
    """Empty a file, or remove one already empty: a TensorBoard that reads a removed file waits for its return."""
    if file.stat().st_size:
        file.write_bytes(b"")
    else:
        file.unlink()


def _epoch_times(files: list[Path]) -> dict[int, float]:
    """When each epoch was logged, in seconds since 1970, by its number; number 0 is the start of the run."""
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events: list[Any] = [event for file in files for event in EventFileLoader(str(file)).Load()]
    times: dict[int, float] = {}
    for event in events:
        if event.HasField("summary"):
            times.setdefault(event.step, event.wall_time)
    return times
