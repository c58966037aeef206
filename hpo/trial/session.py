"""`Session`: what a running trial offers to the code that trains it, be it the Trainer, a function or a script."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Never, NoReturn, SupportsFloat

import optuna
import torch

from hpo.config.yaml_dumper import to_yaml
from hpo.search.schedulers.scheduler import Decision
from hpo.storage.ledger import Lease
from hpo.storage.outage import DatabaseError
from hpo.study.folders import print_notice
from hpo.trial.checkpoints import Checkpoints
from hpo.trial.epoch_errors import out_of_turn, saved_early, without_name
from hpo.trial.process_forks import end_fork
from hpo.trial.reports import Reports
from hpo.trial.stopping import StopRequest
from trainer.checkpoint.readable import readable
from trainer.data.random_state import rng_state, set_rng_state
from trainer.files import replacing
from trainer.recorded import Metrics
from trainer.state import DIVERGED, INTERRUPTED, PAUSED, PRUNED, Mode

_VERSION: Final = 3
#: The largest step that `report_step` takes: the history has an entry for each.
MAX_STEP: Final = 100_000
#: Reasons to stop, in ascending order of rank: a reason replaces one of lower rank.
_RANKS: Final = (None, PAUSED, INTERRUPTED, PRUNED, DIVERGED)
_REASONS: Final = {Decision.CONTINUE: None, Decision.PAUSE: PAUSED, Decision.STOP: PRUNED}


class TrainingStoppedError(Exception):
    """Ends training code whose trial diverged, pauses, or is requeued as its run ends; let it pass."""


@dataclass(kw_only=True)
class Session:
    """One attempt at one trial, as the training code sees it.

    Training code resumes, trains an epoch, reports it, and saves it::

        state = session.load_checkpoint() or fresh()
        for epoch in range(state["epoch"] + 1, epochs + 1):
            val_loss = train_one(state)
            session.report(epoch, val_loss=val_loss)
            session.save_checkpoint({**state, "epoch": epoch})

    If the trial is pruned or has diverged, `report` ends the training with an exception. If the trial pauses, or
    its run ends, `save_checkpoint` does so once the epoch is saved, or else the next `report`. Such a trial
    resumes from the checkpoint of the epoch that was reported last, so training code saves one after each report.
    The trial's value is that of the best reported epoch. Code that wants to end by itself reads `should_stop`.
    Callbacks use `take_report` and `write_checkpoint`, which leave it to the caller to end the training.

    Attributes:
        number: The trial's number.
        params: Its parameters, by dotted path.
        config: The study file's config with these parameters.
        folder: The folder that this attempt may write to; each attempt has its own.
        device: The device to train on.
        seed: Seed of everything random in the training; the same for each attempt.
        parts: Parts into which to cut each batch, after the device's memory ran out with larger ones.
        mode: Whether the study's metric is minimised or maximised.
        inherited: Epochs that the trial's parent has trained, if it is a fork; the first checkpoint that it loads
            is the parent's.
        max_epochs: Epochs of a run to the end, shown to people; training code may set it. 0: not known.
        reports: Stores what is reported, and asks the scheduler about it.
        checkpoints: The trial's checkpoint files.
        request: Requests to stop this worker or its trial.
        lease: The lease of this attempt, by which the worker holds the trial.
        process: Id of the process that trains; a process forked from it that calls the session is ended.
        pulse: Called repeatedly with the session, as long as training advances.
        history: The metrics of each reported epoch, of this attempt and those that it resumes.
        resumed_at: Epochs of the history that this attempt has not trained itself.
        first_step: The training code's number for its first epoch, see `report_step`; None: not known yet.
        stop_reason: Why training should end or has ended early, as far as the code knows: ``"diverged"``,
            ``"pruned"``, ``"interrupted"`` or ``"paused"``.
    """

    number: int
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    folder: Path
    device: torch.device
    seed: int
    mode: Mode
    reports: Reports
    checkpoints: Checkpoints
    request: StopRequest
    lease: Lease
    process: int
    pulse: Callable[[Session], None]
    parts: int = 1
    inherited: int = 0
    max_epochs: int = 0
    history: list[Metrics] = field(default_factory=list)
    resumed_at: int = 0
    first_step: int | None = None
    stop_reason: str | None = None
    _began: float = field(default_factory=time.monotonic)
    _reported_at: float = field(default_factory=time.monotonic)
    _resumed: bool = False
    _anew: bool = False
    _told: bool = False
    _saved_early: bool = False  # a checkpoint was saved before any report: the code saves epochs before reporting
    _last_report: bool = False  # training should have stopped before the next report

    @property
    def metric(self) -> str:
        """The study's metric."""
        return self.reports.metric

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return len(self.history)

    @property
    def trained(self) -> tuple[int, float]:
        """Epochs that this attempt has trained, and the seconds that they took, up to the last report."""
        return self.epoch - self.resumed_at, self._reported_at - self._began

    @property
    def started_again(self) -> bool:
        """Whether this attempt trains from the first epoch what an earlier one had begun: it found no checkpoint,
        or the code did not load one."""
        return self._anew and self.lease.attempt > 1

    @property
    def told_to_stop(self) -> bool:
        """Whether the training code knows that it should stop: it has asked, or was ended by an exception."""
        return self._told

    # ---- while it trains

    def report(self, epoch: int, /, *unnamed: Never, **metrics: SupportsFloat) -> None:
        """Report a finished epoch: its number, counted from 1, and its metrics, real numbers.

        The study's metric is stored, and the scheduler asked about it. A value that is not finite means that the
        training has diverged. An epoch without the study's metric counts, but nothing is stored of it. Where the
        database fails permanently, the trial is to stop and resumes later.

        Raises:
            ValueError: The epoch is not the one after the last one, was saved before it is reported, or a fork has
                not loaded its checkpoint.
            TypeError: A metric has no name.
            MetricError: A metric is not a real number.
            optuna.TrialPruned: The trial is pruned.
            TrainingStoppedError: The training has diverged, or was to stop after the epoch before.
            LeaseLostError: Another attempt has the trial.
        """
        if unnamed:
            raise without_name(self.metric)
        self.take_report(epoch, metrics)
        if self.stop_reason in (PRUNED, DIVERGED):
            self._end()

    def take_report(self, epoch: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """As `report`, but without ending a trial that is pruned or has diverged by this epoch: for code that
        checks `stop_reason` or `should_stop` itself.

        Raises:
            Exception: As `report`, where the training was to end after the epoch before.
        """
        end_fork(self.process)
        self._begin()
        self._refuse_another()
        if self.epoch < self.inherited:
            raise ValueError(
                f"trial {self.number} is a fork that begins after epoch {self.inherited}: resume from what "
                "`load_checkpoint` returns"
            )
        if self._saved_early and self.first_step is None:
            raise saved_early(epoch)
        if epoch != self.epoch + 1:
            resumed = self._resumed and not self._anew and self.epoch == self.resumed_at
            raise out_of_turn(epoch, self.epoch, resumed=resumed)
        self._record(metrics)
        self._last_report = self.stop_reason is not None or self.request.stops(self.number, self.lease)

    def report_step(self, step: int, metrics: Mapping[str, SupportsFloat]) -> bool:
        """As `take_report`, by the code's own count of steps, which begins at 0 or above and may have gaps.

        If the code begins at step 0, that is epoch 1; if it begins later, a step is the epoch of that number. Left
        out epochs count, but nothing is stored for them. As in Optuna, the first value of a step is kept.

        Returns:
            True if the report was taken; False for a step that already has a value.

        Raises:
            ValueError: The step is negative, lies before one that was reported, or is beyond any number of epochs;
                for all else that is raised see `report`.
        """
        end_fork(self.process)
        self._begin()
        if not 0 <= step <= MAX_STEP:
            raise ValueError(f"step {step} is not from 0 to {MAX_STEP:,}: count epochs, or reports, from 0")
        if self.first_step is None:
            self.first_step = min(step, 1)
        epoch = step + 1 - self.first_step
        if 0 < epoch <= self.epoch and self.history[epoch - 1]:
            return False
        if epoch <= self.epoch:
            last = self.epoch - 1 + self.first_step
            raise ValueError(f"step {step} is reported after step {last}: count upwards")
        self._refuse_another()
        self.history += [Metrics()] * (epoch - 1 - self.epoch)
        self.take_report(epoch, metrics)
        return True

    def conclude(self, metrics: Mapping[str, SupportsFloat]) -> None:
        """Take the trial's result as its only epoch, for code that reports none; the scheduler is not asked about
        it, since nothing is left to prune or to pause.

        Raises:
            MetricError: A metric is not a real number.
            LeaseLostError: Another attempt has the trial.
        """
        end_fork(self.process)
        self._begin()
        self._record(metrics, ask=False)

    @property
    def should_stop(self) -> bool:
        """Whether training should end, after this batch if it can, else after this epoch; to be read each batch.

        Raises:
            LeaseLostError: Another attempt has the trial.
        """
        self._told = self.reason_to_stop() is not None
        return self._told

    def reason_to_stop(self) -> str | None:
        """Why training should end, or None; unlike `should_stop` it does not count as telling the training code.

        Raises:
            LeaseLostError: Another attempt has the trial.
        """
        self.show_life()
        if self.request.stops(self.number, self.lease):
            self._stop(INTERRUPTED)
        return self.stop_reason

    def show_life(self) -> None:
        """Show that training advances while `should_stop` is not called for long: a silent trial is timed out."""
        end_fork(self.process)
        self.pulse(self)

    def diverge(self) -> None:
        """Report that the training has diverged, where its metric does not show it."""
        self._stop(DIVERGED)

    # ---- checkpoints

    def save_checkpoint(self, state: Any, batch: int = 0) -> Path:
        """Save what the trial needs to resume, after the last reported epoch, and end the training if it should
        stop and resume later; the checkpoint is on disk by then.

        The history and the states of the global random generators are saved with it. The checkpoints of the best
        epoch and the latest two are kept. A trial pauses only at an epoch's end, and not after its last epoch, if
        `max_epochs` says which that is.

        Args:
            state: Tensors and plain values, in lists, tuples, sets and dicts.
            batch: Finished batches of the epoch that is being trained; 0 at an epoch's end.

        Raises:
            TrainingStoppedError: The trial pauses, or its run ends.
            UnreadableError: The state contains something that could not be read back; nothing is written.
            CheckpointWriteError: The disk is full or not writable.
            LeaseLostError: Another attempt has the trial.
        """
        path = self.write_checkpoint(state, batch)
        self._saved_early |= not (self.history or batch)
        self._end_where_saved(inside=batch > 0)
        return path

    def write_checkpoint(self, state: Any, batch: int = 0) -> Path:
        """As `save_checkpoint`, but without ending the training."""
        end_fork(self.process)
        self.request.stops(self.number, self.lease)
        progress = {
            "epoch": self.epoch,
            "batch_index": batch,
            "history": [dict(metrics) for metrics in self.history],
            "inherited": self.inherited,
            "first_step": self.first_step,
        }
        checkpoint = {"version": _VERSION, "state": progress, "rng": rng_state(), "saved": readable(state)}
        path = self.checkpoints.write(checkpoint, self.epoch, batch)
        self.checkpoints.retain(self.history, self.metric, self.mode, inherited=self.inherited)
        return path

    def load_checkpoint(self) -> Any | None:
        """The newest readable state that an attempt at the trial has saved, on `device`; None where there is none.

        The history becomes the checkpoint's, the stored values are made equal to it, and the global random
        generators are restored. A fork that has saved nothing yet gets its parent's state; the generators are then
        not restored.

        Raises:
            optuna.TrialPruned: An earlier attempt was pruned at this epoch, but ended before that was stored.
            TrainingStoppedError: An earlier attempt was to pause at this epoch, likewise.
            ValueError: Other training code, or another version of this format, wrote the checkpoint.
            CheckpointError: The trial is a fork, and its parent's checkpoint can't be read.
            LeaseLostError: Another attempt has the trial.
        """
        found = self.checkpoints.newest()
        checkpoint = self.checkpoints.of_parent() if found is None else found[1]
        if checkpoint is None:
            self._start_anew()
            return None
        if checkpoint.get("version") != _VERSION or "saved" not in checkpoint:
            where = "that of its parent" if found is None else found[0].path
            raise ValueError(f"the checkpoint {where} was not written by `save_checkpoint` of this version")
        if found is not None:
            set_rng_state(checkpoint["rng"])
        state = checkpoint["state"]
        self.first_step = state["first_step"]
        inside = state["batch_index"] > 0
        self.resume([Metrics(metrics) for metrics in state["history"]], inside=inside)
        self.raise_pruned()
        self._end_where_saved(inside=inside or found is None)
        return checkpoint["saved"]

    # ---- for code that builds on a session

    def resume(self, history: list[Metrics], *, inside: bool = False) -> None:
        """Take over a history, and make the stored values equal to it; follows a decision of an earlier attempt.

        Args:
            history: The metrics of each finished epoch.
            inside: Whether training is inside the next epoch, which then ends before the trial pauses.

        Raises:
            LeaseLostError: Another attempt has the trial.
        """
        end_fork(self.process)
        self.history, self._resumed, self._last_report = list(history), True, False
        self.resumed_at, self._began = len(history), time.monotonic()
        self.pulse(self)
        decision = self.reports.resume(self.history)
        if not (inside and decision is Decision.PAUSE):
            self._follow(decision)

    def finish(self) -> bool:
        """Wait until all reports are stored; returns whether the trial is pruned by one of them.

        Raises:
            LeaseLostError: Another attempt has the trial.
        """
        decision = self._reported(self.reports.finish)
        return decision is Decision.STOP

    def raise_pruned(self) -> None:
        """End a trial that is pruned.

        Raises:
            optuna.TrialPruned: The trial is pruned.
        """
        if self.stop_reason == PRUNED:
            raise optuna.TrialPruned(f"pruned after epoch {self.epoch}")

    def keep_config(self, config: Mapping[str, Any]) -> None:
        """Store the config that the trial trains with in ``config.yaml`` in its folder."""
        self.config = config
        with replacing(self.folder / "config.yaml") as file:  # never half-written, even if the process is killed
            file.write(to_yaml({**config, "seed": self.seed}))

    def _begin(self) -> None:
        """Begin with the first epoch, if the code has not loaded a checkpoint before its first report."""
        if not self._resumed:
            began = self._began
            self._start_anew()
            self._began = began  # the first epoch is trained by now

    def _start_anew(self) -> None:
        self._anew = True
        if self.started_again:
            again = f"attempt {self.lease.attempt} starts again with the first epoch"
            print_notice(f"{again}: no checkpoint was loaded")
        self.resume([])

    def _record(self, metrics: Mapping[str, SupportsFloat], *, ask: bool = True) -> None:
        self.history.append(Metrics(metrics))
        self._reported_at = time.monotonic()
        self.pulse(self)
        value = self.history[-1].get(self.metric)
        if value is not None:
            self._store(self.epoch, value, ask=ask)
        elif any(self.metric in each for each in self.history[self.inherited :]):  # else it would rank nowhere
            self._reported(lambda: self.reports.passed(self.epoch))

    def _store(self, epoch: int, value: float, *, ask: bool) -> None:
        if not math.isfinite(value):
            self._stop(DIVERGED)
        ask = ask and self.stop_reason != DIVERGED
        self._reported(lambda: self.reports.report(epoch, value, ask=ask))

    def _reported(self, report: Callable[[], Decision]) -> Decision:
        """Call a method of the reports; if the database fails permanently, stop the training, to resume later."""
        try:
            decision = report()
        except DatabaseError:
            self.request.leave()
            self._stop(INTERRUPTED)
            return Decision.CONTINUE
        self._follow(decision)
        return decision

    def _refuse_another(self) -> None:
        if self._last_report:
            self._stop(INTERRUPTED if self.stop_reason is None else self.stop_reason)
            self._end()

    def _end_where_saved(self, *, inside: bool) -> None:
        """End training that resumes from what is saved, unless it has come to its last epoch.

        Args:
            inside: What is saved lies inside an epoch of this trial: it does not pause there.
        """
        if 0 < self.max_epochs <= self.epoch:
            return
        if self.reason_to_stop() in ((INTERRUPTED,) if inside else (INTERRUPTED, PAUSED)):
            self._end()

    def _end(self) -> NoReturn:
        self._told = True
        self.raise_pruned()
        raise TrainingStoppedError(f"{self.stop_reason} after epoch {self.epoch}")

    def _follow(self, decision: Decision) -> None:
        self._stop(_REASONS[decision])

    def _stop(self, reason: str | None) -> None:
        self.stop_reason = max(self.stop_reason, reason, key=_RANKS.index)
