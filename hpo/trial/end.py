"""Stores the end of an attempt: the one place where outcomes become trial states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.attributes import (
    BEST_ATTR,
    CONSTRAINT_ATTR,
    NEARER_ATTR,
    OUTCOME_ATTR,
    PARTS_ATTR,
    PREDICTION_ATTR,
    REASON_ATTR,
    SAME_AS_ATTR,
    TRACEBACK_ATTR,
    WORKER_ATTR,
)
from hpo.storage.lineage import inherited_epochs, trained_as
from hpo.storage.optuna_private import id_of_trial, known_of
from hpo.study.folders import attempt_folders
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, finite, outcome_of
from hpo.study.own_trials import trial_value
from hpo.trial.checkpoints import checkpoint_of_epoch
from hpo.trial.training_code import TrainingCode, came_to
from hpo.wording import listed, not_finite
from trainer.error_text import shortened
from trainer.recorded import Metrics

#: Maximum number of characters of a stored traceback; the trial's log has all of it.
_LONGEST_STORED: Final = 10_000


@dataclass(frozen=True)
class Failure:
    """Why a trial failed.

    Attributes:
        outcome: The outcome if the trial ends.
        reason: The cause, for people.
        traceback: The traceback; empty where nothing was raised.
        parts: Parts of each batch with which the trial resumes, instead of ending; None: it ends.
    """

    outcome: Outcome
    reason: str
    traceback: str = ""
    parts: int | None = None


@dataclass(frozen=True)
class TrialEnd:
    """Stores the result of an attempt at a trial.

    Attributes:
        opened: The study; its storage holds the trial's lease.
        trial: Optuna's trial, RUNNING.
        code: The code that trained it, or was to train it.
    """

    opened: OpenStudy
    trial: optuna.Trial
    code: TrainingCode

    @property
    def came_to(self) -> tuple[int, Mapping[str, float]] | None:
        """The trial's own epoch that counts, usually its best, and its metrics; None where no value is finite."""
        study = self.opened.spec.study
        return came_to(self.code, study.metric, study.mode, after=inherited_epochs(self.trial))

    @property
    def value(self) -> float | None:
        """The study's metric after that epoch."""
        found = self.came_to
        return None if found is None else found[1][self.opened.spec.study.metric]

    def without_value(self, ended: str | None) -> str | None:
        """Why a trial that ran to its end has no value; None where it has one.

        Args:
            ended: Why it ended early, if it did.
        """
        missing = self._missing_metric
        if missing is None:
            return None
        early = f" ({ended})" if ended else ""
        text = f"it ended{early} before an epoch with a finite {missing}"
        recorded = sorted({name for metrics in self._history for name in metrics})
        others = recorded and missing not in recorded
        return f"{text}: what it has reported is {listed(recorded)}" if others else text

    @property
    def _missing_metric(self) -> str | None:
        """The first of the study's metrics without a finite value at the epoch that counts, if any."""
        study, found = self.opened.spec.study, self.came_to
        if found is None:
            return study.metric
        return next((name for name in study.goals if not math.isfinite(found[1].get(name, math.nan))), None)

    def store(self, outcome: Outcome | None, failure: Failure | None) -> None:
        """Store the outcome; None requeues the trial.

        Args:
            outcome: How the trial ended.
            failure: Why a trial failed; for a requeued trial, the failure after which it resumes, if any.
        """
        study, goals = self.opened.study, self.opened.spec.study.goals
        found = self.came_to
        if outcome in (Outcome.COMPLETE, Outcome.PRUNED, Outcome.DIVERGED):
            self._keep_to_history()
            self._keep_prediction()
            self.keep_constraints()
        if outcome is None:
            self._requeue(failure)
        elif outcome == Outcome.PRUNED:
            study.tell(self.trial, state=TrialState.PRUNED)
        elif outcome == Outcome.COMPLETE:
            assert found is not None
            self.trial.set_user_attr(BEST_ATTR, finite(self._best(*found)))
            study.tell(self.trial, [found[1][name] for name in goals])
        elif outcome == Outcome.DIVERGED:
            self.trial.set_user_attr(OUTCOME_ATTR, outcome)
            self.trial.set_user_attr(REASON_ATTR, self._why_diverged())
            study.tell(self.trial, [math.inf if each == "minimize" else -math.inf for each in goals.values()])
        else:
            assert failure is not None
            self._store_failure(failure)

    def _why_diverged(self) -> str:
        """Which values were not finite, for people, as far as the metrics show it."""
        last: Mapping[str, float] = self.code.returned or (self._history[-1] if self._history else {})
        bad = [name for name, value in last.items() if not math.isfinite(value)]
        watched = [name for name in bad if name in {"train_loss", "val_loss", *self.opened.spec.study.goals}]
        return not_finite(len(self._history), watched or bad, returned=self.code.returned is not None)

    def pause(self) -> None:
        """Store that the trial is paused after its last epoch, with all that is stored for a pruned trial."""
        found = self.came_to
        self._keep_to_history()
        self._keep_prediction()
        self.keep_constraints()
        if found is not None:
            self.trial.set_user_attr(BEST_ATTR, finite(self._best(*found)))
        self.opened.storage.pause(id_of_trial(self.trial), len(self._history))

    def keep_constraints(self) -> None:
        """Store how far the trial violates each bound at the epoch that counts, or else at its last epoch.

        Also store whether training has brought it nearer to each bound than it was after its first epoch; see
        `hpo.search.schedulers.mending`.
        """
        bounds = self.opened.spec.study.bounds
        if not self._history or not bounds:
            return
        found = self.came_to
        metrics = self._history[-1] if found is None else found[1]
        for bound in bounds:
            self._set_constraint(bound.metric, bound.violation(metrics.get(bound.metric, math.nan)))
        measured = {each.metric: [m[each.metric] for m in self._history if each.metric in m] for each in bounds}
        nearer = {
            each.metric: each.comes_nearer(values) for each in bounds if len(values := measured[each.metric]) > 1
        }
        if nearer:
            self.trial.storage.set_trial_system_attr(id_of_trial(self.trial), NEARER_ATTR, nearer)

    def take_over(self, known: FrozenTrial) -> float | None:
        """Store another trial's result as this trial's; returns the value."""
        trial, outcome = self.trial, Outcome(outcome_of(known))
        for step, value in known.intermediate_values.items():
            trial.storage.set_trial_intermediate_value(id_of_trial(trial), step, value)
        for metric, violation in known.constraints.items():
            self._set_constraint(metric, violation)
        for name in (BEST_ATTR, OUTCOME_ATTR):
            if name in known.user_attrs:
                trial.set_user_attr(name, known.user_attrs[name])
        trial.set_user_attr(SAME_AS_ATTR, trained_as(known))
        if outcome == Outcome.PRUNED:
            self.opened.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.opened.study.tell(trial, known.values)
        return trial_value(self.opened, known)

    @property
    def _history(self) -> Sequence[Metrics]:
        return self.code.history

    def _requeue(self, failure: Failure | None) -> None:
        """Requeue the trial; after memory ran out, with its batches in the failure's number of parts."""
        if failure is not None:
            self.trial.set_user_attr(PARTS_ATTR, failure.parts)
        reason = "interrupted" if failure is None else failure.reason
        self.opened.storage.requeue(id_of_trial(self.trial), reason)

    def _store_failure(self, failure: Failure) -> None:
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

    def _set_constraint(self, metric: str, violation: float) -> None:
        # Trial.set_constraint would keep the value of an earlier attempt that was killed before it ended.
        storage, trial_id = self.trial.storage, id_of_trial(self.trial)
        storage.set_trial_system_attr(trial_id, f"{CONSTRAINT_ATTR}{metric}", violation)

    def _keep_to_history(self) -> None:
        """Delete the values of epochs that only an earlier attempt has trained; they are not of this curve."""
        last = len(self._history)
        if any(step > last for step in known_of(self.trial).intermediate_values):
            self.opened.storage.forget_reports(id_of_trial(self.trial), last)

    def _keep_prediction(self) -> None:
        """Store the predictions of the final loss beside the actual one, if there are predictions."""
        record = self.code.prediction
        if record is not None:
            self.trial.set_user_attr(PREDICTION_ATTR, finite(record))

    def _best(self, epoch: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The epoch that counts: its number, its metrics, and its checkpoint's path in the output folder.

        Where the study has bounds, also whether the epoch is within them.
        """
        spec = self.opened.spec
        found = checkpoint_of_epoch(attempt_folders(spec, self.trial.number), epoch)
        path = None if found is None else str(found.path.relative_to(spec.output_dir))
        best = {"epoch": epoch, "metrics": dict(metrics), "checkpoint": path}
        if bounds := spec.study.bounds:
            best["within"] = all(each.violation(metrics.get(each.metric, math.nan)) <= 0 for each in bounds)
        return best
