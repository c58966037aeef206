"""One trial, from its parameters to its state: the one place where outcomes become trial states."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import optuna
import torch
from omegaconf import OmegaConf
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from torch.utils.data import DataLoader

from hpo.errors import LeaseLostError
from hpo.search.distinct import twin
from hpo.storage.attributes import (
    BEST_ATTR,
    CONSTRAINT_ATTR,
    OUTCOME_ATTR,
    PARTS_ATTR,
    PREDICTION_ATTR,
    REASON_ATTR,
    RUN_ATTR,
    SAME_AS_ATTR,
    TRACEBACK_ATTR,
    WORKER_ATTR,
)
from hpo.storage.ledger import Lease
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.outage import first_line
from hpo.study.code_record import trial_codes
from hpo.study.folders import (
    attempt_folder,
    attempt_folders,
    note_stop,
    print_error,
    redirect_output,
    set_aside,
)
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import (
    Outcome,
    finite,
    leading_value,
    outcome_of,
    prediction_record,
)
from hpo.trial.artifacts import keep_artifacts
from hpo.trial.builder import Builder, RunPlace
from hpo.trial.failure import failure_outcome, is_device_memory
from hpo.trial.forks import EndForks, only_in
from hpo.trial.micro_batch import MicroBatches, cut, finer
from hpo.trial.pruner_callback import PrunerCallback
from hpo.trial.report import TrialReport
from hpo.trial.stopping import StopRequest, Watch
from trainer import Trainer
from trainer.callbacks import LossPrediction
from trainer.checkpoint.manager import find_checkpoint, newest_checkpoint
from trainer.error_text import error_text, shortened, traceback_text
from trainer.recorded import Metrics
from trainer.state import DIVERGED, INTERRUPTED, TrainState, best_epoch

#: Characters of a traceback that the storage keeps; the trial's log has more.
_LONGEST_STORED: Final = 10_000


@dataclass(frozen=True)
class _Failure:
    """Why a trial failed; ``traceback`` is empty where nothing was raised."""

    outcome: Outcome
    reason: str
    traceback: str = ""
    parts: int | None = None  # it is to go on with batches in so many parts


@dataclass
class TrialRun:
    """One attempt at one trial, in this process.

    Attributes:
        opened: The study; its storage holds the trial's lease.
        trial: Optuna's trial, RUNNING.
        builder: Builds the trainer.
        device: Where to train.
        request: What others want of this worker.
        pulse: Shown the run's state again and again, see `hpo.trial.stopping.Watch`.
    """

    opened: OpenStudy
    trial: optuna.Trial
    builder: Builder
    device: torch.device
    request: StopRequest
    pulse: Callable[[TrainState], None]
    _trainer: Trainer | None = None
    _failure: _Failure | None = None
    _parts: int = 1

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
            attempt = storage.attempt_of(self._id)
            foreign = set_aside(self.opened.spec, number, attempt)
            folder = attempt_folder(self.opened.spec, number, attempt)
            with redirect_output(folder / "log.txt"):
                for name in foreign:
                    print(f"a folder was here that this study's database does not know; it is now {name}")
                known = self._known()
                outcome = self._train(folder) if known is None else Outcome(outcome_of(known))
                if outcome is not None:
                    keep_artifacts(self.opened, self._id, number, folder)
            value = self._tell(outcome) if known is None else self._tell_as(known)
        except StorageInternalError as error:
            note_stop(folder, f"the database failed: {first_line(error)}")
            raise
        except LeaseLostError:
            # Another attempt has the trial: nothing of this one counts any more.
            storage.forget(self._id)
            outcome, value, self._failure = None, None, None
        return TrialReport(
            number,
            outcome,
            value,
            epochs=self._trainer.state.epoch if self._trainer else 0,
            duration_s=time.monotonic() - started,
            reason=self._told,
            params=dict(self.trial.params),
        )

    @property
    def _told(self) -> str:
        """What is to be said of its end beside the outcome."""
        if self._failure is not None:
            return self._failure.reason
        same = self.trial.user_attrs.get(SAME_AS_ATTR)
        return "" if same is None else f"the same parameters as trial {same}: its result was taken over"

    @property
    def _id(self) -> int:
        return id_of_trial(self.trial)

    def _known(self) -> FrozenTrial | None:
        """A trial with the same parameters whose result is to be taken over."""
        if self.opened.spec.study.duplicates != "reuse":
            return None
        # One that has begun to train goes on as itself, whatever has ended meanwhile.
        if RUN_ATTR in self.trial.user_attrs:
            return None
        known = twin(self.opened.study, self.trial.number, self.opened.space.suggest(self.trial))
        owner = self.opened.storage.owner
        # What other code came to is no result of this one.
        same = known is None or owner is None or trial_codes(self.opened.storage, known) == [owner.code]
        return known if same else None

    def _tell_as(self, known: FrozenTrial) -> float | None:
        """Store another trial's result as this one's; returns the value."""
        trial, outcome = self.trial, Outcome(outcome_of(known))
        for step, value in known.intermediate_values.items():
            trial.storage.set_trial_intermediate_value(self._id, step, value)
        for metric, violation in known.constraints.items():
            self._set_constraint(metric, violation)
        for name in (BEST_ATTR, OUTCOME_ATTR):
            if name in known.user_attrs:
                trial.set_user_attr(name, known.user_attrs[name])
        trial.set_user_attr(SAME_AS_ATTR, known.number)
        if outcome == Outcome.PRUNED:
            self.opened.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.opened.study.tell(trial, known.values)
        return leading_value(known)

    def _train(self, folder: Path) -> Outcome | None:
        """Build and fit; returns the outcome, None for a trial that is to go on later."""
        try:
            with only_in(self.opened.storage.process):
                trainer, data = self._prepared(folder)
                trainer.fit(data["train"], data["val"])
        except (LeaseLostError, StorageInternalError):
            raise
        except optuna.TrialPruned:
            return Outcome.PRUNED
        except BaseException as error:  # noqa: BLE001 - whatever a study's code raises; a worker ignores SIGINT
            self._failure = self._failure_of(error)
            print_error(self._failure.traceback)
            return None if self._failure.parts else self._failure.outcome
        state = trainer.state
        if state.stop_reason == DIVERGED:
            return Outcome.DIVERGED
        if state.stop_reason == INTERRUPTED and not trainer.finished:
            verdict = self.request.verdict(self.trial.number)
            if verdict is None and self.request.leaving:
                return None
            if verdict is not None:
                self._failure = _Failure(Outcome(verdict.outcome), verdict.reason)
                return self._failure.outcome
        if (missing := self._missing_metric()) is not None:
            said = f" ({state.stop_reason})" if state.stop_reason else ""
            self._failure = _Failure(Outcome.ERROR, f"it ended{said} before an epoch with a finite {missing}")
            return Outcome.ERROR
        return Outcome.COMPLETE

    def _missing_metric(self) -> str | None:
        """The first of the study's metrics that its best epoch has no finite value of."""
        study, epoch = self.opened.spec.study, self._best_epoch()
        if epoch is None:
            return study.metric
        metrics = self._history[epoch - 1]
        return next((name for name in study.goals if not math.isfinite(metrics.get(name, math.nan))), None)

    def _failure_of(self, error: BaseException) -> _Failure:
        outcome = failure_outcome(error)
        reason, text = error_text(error), traceback_text(error)
        again = self.opened.spec.run.on_oom == "retry_with_accumulation"
        if outcome != Outcome.OUT_OF_MEMORY or not again or not is_device_memory(error) or self._trainer is None:
            return _Failure(outcome, reason, text)
        config = self.opened.spec.resolve(self.trial.params)
        ready = isinstance(self.builder.data(config)["train"], DataLoader)
        parts = None if ready else finer(config, self._parts)
        if parts is None:
            return _Failure(outcome, f"{reason} (its batches can't be cut any further)", text)
        return _Failure(outcome, f"{reason}; it goes on with each batch in {parts} parts", text, parts)

    def _prepared(self, folder: Path) -> tuple[Trainer, Mapping[str, Any]]:
        """A trainer at the point where the trial last was, and the data."""
        spec, seed = self.opened.spec, self.opened.trial_seed(self.trial.number)
        params = self.opened.space.suggest(self.trial)
        config = spec.resolve(params)
        self._go_on_as_before(seed)
        _save_config(folder, config, seed)
        data = self.builder.data(config)
        laid_out = self.builder.laid_out(config, data)
        if laid_out != config:
            config = laid_out
            _save_config(folder, config, seed)
        lease = Lease(self._id, self.opened.storage.attempt_of(self._id))
        bridge = [
            EndForks(self.opened.storage.process),
            Watch(self.request, self.trial.number, lease, self.pulse),
            MicroBatches(self._parts),
            PrunerCallback(
                self.trial,
                spec.study.metric,
                self.opened.scheduler,
                background=spec.run.background_reports,
                leave=self.request.leave,
            ),
        ]
        trainer = self._trainer = self.builder.trainer(
            cut(config, self._parts),
            RunPlace(folder, f"trial-{self.trial.number}", params),
            seed=seed,
            device=self.device,
            bridge=bridge,
        )
        found = newest_checkpoint(self._checkpoint_folders(), self.device)
        if found is not None:
            print(f"going on from {found[0].path}", flush=True)
            trainer.load_state_dict(found[1])
        return trainer, data

    def _checkpoint_folders(self) -> list[Path]:
        return [folder / "checkpoints" for folder in attempt_folders(self.opened.spec, self.trial.number)]

    def _go_on_as_before(self, seed: int) -> None:
        """Store how the trial is run; one that goes on keeps its number of threads, for equal bits."""
        attrs = self.trial.user_attrs
        self._parts = int(attrs.get(PARTS_ATTR, 1))
        if RUN_ATTR in attrs:
            torch.set_num_threads(attrs[RUN_ATTR]["threads"])
            return
        owner = self.opened.storage.owner
        worker = owner.worker if owner else ""
        run = {"seed": seed, "threads": torch.get_num_threads(), "worker": worker, "device": str(self.device)}
        self.trial.set_user_attr(RUN_ATTR, run)

    def _tell(self, outcome: Outcome | None) -> float | None:
        """Store the outcome; returns the best value."""
        study, trial, epoch = self.opened.study, self.trial, self._best_epoch()
        goals = self.opened.spec.study.goals
        value = None if epoch is None else self._history[epoch - 1][self.opened.spec.study.metric]
        if outcome in (Outcome.COMPLETE, Outcome.PRUNED, Outcome.DIVERGED):
            self._keep_prediction()
            self._keep_constraints(epoch)
        if outcome is None:
            self._put_back()
        elif outcome == Outcome.PRUNED:
            study.tell(trial, state=TrialState.PRUNED)
        elif outcome == Outcome.COMPLETE:
            assert epoch is not None
            trial.set_user_attr(BEST_ATTR, finite(self._best(epoch)))
            study.tell(trial, [self._history[epoch - 1][name] for name in goals])
        elif outcome == Outcome.DIVERGED:
            trial.set_user_attr(OUTCOME_ATTR, outcome)
            study.tell(trial, [math.inf if each == "minimize" else -math.inf for each in goals.values()])
        else:
            assert self._failure is not None
            self._tell_failure(self._failure)
        return value

    def _put_back(self) -> None:
        """Give the trial back, to go on later; after a failure, in a way that may succeed."""
        if self._failure is not None:
            self.trial.set_user_attr(PARTS_ATTR, self._failure.parts)
        self.opened.storage.requeue(self._id, "interrupted" if self._failure is None else self._failure.reason)

    def _tell_failure(self, failure: _Failure) -> None:
        owner = self.opened.storage.owner
        attrs = {
            REASON_ATTR: failure.reason,
            TRACEBACK_ATTR: shortened(failure.traceback, _LONGEST_STORED),
            WORKER_ATTR: None if owner is None else f"{owner.worker} on {owner.host}, {owner.device}",
            OUTCOME_ATTR: failure.outcome,
        }
        for name, value in attrs.items():
            if value:
                self.trial.set_user_attr(name, value)
        self.opened.study.tell(self.trial, state=TrialState.FAIL)

    def _keep_constraints(self, epoch: int | None) -> None:
        """Store how far the trial is beyond each bound, at its best epoch, or its last where none is the best."""
        if not self._history:
            return
        metrics = self._history[-1 if epoch is None else epoch - 1]
        for bound in self.opened.spec.study.bounds:
            self._set_constraint(bound.metric, bound.violation(metrics.get(bound.metric, math.nan)))

    def _set_constraint(self, metric: str, violation: float) -> None:
        # Trial.set_constraint keeps the value of an attempt that was killed before it could tell the outcome.
        self.trial.storage.set_trial_system_attr(self._id, f"{CONSTRAINT_ATTR}{metric}", violation)

    def _keep_prediction(self) -> None:
        """Store the predictions of the final loss beside what it came to, if there are any."""
        assert self._trainer is not None
        state = self._trainer.state
        for callback in self._trainer.callbacks.callbacks:
            if isinstance(callback, LossPrediction):
                whole = self._trainer.finished
                record = prediction_record(state.history, callback.metric, state.max_epochs, whole=whole)
                if record is not None:
                    self.trial.set_user_attr(PREDICTION_ATTR, finite(record))

    @property
    def _history(self) -> list[Metrics]:
        return [] if self._trainer is None else self._trainer.state.history

    def _best_epoch(self) -> int | None:
        return best_epoch(self._history, self.opened.spec.study.metric, self.builder.mode)

    def _best(self, epoch: int) -> dict[str, Any]:
        """The best epoch: its number, its metrics and its checkpoint, relative to the output folder."""
        found = find_checkpoint(self._checkpoint_folders(), epoch)
        path = None if found is None else str(found[0].path.relative_to(self.opened.spec.output_dir))
        return {"epoch": epoch, "metrics": dict(self._history[epoch - 1]), "checkpoint": path}


def _save_config(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    OmegaConf.save(OmegaConf.create({**config, "seed": seed}), folder / "config.yaml")
