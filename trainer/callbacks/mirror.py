"""Mirror: the base of callbacks that copy a run to a tracking service, with what they share.

Service remembers whether a service is away; functions here give a run's outcome and the order of its records.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from trainer.callback import Callback, TrainerView
from trainer.callbacks.cancel_tags import CancelTags
from trainer.callbacks.history_file import Record, epoch_record
from trainer.checks import check_mode
from trainer.events import LOG_PRIORITY
from trainer.state import CONTINUED, DIVERGED, ERROR, INTERRUPTED, PRUNED, Mode, TrainState, best_epoch
from trainer.step_log import StepRecord

COMPLETE: Final = "complete"
OUT_OF_MEMORY: Final = "out_of_memory"

#: The prefix of the names of single steps' metrics.
STEP_PREFIX: Final = "step/"

# Seconds during which a service that did not answer gets no further request, as each would wait for a time-out.
_AWAY_S = 600.0

# Names of the error classes by which libraries for connections and databases report a service that is away.
_OUTAGES: Final = frozenset({"ConnectionError", "OperationalError", "Timeout", "TimeoutError", "gaierror"})

logger = logging.getLogger(__name__)


class Service:
    """What this process and its forks know of a service: whether it is away, and which warnings were logged.

    All runs of a process share it, so that an outage costs one time-out and one warning in all, not per run. The
    process and its forks share whether the service is away, as each trial is a fork of its worker.

    Args:
        name: The name in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._said: set[str] = set()
        self._ask_again = memoryview(mmap.mmap(-1, 8)).cast("d")  # memory that forks share

    @property
    def is_away(self) -> bool:
        """Whether it recently did not answer."""
        return time.monotonic() < self._ask_again[0]

    def answered(self) -> None:
        """Note that it answered, so that later failures are warnings again."""
        self._said.clear()

    def failed(self, what: str, error: BaseException | str, *, away: bool = False) -> None:
        """Log a warning, or only an info if the same text was logged since the service last answered.

        Args:
            what: What the run lacks now, and what to do.
            error: The error.
            away: Whether the service did not answer (see `is_outage`); it then gets no request for ten minutes.
        """
        level = logging.INFO if what in self._said else logging.WARNING
        self._said.add(what)
        logger.log(level, "%s: %s", what, error)
        if away:
            self._ask_again[0] = time.monotonic() + _AWAY_S

    def forget(self) -> None:
        """Forget everything about the service, as in a new process."""
        self._said.clear()
        self._ask_again[0] = 0.0


class Mirror(Callback):
    """Base of the callbacks that copy a run to a service; if the service fails, training continues.

    Args:
        monitor: The metric by which an epoch is the best.
        mode: ``"min"`` or ``"max"``.
        cancel_tags: Tags that end the run.
        cancel_every_s: Seconds between two checks for these tags.
    """

    service: ClassVar[Service]
    priority = LOG_PRIORITY
    reads = ("*",)
    reads_in = "on_log_metrics"
    rank_zero_only = True
    transient: ClassVar[tuple[str, ...]] = ("_remote", "_held", "_error")

    def __init__(self, monitor: str, mode: Mode, cancel_tags: Sequence[str], cancel_every_s: float) -> None:
        check_mode(mode)
        self.monitor = monitor
        self.mode: Mode = mode
        self._cancel = CancelTags(cancel_tags, cancel_every_s)
        self._remote: Any = None  # the object that receives the run's metrics; None if there is none or it failed
        self._error: BaseException | None = None

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """End the run if it has a cancel tag."""
        self._cancel.obey(trainer)

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Note the error of the training."""
        self._error = error

    def _outcome(self, trainer: TrainerView) -> str:
        """How the run ended; forgets the error, and stops checking for tags."""
        self._cancel.close()
        error, self._error = self._error, None
        return outcome_of(trainer, error)

    def _mirror(self, action: Callable[[Any], Any]) -> None:
        """Call ``action`` with the remote object; after the first failure, this run sends nothing more."""
        if self._remote is None:
            return
        try:
            action(self._remote)
        except Exception as error:  # noqa: BLE001 - training continues when the service fails
            self.service.failed(f"{self.service.name} failed and gets nothing more of this run", error)
            self._remote = None
            self._let_go()

    def _let_go(self) -> None:
        """Drop what would make the next run fail too."""


def is_outage(error: BaseException | None) -> bool:
    """Whether an error means that a service did not answer, rather than that it refused a value."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names & _OUTAGES or "timed out" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of nested mappings under dotted names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return values


def outcome_of(trainer: TrainerView, error: BaseException | None) -> str:
    """How a fit ended.

    Args:
        trainer: The trainer, after the fit.
        error: What the fit raised, if anything.

    Returns:
        ``complete`` (also if it stopped early), ``pruned``, ``diverged``, ``out_of_memory``, ``error``, or
        ``interrupted`` if it was stopped before its end and may resume.
    """
    reason = trainer.state.stop_reason
    if reason == ERROR:
        return OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError | MemoryError) else ERROR
    if reason in CONTINUED:
        return INTERRUPTED if error is not None or trainer.plan.broken_off(trainer.state) else COMPLETE
    return reason if reason in {DIVERGED, PRUNED} else COMPLETE


def best_of(state: TrainState, monitor: str, mode: Mode) -> dict[str, Any]:
    """``best_epoch`` and ``best_<monitor>``; empty if no epoch has a finite value."""
    epoch = best_epoch(state.history, monitor, mode, after=state.inherited)
    if epoch is None:
        return {}
    return {"best_epoch": epoch, f"best_{monitor}": float(state.history[epoch - 1][monitor])}


def step_record(record: StepRecord) -> Record:
    """One step for trackers: ``step``, then the metrics under names that begin with ``step/``."""
    flat = record.flat(STEP_PREFIX)
    del flat["epoch"]  # in trackers, it counts finished epochs and is the axis of their metrics
    return flat


def epoch_place(state: TrainState, epoch: int) -> int:
    """The place of an epoch in the `sequence`: its number, plus the steps up to its end if steps are recorded."""
    steps = 0 if state.step_log is None else state.step_log.epoch_ends.get(epoch, 0)
    return steps + epoch


def step_places(records: Sequence[StepRecord]) -> list[tuple[int, Record]]:
    """Steps with their places in the `sequence`, which depend only on the step and its epoch."""
    return [(record.step + record.epoch - 1, step_record(record)) for record in records]


def sequence(state: TrainState) -> Iterator[tuple[int, Record]]:
    """All records so far, of steps and epochs, with increasing places; for trackers with only one step axis."""
    epochs = deque(
        (epoch, epoch_place(state, epoch), epoch_record(epoch, metrics))
        for epoch, metrics in enumerate(state.history, start=1)
    )
    for record in state.step_log or ():
        while epochs and epochs[0][0] < record.epoch:
            yield epochs.popleft()[1:]
        yield from step_places([record])
    yield from ((place, record) for _, place, record in epochs)
