"""Compute: trains, evaluates or predicts one batch, with the events around each action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView
from trainer.data.lengths import known_samples, samples_in
from trainer.state import BACKWARD, BATCH, ZERO_GRAD
from trainer.step.optimizer_step import OptimizerStep
from trainer.step.parts import is_compiled
from trainer.step.precision import Precision
from trainer.step.supervised import Step, StepOutput, StepResult, split_output


class Compute(OptimizerStep):
    """Forward, backward and optimizer step for a trainer.

    Args:
        trainer: The trainer, with its model, optimizer, schedulers and state.
        model: What the step calls: the trainer's model, or its compiled form.
        step: Computes one batch.
        precision: The run's precision.
        scheduler_interval: When the scheduler steps, if there is only one.
        scheduler_monitor: The metric that a ReduceLROnPlateau follows.
    """

    def __init__(
        self,
        trainer: TrainerView,
        model: nn.Module,
        step: Step,
        precision: Precision,
        *,
        scheduler_interval: object,
        scheduler_monitor: str,
    ) -> None:
        super().__init__(
            trainer,
            precision,
            scheduler_interval=scheduler_interval,
            scheduler_monitor=scheduler_monitor,
            is_compiled=is_compiled(model),
        )
        self._model = model
        self._step = step
        self._recorded = False  # whether the running batch counts as done

    def train(self, batch: Any) -> None:
        """Train on one batch, which is on the device."""
        state, fire = self._trainer.state, self._trainer.fire
        state.batch = batch
        state.gradient_share = 1.0
        if state.norms:
            state.norms = {}
        self._recorded = self._updated = False
        fire("on_train_batch_start")
        try:
            if state.skips and BATCH in state.skips:
                self._skip_batch()
            else:
                self._run(state.batch)
        finally:
            # Even if a hook failed: a batch that was recorded must not be recorded again.
            state.batch_index += self._recorded
            state.data_batch += self._recorded
        state.skipped_step = not self._updated
        fire("on_train_batch_end")
        if state.skips:
            state.forget_batch_skips()

    def prepare(self, callbacks: Iterable[Callback]) -> None:
        """Get ready for a fit with these callbacks."""

    def evaluate(self, batch: Any, prefix: str, scope: str) -> None:
        """Evaluate one batch; gradients are off."""
        state, fire = self._trainer.state, self._trainer.fire
        state.batch = batch
        fire(f"on_{scope}_batch_start")
        fire(f"on_before_{scope}_forward")
        result = self._forward()
        fire(f"on_after_{scope}_forward")
        self._record(prefix, result.extra)
        fire(f"on_{scope}_batch_end")

    def predict(self, batch: Any) -> Any:
        """The outputs for one batch; gradients are off."""
        state, fire = self._trainer.state, self._trainer.fire
        state.batch = batch
        fire("on_predict_batch_start")
        own = getattr(self._step, "predict", None)
        if own is None:
            self._forward()
        else:
            with self._precision.autocast():
                state.outputs = own(self._model, state.batch)
        fire("on_predict_batch_end")
        return state.outputs

    def _run(self, batch: Any) -> None:
        """Everything between the events of the batch's start and end."""
        fire = self._trainer.fire
        self._trainer.state.batch = batch
        self._act(ZERO_GRAD, self._clear_gradients)
        fire("on_before_forward")
        result = self._forward()
        fire("on_after_forward")
        self._recorded = True
        self._record("train", result.extra)
        self._act(BACKWARD, self._backward)
        self.step_optimizer()

    def _count_step(self, take: Callable[[], None]) -> None:
        try:
            super()._count_step(take)
        finally:
            self._trainer.state.step += self._updated

    def _skip_batch(self) -> None:
        """Count a batch that a hook skipped, without computing anything."""
        state = self._trainer.state
        state.outputs, state.loss, state.weight, state.scalars = None, None, 0.0, {}
        self._recorded = True

    def _forward(self) -> StepResult:
        state = self._trainer.state
        with self._precision.autocast():
            output = self._step(self._model, state.batch)
        return self._taken(output)

    def _taken(self, output: StepOutput) -> StepResult:
        """Put what the step returned on the state; a batch whose samples are another process's counts nothing."""
        state = self._trainer.state
        result = split_output(output, state.batch)
        state.loss, state.outputs, state.weight, state.scalars = result[:4]
        state.loss_of_all = False
        if state.absent:
            state.loss, state.weight = result.loss * 0, None if result.weight is None else 0.0
        return result

    def _record(self, prefix: str, extra: Mapping[str, Any]) -> None:
        state, recorder = self._trainer.state, self._trainer.recorder
        assert state.loss is not None
        if state.weight is None:
            counts = not (state.loss_of_all and self._trainer.group.rank)
            recorder.record(f"{prefix}_loss", state.loss, float(counts), "sum")
        else:
            recorder.record(f"{prefix}_loss", state.loss, state.weight)
        if extra:
            weight = self._samples() if state.weight is None else state.weight
            for name, value in extra.items():
                recorder.record(f"{prefix}_{self._own_name(name)}", value, weight)
        if self._trainer.metrics:
            compared = _compared(state.outputs, state.batch)
            with torch.no_grad():
                recorder.measure(prefix, *compared, self._samples())

    def _samples(self) -> Tensor | float:
        """The batch's number of samples, or its weight if that is unknown; 0 if they are another process's."""
        state = self._trainer.state
        if state.absent:
            return 0.0
        length = known_samples(state.batch)
        if length is None and state.weight is not None:
            return state.weight
        return float(samples_in(state.batch) if length is None else length)

    def _own_name(self, name: str) -> str:
        if name in self._trainer.metrics:
            raise ValueError(
                f"the step returns {name!r}, and a metric of the Trainer is called {name!r} too: both would be "
                f"recorded as train_{name}; rename one of the two"
            )
        return name


def _compared(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """The two arguments of metrics: the outputs, and the last part of the batch."""
    if not isinstance(batch, tuple | list):
        raise TypeError(
            f"metrics take (outputs, targets), but a batch is a {type(batch).__name__}, which does not say what "
            "its targets are: compute them in the step, and return them beside the loss"
        )
    if outputs is None:
        raise TypeError(
            "metrics take (outputs, targets), but the step returned no outputs: return them beside the loss, as "
            "{'loss': loss, 'outputs': outputs}"
        )
    return outputs, batch[-1]
