"""Compute: what is done with one batch, action by action, with the events around each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.data.batches import batch_length
from trainer.lr_schedulers import needs_metric
from trainer.state import BACKWARD, DIVERGED, OPTIMIZER_STEP, SCHEDULER_STEP, ZERO_GRAD
from trainer.step import direct
from trainer.step.fused import check_gradients
from trainer.step.parts import is_compiled
from trainer.step.precision import Precision
from trainer.step.supervised import Step, StepResult, split_output

logger = logging.getLogger(__name__)

_AROUND = {
    action: (f"on_before_{action}", f"on_after_{action}")
    for action in (ZERO_GRAD, BACKWARD, OPTIMIZER_STEP, SCHEDULER_STEP)
}
# The loss scale has then fallen by a factor of 10**15, far below what any gradient needs that is a number.
_MOST_OVERFLOWS = 50


class Compute:
    """Forward, backward and optimizer step for a trainer.

    Args:
        trainer: Whose model, optimizer, scheduler and state they are.
        model: What is called: the trainer's model, or its compiled form.
        step: Computes one batch.
        precision: In which numbers.
        scheduler_per_step: Whether the scheduler goes with the optimizer's step.
        scheduler_monitor: The metric that a ReduceLROnPlateau follows.
    """

    def __init__(
        self,
        trainer: TrainerView,
        model: nn.Module,
        step: Step,
        precision: Precision,
        *,
        scheduler_per_step: bool,
        scheduler_monitor: str,
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._step = step
        self._precision = precision
        self._scheduler_per_step = scheduler_per_step
        self._scheduler_monitor = scheduler_monitor
        self._compiled = is_compiled(model)
        self._recorded = False  # whether the loss of the running batch is
        self._updated = False  # whether the running step has changed the weights
        self._scheduled = False  # whether the scheduler went with it
        self._direct_step = direct.DirectStep(trainer.optimizer)

    def train(self, batch: Any) -> None:
        """Train on one batch, on the device."""
        state, fire = self._trainer.state, self._trainer.fire
        state.batch = batch
        state.gradient_share = 1.0
        fire("on_train_batch_start")
        self._recorded = False
        try:
            self._run(state.batch)
        finally:
            # Also where a hook failed: what is recorded is not to be recorded again.
            state.batch_index += self._recorded
            state.data_batch += self._recorded
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
        self._record(prefix, self._forward().extra)
        fire(f"on_{scope}_batch_end")

    def step_optimizer(self) -> None:
        """Take the optimizer's step unless a hook skips it, and the scheduler's where that goes with it."""
        optimizer = self._trainer.optimizer
        if OPTIMIZER_STEP in self._trainer.state.skips:
            return
        self._precision.unscale(optimizer)
        self._count_step(lambda: self._act(OPTIMIZER_STEP, self._update))
        self._precision.skip_step()

    def step_scheduler(self) -> None:
        """Step the scheduler, if there is one."""
        if self._trainer.scheduler is not None:
            self._act(SCHEDULER_STEP, self._advance_scheduler)

    def _run(self, batch: Any) -> None:
        """Everything between the batch's start and its end."""
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
        """Let ``take`` update the weights, and count that, in the schedule too, also where a hook then failed."""
        self._updated = self._scheduled = False
        try:
            take()
            if self._updated and self._scheduler_per_step:
                self.step_scheduler()
        except BaseException:
            missed = self._updated and self._scheduler_per_step and not self._scheduled
            if missed and SCHEDULER_STEP not in self._trainer.state.skips:
                self._advance_scheduler()
            raise
        finally:
            self._trainer.state.step += self._updated

    def _act(self, action: str, work: Callable[[], bool | None]) -> None:
        """One action with its two events, unless a hook asked to leave it out; False from ``work``: not done."""
        state = self._trainer.state
        if action in state.skips:
            return
        before, after = _AROUND[action]
        self._trainer.fire(before)
        if action in state.skips or work() is False:
            return
        self._trainer.fire(after)

    def _clear_gradients(self) -> None:
        """``optimizer.zero_grad()`` without its profiler's mark, which costs a small model a tenth of its step."""
        optimizer = self._trainer.optimizer
        if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _forward(self) -> StepResult:
        state = self._trainer.state
        with self._precision.autocast():
            output = self._step(self._model, state.batch)
        result = split_output(output, state.batch)
        state.loss, state.outputs, state.weight = result.loss, result.outputs, result.weight
        return result

    def _backward(self) -> None:
        loss = self._trainer.state.loss
        assert loss is not None
        loss = self._precision.scale(loss)
        share = self._trainer.state.gradient_share
        if isinstance(share, Tensor) or share != 1:
            loss = loss * share
        if self._compiled:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            direct.backward(loss)

    def _update(self) -> bool:
        self._updated = self._precision.step(self._trainer.optimizer, self._take_step)
        if self._precision.overflows >= _MOST_OVERFLOWS:
            logger.error(
                "the gradients of %d steps in a row are not finite in fp16, the last at a loss scale of %g: "
                "diverged; lower the learning rate, or use bf16 or fp32",
                self._precision.overflows,
                self._precision.state_dict()["scale"],
            )
            self._trainer.state.stop(DIVERGED, now=True)
        return self._updated

    def _take_step(self) -> None:
        check_gradients(self._trainer.optimizer)
        self._direct_step()

    def _record(self, prefix: str, extra: Mapping[str, Any]) -> None:
        state, recorder = self._trainer.state, self._trainer.recorder
        assert state.loss is not None
        if state.weight is None:
            recorder.record(f"{prefix}_loss", state.loss, reduce="sum")
        else:
            recorder.record(f"{prefix}_loss", state.loss, state.weight)
        if extra:
            weight = float(batch_length(state.batch)) if state.weight is None else state.weight
            for name, value in extra.items():
                recorder.record(f"{prefix}_{self._own_name(name)}", value, weight)
        if self._trainer.metrics:
            targets = _targets(state.batch)
            with torch.no_grad():
                recorder.measure(prefix, state.outputs, targets, float(batch_length(state.batch)))

    def _own_name(self, name: str) -> str:
        if name in self._trainer.metrics:
            raise ValueError(
                f"the step returns {name!r}, and a metric of the Trainer is called {name!r} too: both would be "
                f"recorded as train_{name}; rename one of the two"
            )
        return name

    def _advance_scheduler(self) -> None:
        scheduler = self._trainer.scheduler
        self._scheduled = True
        if scheduler is None:
            return
        if not needs_metric(scheduler):
            scheduler.step()
            return
        try:
            value = self._trainer.state.metric(self._scheduler_monitor)
        except KeyError as error:
            raise ValueError(
                f"scheduler_monitor is {self._scheduler_monitor!r}, which no epoch records before the scheduler "
                f"steps: recorded are {', '.join(self._trainer.state.metrics)}"
            ) from error
        if value is not None:  # an epoch whose validation was skipped says nothing
            scheduler.step(value)  # type: ignore[arg-type]


def _targets(batch: Any) -> Any:
    """What metrics compare the outputs with: the last part of the batch."""
    if isinstance(batch, tuple | list):
        return batch[-1]
    raise TypeError(
        f"metrics take (outputs, targets), but a batch is a {type(batch).__name__}, which does not say what its "
        "targets are: compute them in the step, and return them beside the loss"
    )
