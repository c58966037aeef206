"""Trains with steps that make their own updates: GANs, actor and critic, several losses or optimizers a batch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.state import BACKWARD, ZERO_GRAD, TrainState
from trainer.step.closure import check_closure, step_with_closure
from trainer.step.compute import Compute
from trainer.step.optimizer_step import OptimizerStep
from trainer.step.optimizers import Optimizers, each_of, needs_closure, shared_parameters
from trainer.step.precision import Precision
from trainer.step.supervised import StepResult

Loss = Tensor | Callable[[], Tensor]


class Update:
    """Updates the weights from inside a step that makes its own updates: ``update(loss, "generator")``.

    One call clears the gradients of the named optimizer, computes the gradients of the loss for that optimizer's
    parameters only, steps the optimizer, and steps its schedulers that follow optimizer steps, with the events of
    each. In these events ``trainer.optimizer`` is this optimizer, and ``state.optimizer_name`` its name. In
    validation and test a call does nothing.

    Attributes:
        state: The trainer's state. By ``state.batch_index`` a step can, for example, update one optimizer only
            every few batches.
    """

    def __init__(self, state: TrainState, make: Callable[[Loss, str, bool], None] | None = None) -> None:
        self.state = state
        self._make = make

    def __call__(self, loss: Loss, optimizer: str = "", *, retain_graph: bool = False) -> None:
        """Update the weights of one optimizer, or of all together.

        Args:
            loss: The loss, a tensor with one element; or a function that computes it, which an optimizer with a
                closure calls several times.
            optimizer: The optimizer's name; if left out, all optimizers step with this loss.
            retain_graph: Whether another update of this batch uses the same graph.

        Raises:
            TypeError: The loss is neither of these, or the optimizer takes a closure and the loss is no function.
            ValueError: No optimizer has the name; none of its parameters requires a gradient; or all are to step
                and two of them share a parameter.
        """
        if self._make is not None:
            self._make(loss, optimizer, retain_graph)


def makes_updates(step: Any) -> bool:
    """Whether a step takes the argument ``update``, and so makes its own updates."""
    try:
        return "update" in signature(step).parameters
    except ValueError:  # a C function without a signature
        return False


def as_evaluated(step: Callable[..., Any], state: TrainState | None = None) -> Callable[[Any, Any], Any]:
    """The function ``(model, batch)`` that validation calls: the step's ``evaluate``, or the step without updates.

    Args:
        step: A step of either kind.
        state: The trainer's state; None without a trainer.
    """
    if not makes_updates(step):
        return step
    own: Callable[[Any, Any], Any] | None = getattr(step, "evaluate", None)
    none = Update(TrainState(max_epochs=1) if state is None else state)
    return own if own is not None else lambda model, batch: step(model, batch, none)


class _NamedStep(OptimizerStep):
    """Steps one of the optimizers, or all together, on a loss."""

    def __init__(self, trainer: TrainerView, precision: Precision, **options: Any) -> None:
        super().__init__(trainer, precision, **options)
        self._takes_closure = needs_closure(trainer.optimizer)
        self._compute_loss: Callable[[], Tensor] | None = None
        self._retain_graph = False

    @property
    def updated(self) -> bool:
        """Whether the latest step changed the weights."""
        return self._updated

    def take(self, loss: Loss, *, retain_graph: bool) -> None:
        """Clear the gradients, compute those of the loss, and step."""
        self._compute_loss = None if isinstance(loss, Tensor) else loss
        self._retain_graph = retain_graph
        self._updated = False
        if self._compute_loss is None:
            self._trainer.state.loss = _checked(loss)
        try:
            self._make_gradients()
            with self._precision.paused():
                self.step_optimizer()
        finally:
            self._compute_loss = None

    def _make_gradients(self) -> None:
        with self._precision.paused():
            self._act(ZERO_GRAD, self._clear_gradients)
        if self._compute_loss is not None:
            with self._precision.autocast():
                self._trainer.state.loss = _checked(self._compute_loss())
        with self._precision.paused():
            self._act(BACKWARD, self._backward)

    def _backward(self) -> None:
        trained = [
            parameter
            for group in self._trainer.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        if not trained:
            raise ValueError(f"update of {self._name}: none of its parameters takes a gradient, all are frozen")
        self._scaled_loss().backward(inputs=trained, retain_graph=self._retain_graph)  # type: ignore[no-untyped-call]

    def _take_step(self) -> None:
        if not self._takes_closure:
            super()._take_step()
        elif self._compute_loss is None:
            raise TypeError(
                f"update of {self._name}: it evaluates the loss several times: hand over a function that computes "
                "it, such as `lambda: loss_of(model, batch)`"
            )
        else:
            step_with_closure(self._trainer, self._evaluate_again)

    def _evaluate_again(self) -> None:
        self._make_gradients()
        self._trainer.fire("on_before_optimizer_step")

    @property
    def _name(self) -> str:
        return self._trainer.state.optimizer_name or type(self._trainer.optimizer).__name__


class ManualCompute(Compute):
    """Trains with a step that makes its own updates: ``step(model, batch, update)``.

    A batch counts as one step of the run, however many updates it makes, and as none where it makes none. The
    loss that the step returns is recorded; a step with a method ``evaluate(model, batch)`` uses that in validation
    and test.
    """

    def __init__(self, trainer: TrainerView, *arguments: Any, **options: Any) -> None:
        super().__init__(trainer, *arguments, **options)
        trainer.state.manual = True
        self._update_of_step = Update(trainer.state, self._make)
        self._evaluated = as_evaluated(self._step, trainer.state)
        everything = {"": trainer.optimizer}
        if isinstance(trainer.optimizer, Optimizers):
            everything |= trainer.optimizer.by_name
        self._optimizers = everything
        self._shared = shared_parameters(trainer.optimizer)
        self._steps = {name: self._step_of(name, options) for name in everything}

    def prepare(self, callbacks: Iterable[Callback]) -> None:  # noqa: ARG002
        """Check that nothing conflicts with the step's own updates.

        Raises:
            ValueError: Batches are accumulated, or an optimizer takes a closure and the precision is fp16.
        """
        if self._trainer.state.batches_per_step != 1:
            raise ValueError(
                "the step makes its own updates, so GradientAccumulation can't hold them back: leave it out, and "
                "call `update` every few batches with the mean of their losses"
            )
        if any(needs_closure(each) for each in each_of(self._trainer.optimizer).values()):
            check_closure(self._trainer)

    def _step_of(self, name: str, options: dict[str, Any]) -> _NamedStep:
        with self._at_work(name):
            return _NamedStep(self._trainer, self._precision.of(name), is_compiled=self._compiled, **options)

    def _run(self, batch: Any) -> None:
        fire, state = self._trainer.fire, self._trainer.state
        state.batch = batch
        fire("on_before_forward")
        try:
            result = self._forward()
        finally:
            # A batch that has changed weights is not trained again, even if its step failed afterwards.
            state.step += self._updated
            self._recorded = self._updated
        fire("on_after_forward")
        self._recorded = True
        self._record("train", result.extra)

    def _forward(self) -> StepResult:
        state = self._trainer.state
        training = torch.is_grad_enabled()
        with self._precision.autocast():
            if training:
                output = self._step(self._model, state.batch, self._update_of_step)  # type: ignore[call-arg]
            else:
                output = self._evaluated(self._model, state.batch)
        return self._taken(output)

    def _make(self, loss: Loss, name: str, retain_graph: bool) -> None:
        if name not in self._steps:
            raise ValueError(f"no optimizer is called {name!r}: {self._hint(name)}")
        if self._shared and not name:
            raise ValueError(f"{self._shared}: give `update` the name of one, or each parameter to one optimizer")
        with self._at_work(name):
            step = self._steps[name]
            try:
                step.take(loss, retain_graph=retain_graph)
            finally:
                self._updated = self._updated or step.updated

    def _hint(self, name: str) -> str:
        if len(self._steps) == 1:
            return "there is only one, leave the name out"
        close = difflib.get_close_matches(name, self._steps, n=1)
        return f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(filter(None, self._steps))}"

    @contextmanager
    def _at_work(self, name: str) -> Iterator[None]:
        """Inside the block, the trainer's optimizer is the named one, for hooks and for the step itself."""
        trainer = self._trainer
        whole, trainer.optimizer, trainer.state.optimizer_name = trainer.optimizer, self._optimizers[name], name
        try:
            yield
        finally:
            trainer.optimizer, trainer.state.optimizer_name = whole, ""


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
        raise TypeError(f"update takes the loss, a tensor with one element, not {shape}")
    return loss
