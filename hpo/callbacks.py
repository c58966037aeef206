"""The bridge between a Trainer and its trial: reports and pruning."""

from __future__ import annotations

import math
from typing import Final

import optuna
from optuna.pruners import NopPruner

from trainer.callback import Callback, TrainerView
from trainer.state import DIVERGED, PRUNED

PRUNED_ATTR: Final = "hpo:pruned_at"


class PrunerCallback(Callback):
    """Reports the metric of each epoch to the trial, then ends it where the pruner says so.

    On resume the storage is brought to the checkpoint's history: what it lacks is sent, what differs is
    rewritten. A step that the storage already held below its last one was asked about then, and is not again;
    a decision to prune is stored before it is acted on, so it holds for a trial that was lost in between: that
    one trains up to the epoch it was pruned at, and ends.

    Args:
        trial: The running trial.
        metric: The metric to report, at step = number of finished epochs.

    Raises:
        optuna.TrialPruned: From ``on_epoch_end``, or from ``on_fit_start`` where a decision made before is due.
    """

    priority = 85

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial = trial
        self.metric = metric
        self.reads = (metric,)
        self._asked = 0
        self._decided: int | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Bring the storage to the history."""
        frozen = self.trial.storage.get_trial(self.trial._trial_id)  # noqa: SLF001 - Optuna has no public id
        stored = frozen.intermediate_values
        for step, metrics in enumerate(trainer.state.history, start=1):
            value = metrics.get(self.metric)
            if value is None:  # validation was skipped
                continue
            if step not in stored or not _same(stored[step], value):
                self._report(step, value)
        self._asked = max(stored, default=0) - 1
        self._decided = frozen.user_attrs.get(PRUNED_ATTR)
        if self._decided is not None and trainer.state.epoch >= self._decided:
            self._prune(trainer)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Report, and ask unless the run has diverged."""
        state = trainer.state
        value = state.metric(self.metric)
        if value is None:
            return
        self._report(state.epoch, value)
        if self._decided is not None:
            # The checkpoint lay before the epoch it was pruned at: it gets there again, and is not asked about.
            if state.epoch >= self._decided:
                self._prune(trainer)
            return
        if state.stop_reason == DIVERGED or state.epoch <= self._asked:
            return
        if isinstance(self.trial.study.pruner, NopPruner) or not self.trial.should_prune():
            return
        self.trial.set_user_attr(PRUNED_ATTR, state.epoch)
        self._prune(trainer)

    def _report(self, step: int, value: float) -> None:
        # Not trial.report: that keeps the first value of a step, with a warning. As it does, the value goes
        # into the trial's own copy too, which is what pruners are shown.
        self.trial.storage.set_trial_intermediate_value(self.trial._trial_id, step, value)  # noqa: SLF001
        self.trial._cached_frozen_trial.intermediate_values[step] = value  # noqa: SLF001

    def _prune(self, trainer: TrainerView) -> None:
        trainer.state.stop(PRUNED)
        raise optuna.TrialPruned(f"pruned after epoch {trainer.state.epoch}")


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))
