"""Checkpoint: saves the best epochs, the latest state, and chosen steps, in a background thread if asked to."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from trainer.callback import Callback, TrainerView
from trainer.checkpoint.files import CheckpointError, CheckpointFile, Progress, list_checkpoints
from trainer.checkpoint.manager import PERMANENT, CheckpointManager, is_permanent, snapshot
from trainer.checkpoint.readable import readable
from trainer.checkpoint.retention import Removal, best_epochs, retained
from trainer.checkpoint.rules import SaveRules, check_choices
from trainer.checkpoint.writer import CheckpointWriter, Save, Written
from trainer.checks import check_count
from trainer.distributed.group import LostShardsError
from trainer.distributed.tensor_shards import is_sharded
from trainer.state import DIVERGED, ERROR, INTERRUPTED, Mode, TrainState, recorded_instead
from trainer.step.parts import bare_model, refuse_lazy

# The assumed seconds of a write before one was measured.
_FIRST_COST_S = 0.005

logger = logging.getLogger(__name__)


class Checkpoint(Callback):
    """Keeps checkpoints on disk: of the best epochs, of the latest ones, and of steps inside epochs.

    *When.* The end of an epoch is written every ``every_n_epochs`` and when the epoch is among the ``keep_best``
    best so far; a batch is written every ``every_n_steps`` and every ``every_seconds``. Beside these there are
    permanent checkpoints, which are never removed: every ``keep_every_n_epochs``, every ``keep_every_n_steps``, at
    ``at_steps``, and ``before_training``. What becomes due with the last batch of an epoch is written at the
    epoch's end, fully evaluated. The end of training writes the state in which it ended, also inside an epoch
    after ``stop("interrupted", now=True)``. An exception, KeyboardInterrupt included, leaves what waits to be
    written; to keep the epoch so far after a Ctrl-C, let a signal handler ask for the stop. A diverged state
    is never written, nor any other with weights that are not finite, nor a batch of an epoch after which the run
    is to stop.

    *Asked by others.* ``state.request_checkpoint()`` in any hook has the running batch or the end of the epoch
    written, with ``permanent=True`` for ever. ``state.block_checkpoints(name)`` holds back what may be removed,
    until ``state.unblock_checkpoints(name)`` or the end of the fit: permanent and requested ones and the end of
    training are written all the same.

    *How often.* ``every_n_epochs`` and ``every_n_steps`` are held to ``max_overhead`` of the time: what would
    take more is left out, where epochs take longer than that each one is written. A best epoch that is not
    written waits in the host's memory, up to ``keep_best`` of them, and is written no later than the next
    checkpoint: the best of what lies on disk lie there with it. Training is bit-exact, so what comes after the
    latest checkpoint comes out the same when it is trained again.

    *What stays.* The best ``keep_best`` epochs of the history, the latest ``keep_last`` ends of epochs, the
    latest ``keep_last`` inside the epoch after those, permanent ones, and so always the newest; more with another
    ``remove``. Nothing is removed before its successor is on disk. The rules hold for the files of an earlier
    process as well: each file says whether it is permanent.
    A run that resumes from an earlier point than the newest file, or starts over, removes the files after that
    point with its first write, and warns of it at its start: they belong to another course of events.

    *In the background.* The state is copied to the host's memory and written by a thread; the next save and
    the end of training wait for it. ``on_after_save_checkpoint`` fires in the training thread once the file is
    on disk: at the next end of an epoch, save or end of training.

    Example::

        Checkpoint("checkpoints", "val_accuracy", "max", keep_best=3, every_seconds=600, background=True)

        callbacks: {checkpoint: {keep_best: 3, every_seconds: 600, background: true}}

    Args:
        folder: Where the files go; one run's alone.
        monitor: The metric that says which epochs are best.
        mode: ``"min"`` or ``"max"``.
        every_n_epochs: Epochs between two checkpoints.
        keep_last: How many of the latest checkpoints to keep, at least 1; if one is damaged, the one before it is
            used.
        max_overhead: Largest share of the training time that writing may take, above 0; with 1, every checkpoint
            that is due is written.
        keep_best: How many of the best epochs to keep, at least 1; of equal ones the earlier.
        every_n_steps: Optimizer steps between two checkpoints inside epochs; None: no such checkpoints.
        at_steps: Optimizer steps with a permanent checkpoint, whatever it costs.
        every_seconds: Seconds after the last checkpoint at which the next one is written, whatever it costs: for
            machines that may be preempted. None: no such limit.
        keep_every_n_epochs: Epochs between two permanent checkpoints, whatever they cost; None: no such
            checkpoints.
        keep_every_n_steps: Optimizer steps between two permanent checkpoints, likewise.
        cooldown_steps: Optimizer steps after any checkpoint during which ``every_n_steps`` and ``every_seconds``
            write no other.
        before_training: Whether to write the state before the first batch, as a permanent checkpoint.
        remove: Which checkpoints are removed once the rules above no longer keep them: ``"all_non_permanent"``;
            ``"ephemeral_only"``: only those inside epochs, so that every written end of an epoch stays;
            ``"never"``: none, and a run is refused whose folder has files from after its start.
        background: Whether to write in a thread, while training continues.
        on_write_error: What to do if the disk is full or fails: ``"stop"`` ends the training with the error;
            ``"continue"`` warns, and the next save writes the missing best epochs too. In both cases the older
            files stay, and no half-written file is left.

    Raises:
        CheckpointWriteError: From the hook in which it became known, with ``on_write_error="stop"``.
        UnreadableError: When a checkpoint is made of something that could not be read back.
        ValueError: An argument is out of range, or ``remove="never"`` would leave files of another course.
    """

    priority = 95
    rank_zero_only = True
    saves = True
    transient = (
        *("_waiting", "_last_write", "_cost", "_looked", "_permanent", "_stale"),
        *("_saved", "_saved_step", "_reason", "_warned", "_answered", "_broken_off"),
    )

    def __init__(
        self,
        folder: Path | str,
        monitor: str = "val_loss",
        mode: Mode = "min",
        every_n_epochs: int = 1,
        keep_last: int = 2,
        max_overhead: float = 0.05,
        *,
        keep_best: int = 1,
        every_n_steps: int | None = None,
        at_steps: Sequence[int] = (),
        every_seconds: float | None = None,
        keep_every_n_epochs: int | None = None,
        keep_every_n_steps: int | None = None,
        cooldown_steps: int = 0,
        before_training: bool = False,
        remove: Removal = "all_non_permanent",
        background: bool = False,
        on_write_error: Literal["stop", "continue"] = "stop",
    ) -> None:
        self.rules = SaveRules(
            every_n_epochs,
            every_n_steps,
            every_seconds,
            cooldown_steps,
            keep_every_n_epochs,
            keep_every_n_steps,
            tuple(sorted(at_steps)),
        )
        self._inside = self.rules.look_inside  # read at each batch
        check_count("keep_last", keep_last)
        check_count("keep_best", keep_best)
        check_choices(max_overhead, mode, remove, on_write_error)
        self.manager = CheckpointManager(Path(folder))
        self.monitor = monitor
        self.mode: Mode = mode
        self.keep_last = keep_last
        self.max_overhead = max_overhead
        self.keep_best = keep_best
        self.before_training = before_training
        self.remove: Removal = remove
        self.background = background
        self.on_write_error = on_write_error
        self.reads = (monitor,)
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._writer = CheckpointWriter(self.manager, background=background)
        self._last_write = 0.0
        self._cost = _FIRST_COST_S
        self._looked = 0
        self._warned = False
        self._saved: Progress | None = None
        self._reason: str | None = None
        self._saved_step = 0
        self._broken_off = False
        self._answered = (0, 0)
        self._permanent: set[Progress] = set()
        self._stale: set[Progress] = set()

    # ---- when

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the clock, and take over the files of the run that this fit continues."""
        self._writer = CheckpointWriter(self.manager, background=self.background)  # a writer of this process
        state, files = trainer.state, list_checkpoints([self.manager.folder])
        start = (state.epoch, state.batch_index)
        self._stale = {file.progress for file in files if file.progress > start}
        self._permanent = {file.progress for file in files if file.progress <= start and _is_permanent(file)}
        self._waiting, self._broken_off = {}, False
        self._looked = self._saved_step = state.step
        self._last_write = time.monotonic()
        if self._stale:
            self._refuse_stale(start)
        if self.before_training and start == (0, 0):
            refuse_lazy(trainer.model, "a fit whose Checkpoint has before_training")
            self._permanent.add(start)
            self._save(trainer)

    def _refuse_stale(self, start: Progress) -> None:
        """Warn that files from after the point where the run starts are removed; refuse them with "never"."""
        folder, found = self.manager.folder, len(self._stale)
        where = (
            f"{folder} holds {found} checkpoints after epoch {start[0]}, batch {start[1]}, where this run starts"
        )
        if self.remove == "never":
            raise ValueError(f"{where}, and remove is 'never': give another folder, or resume the newest of them")
        logger.warning("%s: its first write removes them; give it another folder to keep them", where)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Write the batch if it is due; after the last batch of an epoch, wait for the end of the epoch."""
        state = trainer.state
        if not (self._inside or state.checkpoint_requests != self._answered):
            return
        last = state.batch_index == state.batches_per_epoch or trainer.plan.ends_epoch(state)
        if state.stop_reason or last:
            return
        if self._due_inside(state):
            self._save(trainer)
        self._looked = state.step

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Write the epoch, or hold a copy of it if it is one of the best."""
        if self._writer.done:
            self._settle(trainer)
        state = trainer.state
        self._warn_without_monitor(state)
        due = self._due_inside(state) or (
            self.rules.by_epochs(state) and not state.checkpoint_blocks and self._affordable()
        )
        best = self._best(state.history, state.inherited)
        if state.stop_reason != DIVERGED and due:
            self._save(trainer)
        elif state.stop_reason != DIVERGED and state.epoch in best and (made := self._made(trainer)):
            self._waiting[state.epoch] = snapshot(made)
            self._waiting = {epoch: held for epoch, held in self._waiting.items() if epoch in best}
        self._looked = state.step

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Note whether an error may have interrupted training inside a batch; pruning does not."""
        self._broken_off = trainer.state.stop_reason in {ERROR, INTERRUPTED}

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Write the epochs that wait, and the state in which training ended, unless that state is useless."""
        self._settle(trainer)
        state = trainer.state
        progress = (state.epoch, state.batch_index)
        saved = progress == (0, 0) or (progress in self._on_disk() and not self._is_outdated(state))
        useless = self._broken_off or state.stop_reason in {DIVERGED, ERROR}
        if useless or not (saved or self._save(trainer)):
            self._write(trainer, self._held(self._waiting.keys()))
        self._settle(trainer)

    def teardown(self, trainer: TrainerView) -> None:
        """Wait for the thread, in case an interrupt ended the wait in `on_fit_end`."""
        self._settle(trainer)
        self._answered = trainer.state.checkpoint_requests
        trainer.state.checkpoint_blocks.clear()

    def _warn_without_monitor(self, state: TrainState) -> None:
        """Warn once that the best epochs are unknown."""
        if not self._warned and state.is_unknown(self.monitor):
            logger.warning(
                "nothing records %r, so no epoch is kept as the best; %s",
                self.monitor,
                recorded_instead(self.monitor, state.metrics),
            )
            self._warned = True

    def _is_outdated(self, state: TrainState) -> bool:
        """Whether a stop, or a checkpoint, was requested after this state was saved."""
        ended = self._saved == (state.epoch, state.batch_index) and self._reason != state.stop_reason
        return ended or state.checkpoint_requests != self._answered

    def _due_inside(self, state: TrainState) -> bool:
        """Whether a hook, or a rule that does not wait for the end of the epoch, asks for a checkpoint."""
        if state.checkpoint_requests != self._answered or self.rules.permanent(state, self._looked):
            return True
        if state.checkpoint_blocks:
            return False
        rules, saved = self.rules, self._saved_step
        if rules.every_seconds is not None and rules.by_seconds(state, time.monotonic() - self._last_write, saved):
            return True
        return rules.by_steps(state, self._looked, saved) and self._affordable()

    def _stays(self, state: TrainState) -> bool:
        """Whether a checkpoint written now is permanent."""
        asked = state.checkpoint_requests[1] > self._answered[1] or self.rules.permanent(state, self._looked)
        return asked or (state.epoch, state.batch_index) in self._permanent

    def _affordable(self) -> bool:
        since = time.monotonic() - self._last_write
        return since * self.max_overhead >= self._cost * (1 - self.max_overhead)

    # ---- what

    def _best(self, history: Sequence[Mapping[str, float]], inherited: int) -> list[int]:
        return best_epochs(history, self.monitor, self.mode, self.keep_best, after=inherited)

    def _best_when(self, save: Save) -> list[int]:
        """The best epochs at the time the checkpoint was made."""
        state = save.checkpoint["state"]
        return self._best(state["history"], state["inherited"])

    def _made(self, trainer: TrainerView, *, permanent: bool = False) -> dict[str, Any] | None:
        """The checkpoint to write; None if its weights are not finite, or shards were lost with a process."""
        try:
            checkpoint = {**trainer.state_dict(), PERMANENT: permanent}
        except LostShardsError as error:
            logger.warning("%s", error)
            return None
        if not _is_finite(trainer.model, checkpoint["model"]):
            return None
        trainer.fire("on_save_checkpoint", checkpoint)
        made: dict[str, Any] = readable(checkpoint)  # here, as a thread can't name the callback
        return made

    def _held(self, epochs: Collection[int]) -> list[Save]:
        """The waiting checkpoints of these epochs."""
        return [Save((epoch, 0), held) for epoch, held in sorted(self._waiting.items()) if epoch in epochs]

    def _on_disk(self) -> set[Progress]:
        """The checkpoints on disk that belong to this run."""
        return {file.progress for file in list_checkpoints([self.manager.folder])} - self._stale

    # ---- how

    def _save(self, trainer: TrainerView) -> bool:
        """Write the present state, after the best epochs that wait; False if it is useless and left out."""
        started = time.monotonic()
        self._settle(trainer)
        state, permanent = trainer.state, self._stays(trainer.state)
        checkpoint = self._made(trainer, permanent=permanent)
        if checkpoint is None:
            return False
        self._answered = state.checkpoint_requests
        if self.background:
            checkpoint = snapshot(checkpoint)
        self._saved, self._reason = (state.epoch, state.batch_index), state.stop_reason
        self._saved_step = state.step
        save = Save((state.epoch, state.batch_index), checkpoint, permanent)
        held = [
            other
            for other in self._held(self._best(state.history, state.inherited))
            if other.progress != save.progress
        ]
        self._write(trainer, [*held, save])
        self._last_write = time.monotonic()
        self._cost = self._last_write - started
        return True

    def _write(self, trainer: TrainerView, saves: Sequence[Save]) -> None:
        if saves:
            self._writer.start(saves)
        if not self.background:
            self._settle(trainer)

    def _settle(self, trainer: TrainerView) -> None:
        """Wait for the running writes, then do what depends on their result."""
        written = self._writer.result()
        if written is None:
            return
        for save, _ in zip(written.saves, written.paths, strict=False):
            if save.permanent:
                self._permanent.add(save.progress)
            if not save.progress[1]:
                self._waiting.pop(save.progress[0], None)
        error = written.error or self._tidy(written)
        for path in written.paths:
            trainer.fire("on_after_save_checkpoint", path)
        if error is not None:
            self._fail(error, written)

    def _tidy(self, written: Written) -> OSError | None:
        """After a successful write, forget waiting epochs that are no longer best, and remove files not kept."""
        newest = written.saves[-1]
        best = self._best_when(newest)
        self._waiting = {
            epoch: held for epoch, held in self._waiting.items() if epoch in best or epoch > newest.progress[0]
        }
        self._stale -= {save.progress for save in written.saves}
        keep = retained(
            self._on_disk(), best=best, keep_last=self.keep_last, permanent=self._permanent, remove=self.remove
        )
        try:
            self.manager.retain(keep)
        except OSError as error:
            return error
        self._stale = set()
        return None

    def _fail(self, error: OSError, written: Written) -> None:
        if self.on_write_error == "stop":
            raise error
        logger.warning("%s; training is not stopped by that", error)
        best = self._best_when(written.saves[-1])
        for save in written.saves[len(written.paths) :]:
            epoch, batch = save.progress
            if not batch and epoch in best and epoch not in self._waiting:
                self._waiting[epoch] = save.checkpoint if self.background else snapshot(save.checkpoint)


def _is_permanent(file: CheckpointFile) -> bool:
    """Whether a file of an earlier process is permanent."""
    try:
        return is_permanent(file.path)
    except CheckpointError as error:
        logger.warning("%s; it is not kept", error)
        return False


def _is_finite(model: nn.Module, saved: Mapping[str, Any]) -> bool:
    """Whether all weights are finite; the loss does not show that, as it may be from before the latest step."""
    weights = (saved[name] if is_sharded(item) else item for name, item in bare_model(model).named_parameters())
    return all(bool(weight.isfinite().all()) for weight in weights)
