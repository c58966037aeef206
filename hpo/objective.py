"""One trial, from its parameters to its state: the one place where outcomes become trial states."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
from omegaconf import OmegaConf
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from hpo.build import Builder, RunPlace
from hpo.callbacks import PrunerCallback, StopWhenAsked
from hpo.errors import LeaseLostError
from hpo.folders import attempt_folder, attempt_folders, redirect_output
from hpo.outcome import BEST_ATTR, TRACEBACK_ATTR, Outcome, failure_outcome, finite
from hpo.storage import OUTCOME_ATTR, REASON_ATTR
from hpo.study import OpenStudy
from trainer import Trainer
from trainer.checkpoint import find_checkpoint, newest_checkpoint
from trainer.state import DIVERGED, INTERRUPTED, best_epoch

RUN_ATTR = "hpo:run"


@dataclass(frozen=True)
class TrialReport:
    """What a worker tells its supervisor about a trial.

    Attributes:
        number: The trial.
        outcome: How it ended; None when it was put back to wait, or is somebody else's by now.
        value: Its best value of the study's metric, None where there is none.
        epochs: Epochs it has finished.
        duration_s: Seconds that this attempt took.
        reason: The error's text, for a failure.
        params: Its parameters.
    """

    number: int
    outcome: Outcome | None
    value: float | None
    epochs: int
    duration_s: float
    reason: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TrialRun:
    """One attempt at one trial, in this process.

    Attributes:
        opened: The study; its storage holds the trial's lease.
        trial: Optuna's trial, RUNNING.
        builder: Builds the trainer.
        device: Where to train.
        asked: Set when the trial is to be put down.
    """

    opened: OpenStudy
    trial: optuna.Trial
    builder: Builder
    device: torch.device
    asked: threading.Event
    _trainer: Trainer | None = None
    _error: Exception | SystemExit | None = None

    def run(self) -> TrialReport:
        """Train, and store what became of it.

        Returns:
            The report. An error of the trial's own is in it, not raised.

        Raises:
            StorageInternalError: The storage failed, which is not the trial's doing; it stays RUNNING.
        """
        started = time.monotonic()
        number, storage = self.trial.number, self.opened.storage
        outcome: Outcome | None
        try:
            folder = attempt_folder(self.opened.spec, number, storage.attempt_of(self._id))
            with redirect_output(folder / "log.txt"):
                outcome = self._train(folder)
            value = self._tell(outcome)
        except LeaseLostError:
            # Another attempt has the trial: nothing of this one counts any more.
            storage.forget(self._id)
            outcome, value = None, None
        epochs = self._trainer.state.epoch if self._trainer else 0
        reason = "" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        duration = time.monotonic() - started
        return TrialReport(number, outcome, value, epochs, duration, reason, dict(self.trial.params))

    @property
    def _id(self) -> int:
        return self.trial._trial_id  # noqa: SLF001 - Optuna has no public name for it

    def _train(self, folder: Path) -> Outcome | None:
        """Build and fit; returns the outcome, None for a trial that is to go on later."""
        try:
            trainer, data = self._prepared(folder)
            trainer.fit(data["train"], data["val"])
        except (LeaseLostError, StorageInternalError):
            raise
        except optuna.TrialPruned:
            return Outcome.PRUNED
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a study's code raises is its outcome
            self._error = error
            traceback.print_exc()
            return failure_outcome(error)
        state = trainer.state
        if state.stop_reason == DIVERGED:
            return Outcome.DIVERGED
        if state.batch_index or (state.stop_reason == INTERRUPTED and not trainer.finished):
            return None
        return Outcome.COMPLETE

    def _prepared(self, folder: Path) -> tuple[Trainer, Mapping[str, Any]]:
        """A trainer at the point where the trial last was, and the data."""
        spec, seed = self.opened.spec, self.opened.trial_seed(self.trial.number)
        params = self.opened.space.suggest(self.trial)
        config = spec.resolve(params)
        self._keep_run(seed)
        OmegaConf.save(OmegaConf.create({**config, "seed": seed}), folder / "config.yaml")
        data = self.builder.data(config)
        trainer = self._trainer = self.builder.trainer(
            config,
            RunPlace(folder, f"trial-{self.trial.number}", params),
            seed=seed,
            device=self.device,
            bridge=[StopWhenAsked(self.asked), PrunerCallback(self.trial, spec.study.metric)],
        )
        found = newest_checkpoint(self._checkpoint_folders(), self.device)
        if found is not None:
            print(f"going on from {found[0].path}", flush=True)
            trainer.load_state_dict(found[1])
        return trainer, data

    def _checkpoint_folders(self) -> list[Path]:
        return [folder / "checkpoints" for folder in attempt_folders(self.opened.spec, self.trial.number)]

    def _keep_run(self, seed: int) -> None:
        """Store how the trial is run; a trial that goes on keeps its number of threads, for equal bits."""
        stored = self.trial.user_attrs.get(RUN_ATTR)
        if stored is not None:
            torch.set_num_threads(stored["threads"])
            return
        owner = self.opened.storage.owner
        worker = owner.worker if owner else ""
        run = {"seed": seed, "threads": torch.get_num_threads(), "worker": worker, "device": str(self.device)}
        self.trial.set_user_attr(RUN_ATTR, run)

    def _tell(self, outcome: Outcome | None) -> float | None:
        """Store the outcome; returns the best value."""
        study, trial, storage = self.opened.study, self.trial, self.opened.storage
        best = self._best()
        value: float | None = None if best is None else best["metrics"][self.opened.spec.study.metric]
        if outcome is None:
            storage.requeue(self._id, "interrupted")
        elif outcome == Outcome.PRUNED:
            study.tell(trial, state=TrialState.PRUNED)
        elif outcome == Outcome.COMPLETE:
            trial.set_user_attr(BEST_ATTR, finite(best))
            study.tell(trial, value)
        elif outcome == Outcome.DIVERGED:
            trial.set_user_attr(OUTCOME_ATTR, outcome)
            study.tell(trial, float("inf") if self.builder.mode == "min" else float("-inf"))
        else:
            assert self._error is not None
            self._tell_failure(outcome, self._error)
        return value

    def _tell_failure(self, outcome: Outcome, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self.trial.set_user_attr(OUTCOME_ATTR, outcome)
        self.trial.set_user_attr(REASON_ATTR, f"{type(error).__name__}: {error}"[:2000])
        self.trial.set_user_attr(TRACEBACK_ATTR, text[-10_000:])
        self.opened.study.tell(self.trial, state=TrialState.FAIL)

    def _best(self) -> dict[str, Any] | None:
        """The best epoch: its number, its metrics and its checkpoint, relative to the output folder."""
        if self._trainer is None:
            return None
        history = self._trainer.state.history
        epoch = best_epoch(history, self.opened.spec.study.metric, self.builder.mode)
        if epoch is None:
            return None
        found = find_checkpoint(self._checkpoint_folders(), epoch)
        path = None if found is None else str(found[0].path.relative_to(self.opened.spec.output_dir))
        return {"epoch": epoch, "metrics": dict(history[epoch - 1]), "checkpoint": path}
