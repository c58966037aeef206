"""OptimizerStep: backward pass, optimizer step and scheduler steps for a loss, with the events around each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.lr_schedulers import Warmup, needs_metric
from trainer.state import BACKWARD, DIVERGED, OPTIMIZER_STEP, SCHEDULER_STEP, ZERO_GRAD, recorded_instead
from trainer.step import direct
from trainer.step.fused import check_gradients
from trainer.step.optimizers import Interval, due
from trainer.step.precision import Precision

if TYPE_CHECKING:
    from trainer.callback import TrainerView

logger = logging.getLogger(__name__)

AROUND = {
    action: (f"on_before_{action}", f"on_after_{action}")
    for action in (ZERO_GRAD, BACKWARD, OPTIMIZER_STEP, SCHEDULER_STEP)
}
# By then the loss scale has fallen by a factor of 10**15, far below what any finite gradient needs.
_MOST_OVERFLOWS = 50


class OptimizerStep:
    """Clears gradients, computes them, and steps ``trainer.optimizer`` and its schedulers.

    Args:
        trainer: The trainer, with its optimizer, schedulers and state.
        precision: The run's precision.
        scheduler_interval: When the scheduler steps, if there is only one.
        scheduler_monitor: The metric that a ReduceLROnPlateau follows.
        is_compiled: Whether the model or a part of it is compiled.
    """

    def __init__(
        self,
        trainer: TrainerView,
        precision: Precision,
        *,
        scheduler_interval: object,
        scheduler_monitor: str,
        is_compiled: bool,
    ) -> None:
        self._trainer = trainer
        self._precision = precision
        self._scheduler_interval = scheduler_interval
        self._scheduler_monitor = scheduler_monitor
        self._compiled = is_compiled
        self._updated = False  # whether the running step has changed the weights
        self._scheduled = False  # whether the schedulers have stepped with it
        self._direct_step = direct.DirectStep(trainer.optimizer)

    def step_optimizer(self) -> None:
        """Step the optimizer, unless a hook skips that, and the schedulers that follow its steps."""
        state, optimizer = self._trainer.state, self._trainer.optimizer
        if OPTIMIZER_STEP in state.skips:
            return
        if state.norms:  # those of an earlier step
            state.norms.pop(state.optimizer_name, None)
        self._precision.unscale(optimizer)
        self._count_step(lambda: self._act(OPTIMIZER_STEP, self._update))
        self._precision.skip_step()

    def step_schedulers(self, moment: Interval) -> None:
        """Step the schedulers that are due at the end of an epoch or after an optimizer step."""
        if schedulers := self._due(moment):
            if moment == "epoch":  # an epoch without any optimizer step counts too, and must not make torch warn
                direct.mark_stepped(self._trainer.optimizer)
            self._scheduled = False
            try:
                self._act(SCHEDULER_STEP, lambda: self._advance(schedulers))
            except BaseException:  # a hook failed, but the step or epoch counts
                if not self._scheduled and SCHEDULER_STEP not in self._trainer.state.skips:
                    self._advance(schedulers)
                raise

    def _count_step(self, take: Callable[[], None]) -> None:
        """Call ``take``; if it updated the weights, step the schedulers too, even if a hook failed after that."""
        self._updated = self._scheduled = False
        try:
            take()
            if self._updated and self._trainer.scheduler is not None:
                self.step_schedulers("step")
        except BaseException:
            if self._updated and not self._scheduled and SCHEDULER_STEP not in self._trainer.state.skips:
                self._advance(self._due("step"))
            raise

    def _act(self, action: str, work: Callable[[], bool | None]) -> None:
        """Do ``work`` between the action's two events, unless a hook skips it.

        If ``work`` returns False, it did nothing, and the second event is not fired.
        """
        state = self._trainer.state
        if action in state.skips:
            return
        before, after = AROUND[action]
        self._trainer.fire(before)
        if action in state.skips or work() is False:
            return
        self._trainer.fire(after)

    def _clear_gradients(self) -> None:
        """``optimizer.zero_grad()`` without torch's profiler mark, a tenth of the time of a small model's step."""
        optimizer = self._trainer.optimizer
        if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _backward(self) -> None:
        loss = self._scaled_loss()
        if self._compiled:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            direct.backward(loss)

    def _scaled_loss(self) -> Tensor:
        """The loss to differentiate: scaled for the precision and by the batch's share of the step."""
        loss = self._trainer.state.loss
        assert loss is not None
        loss = self._precision.scale(loss)
        share = self._trainer.state.gradient_share
        if isinstance(share, Tensor) or share != 1:
            loss = loss * share
        return loss

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

    def _due(self, moment: Interval) -> list[LRScheduler]:
        trainer = self._trainer
        return due(trainer.scheduler, self._scheduler_interval, moment, trainer.optimizer)

    def _advance(self, schedulers: Sequence[LRScheduler]) -> None:
        self._scheduled = True
        for scheduler in schedulers:
            if not needs_metric(scheduler):
                scheduler.step()
                continue
            value, warms = self._monitored(), isinstance(scheduler, Warmup) and scheduler.is_warming
            if value is not None or warms:  # an epoch that skipped validation has no value to follow
                scheduler.step(value)  # type: ignore[arg-type]

    def _monitored(self) -> float | None:
        """The value that a ReduceLROnPlateau follows; None if this epoch skipped validation."""
        state, name = self._trainer.state, self._scheduler_monitor
        if name not in state.metrics and not state.validation_skipped:  # callbacks record theirs too late for this
            raise ValueError(
                f"scheduler_monitor is {name!r}, which no epoch records before the scheduler steps: "
                f"{recorded_instead(name, state.metrics)}"
            )
        return state.metrics.get(name)
