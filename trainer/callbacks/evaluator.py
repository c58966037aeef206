"""Evaluator: evaluates a validation set at chosen steps, at the start or at the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count
from trainer.state import CONTINUED, DIVERGED, ERROR, PRUNED
from trainer.step_log import StepRecord

logger = logging.getLogger(__name__)

#: Stop reasons after which nothing more is evaluated.
_BROKEN_OFF = CONTINUED | {ERROR, DIVERGED, PRUNED}


class Evaluator(Callback):
    """Evaluates one of the fit's validation sets at chosen steps, at the start and at the end.

    A fit can have several sets, by name. The first one is evaluated at each epoch's end in any case; an Evaluator
    for it adds evaluations. Any other set that has an Evaluator is evaluated only when that says so: at an epoch's
    end only with ``every_epoch``. The epoch's metrics then hold the latest numbers measured in that epoch; an
    epoch without any lacks them, and does not count for callbacks that monitor one of them (`EarlyStopping`,
    `BestWeights`). Numbers at the start are in the first epoch's metrics, as ``start_val_<set>_loss``. Those of
    single steps are in the records of `StepMetrics`, where that records the same steps, and all of them in
    ``history``.

    What is evaluated inside an epoch are the weights that are being trained; an average (`EMA`) comes into the
    model at the epoch's end, where what `GradientAccumulation` has left over may make a step that is due. An
    optimizer that has weights of its own for evaluation is switched there and back, which may round.

    Example::

        noisy_too = Evaluator("noisy", every_n_steps=100, max_batches=20)
        trainer = Trainer(model, optimizer, loss, callbacks=[noisy_too])
        trainer.fit(train, {"clean": clean, "noisy": noisy})

        callbacks: {evaluator: {data: noisy, every_n_steps: 100, at_end: true}}  # in a study file

    Args:
        data: Name of the set; empty: the first one.
        every_n_steps: Optimizer steps between two evaluations; None: none of these.
        at_steps: Evaluate after these optimizer steps.
        every_epoch: Evaluate at each epoch's end; the first set always is evaluated there.
        at_start: Evaluate before the first step; lazy modules then get their weights here, not in the first batch.
        at_end: Evaluate after the last epoch. If the run ends early, this comes after the epoch was logged: the
            numbers are then only in the log and in ``history``, which `Checkpoint` saves once more. A run that is
            interrupted, fails, diverges or is pruned is not evaluated.
        max_batches: Evaluate only the first so many batches; None: all.
        stop_after_first: Stop the run after the first evaluation, with the reason ``"evaluated"``.

    Attributes:
        history: The numbers of each evaluation by name, with its ``step``, the latest last.

    Raises:
        ValueError: A number is out of range, or no time is given; at fit start, if there is no such set.
    """

    priority = 30
    graph_safe = True
    transient = ("_looked",)

    def __init__(
        self,
        data: str = "",
        *,
        every_n_steps: int | None = None,
        at_steps: Sequence[int] = (),
        every_epoch: bool = False,
        at_start: bool = False,
        at_end: bool = False,
        max_batches: int | None = None,
        stop_after_first: bool = False,
    ) -> None:
        check_count("every_n_steps", every_n_steps, optional=True)
        check_count("max_batches", max_batches, optional=True)
        for step in at_steps:
            check_count("a step in at_steps", step)
        if not (every_n_steps or at_steps or every_epoch or at_start or at_end):
            raise ValueError("no time is given: give every_n_steps, at_steps, every_epoch, at_start or at_end")
        self.data = data
        self.every_n_steps = every_n_steps
        self.at_steps = frozenset(at_steps)
        self.every_epoch = every_epoch
        self.at_start = at_start
        self.at_end = at_end
        self.max_batches = max_batches
        self.stop_after_first = stop_after_first
        self.writes = (f"val_{data}_*", f"start_val_{data}_*") if data else ("start_val_*",)
        self.history: list[dict[str, float]] = []
        self._latest: dict[str, float] = {}  # metrics for the running epoch to record
        # The step up to which everything due has been evaluated; None: the step at which the fit starts.
        self._looked: int | None = None
        self._prefix = ""

    @property
    def name(self) -> str:
        """The callback's name, with that of its set."""
        return f"Evaluator({self.data})" if self.data else "Evaluator"

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Find the set, and exclude it from the validation at the end of each epoch."""
        if trainer.state.is_new:
            self.history, self._latest, self._looked = [], {}, None
        if self._looked is None or self._looked > trainer.state.step:  # an earlier checkpoint was loaded
            self._looked = trainer.state.step
        names = trainer.evaluation.names
        if not names:
            raise ValueError(
                f"there is no validation set for {self.name}: give fit validation data, or leave it out"
            )
        if self.data not in names:
            known = ", ".join(repr(name) for name in names if name) or "one without a name"
            raise ValueError(f"no validation set is called {self.data!r}: fit was given {known}")
        self._prefix = names[self.data]
        if self._prefix != names[""] and not self.every_epoch:
            trainer.evaluation.apart.add(self._prefix)
            if self.every_n_steps or self.at_steps or self.at_end:
                trainer.state.own_times.add(self._prefix)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Evaluate before the first step, if asked for."""
        if self.at_start and not trainer.state.step and not trainer.state.epoch:
            self._latest |= {f"start_{name}": value for name, value in self._evaluate(trainer).items()}

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Evaluate after the previous step if an error kept that from happening."""
        self._evaluate_if_due(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Evaluate after a step that is due."""
        self._evaluate_if_due(trainer)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Evaluate if the step of batches that were left over to accumulate is due."""
        self._evaluate_if_due(trainer)

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Add the metrics measured after these steps to their records."""
        measured = {int(item["step"]): item for item in self.history}
        for record in records:
            found = measured.get(record.step, {})
            record.values.update({name: value for name, value in found.items() if name != "step"})

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Record the latest metrics, except those that the validation of this epoch has measured."""
        latest, self._latest = self._latest, {}
        if self.at_end and trainer.plan.reached(trainer.state) and self._is_apart(trainer):
            latest |= self._evaluate(trainer)
        trainer.state.metrics.update({**latest, **trainer.state.metrics})

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Evaluate at the end of a run that has ended early."""
        reason, steps = trainer.state.stop_reason, [item["step"] for item in self.history]
        early = reason is not None and reason not in _BROKEN_OFF and trainer.state.step not in steps
        if self.at_end and early and self._is_apart(trainer):
            found = self._evaluate(trainer)
            trainer.state.request_checkpoint()  # so that the ended run is not evaluated again
            logger.info("step %d: %s", trainer.state.step, ", ".join(f"{n} {v:g}" for n, v in found.items()))

    def state_dict(self) -> dict[str, Any]:
        """The measured metrics, and those that no epoch has recorded yet."""
        return {"history": [dict(item) for item in self.history], "latest": dict(self._latest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        self.history = [dict(item) for item in state["history"]]
        self._latest = dict(state["latest"])
        self._looked = None

    def _is_apart(self, trainer: TrainerView) -> bool:
        """Whether the validation at the end of epochs leaves the set out."""
        return self._prefix in trainer.evaluation.apart

    def _evaluate_if_due(self, trainer: TrainerView) -> None:
        step = trainer.state.step
        if step == self._looked:
            return
        every = self.every_n_steps is not None and step % self.every_n_steps == 0
        if every or step in self.at_steps:
            self._latest |= self._evaluate(trainer)
        self._looked = step

    def _evaluate(self, trainer: TrainerView) -> dict[str, float]:
        found = trainer.evaluation.now(self._prefix, self.max_batches)
        self.history.append({"step": trainer.state.step, **found})
        if self.stop_after_first:
            trainer.state.stop("evaluated", now=True)
        return found
