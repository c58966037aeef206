"""TensorStatistics: records statistics of single gradients, parameters and activations, such as their norms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count
from trainer.metrics.epoch import Reduce
from trainer.state import TrainState
from trainer.step.parts import bare_model
from trainer.step.uncompiled import uncompiled

#: The statistics of a tensor, by name.
STATISTICS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "mean": torch.mean,
        "std": lambda tensor: tensor.std(correction=0),
        "norm": torch.linalg.vector_norm,
        "max_abs": lambda tensor: tensor.abs().max(),
        "zero_fraction": lambda tensor: (tensor == 0).sum() / tensor.numel(),
    }
)

#: A metric's name, its value, and how the values of an epoch are reduced.
_Number = tuple[str, Tensor, Reduce]


class TensorStatistics(Callback):
    """Records statistics of each gradient, parameter and activation as metrics of the epoch.

    The metrics are called ``grad_<statistic>/<parameter>``, ``param_<statistic>/<parameter>`` and
    ``activation_<statistic>/<module>``, such as ``grad_norm/0.weight``. Gradients and parameters are those before
    the optimizer's step, gradients unscaled; activations are what modules return while training: a tensor, or
    tensors in tuples, lists and mappings, which get their place as a suffix (``activation_norm/lstm[1][0]``); the
    model itself is called ``model``. Tensors that are empty or not of a real floating-point type are skipped.

    Measured are the first step of an epoch and every n-th after it; a metric is the mean over these, of
    ``max_abs`` the maximum. A step that is left out, as fp16 does with one whose gradients overflow, is none of
    them; of accumulated batches only the activations of the last one are then left out. Of several optimizers that
    a step updates by name, each has its own parameters measured; where an optimizer evaluates its loss several
    times a step, as LBFGS does, the first evaluation is. Nothing is read from the device before the
    epoch's end. There are as many metrics as tensors times statistics: for a large model choose some by ``names``.
    All are there before the first ``on_epoch_end``. With several processes a statistic of activations is that of
    each one's part of the batch, and their mean or maximum. A compiled model whose activations are measured runs
    as it was written for that step. A step that is replayed as a CUDA graph can't be looked into: with
    ``cuda_graph`` this callback is refused.

    Example::

        Trainer(model, optimizer, loss, callbacks=[TensorStatistics(every_n_steps=10, names="weight$")])

        callbacks: {tensor_statistics: {activations: true, names: ^encoder}}

    Args:
        gradients: Whether to measure gradients.
        parameters: Whether to measure parameters.
        activations: Whether to measure what modules return: modules without children, or with ``names`` all
            modules that match.
        every_n_steps: Optimizer steps between two measurements, at least 1.
        statistics: Any of ``"mean"``, ``"std"`` (of the tensor as a whole population), ``"norm"`` (L2),
            ``"max_abs"`` and ``"zero_fraction"`` (share of exact zeros, 0 to 1).
        names: Regular expression that must be found in the name of a parameter or module; None: all.

    Raises:
        ValueError: There is nothing to measure, no such statistic, or ``names`` is not a regular expression.
    """

    priority = 12
    writes = ("grad_*", "param_*", "activation_*")
    writes_in = "on_train_epoch_end"
    transient = ("_watching", "_as_written", "_waiting", "_activations", "_left_out")

    def __init__(
        self,
        *,
        gradients: bool = True,
        parameters: bool = True,
        activations: bool = False,
        every_n_steps: int = 50,
        statistics: Sequence[str] = ("norm",),
        names: str | None = None,
    ) -> None:
        if not (gradients or parameters or activations):
            raise ValueError("gradients, parameters and activations are all False: set one to True")
        check_count("every_n_steps", every_n_steps)
        self.gradients = gradients
        self.parameters = parameters
        self.activations = activations
        self.every_n_steps = every_n_steps
        self.statistics = _checked(statistics)
        self.names = pattern(names)
        self._watching = ExitStack()  # removes the hooks after the forward pass of a measured step
        self._as_written = ExitStack()  # lets the model run compiled again after its backward pass
        self._waiting: list[_Number] = []  # measured for an optimizer step that has not been taken yet
        self._activations: list[_Number] = []  # of the running batch
        self._left_out = False  # whether the batch's latest optimizer step is not taken (yet)

    def on_train_batch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Forget an earlier batch that failed."""
        self._activations, self._left_out = [], False
        self._leave()

    def on_before_forward(self, trainer: TrainerView) -> None:
        """Start measuring activations, if this step is measured."""
        if self.activations and self._is_due(trainer):
            self._leave()  # left by a failed evaluation of the same step
            self._watch(trainer)

    def on_after_forward(self, trainer: TrainerView) -> None:
        """Stop measuring: evaluations, and recomputation in the backward pass, are not measured."""
        self._watching.close()
        if trainer.state.manual:  # its backward passes are over
            self._as_written.close()

    def on_after_backward(self, trainer: TrainerView) -> None:
        """Let the model run compiled again: a checkpointed part was recomputed as it ran in the forward pass."""
        if not trainer.state.manual:
            self._as_written.close()

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Measure gradients and parameters."""
        self._left_out = True
        if trainer.state.evaluation:  # a further evaluation of the closure in the same step
            return
        self._waiting = []
        if not self._is_due(trainer):
            return
        for name, parameter in at_work(trainer):
            if self._wants(name):
                if self.gradients and parameter.grad is not None:
                    self._waiting += self._numbers(f"grad_{{}}/{name}", trainer.group.whole(parameter.grad))
                if self.parameters:
                    self._waiting += self._numbers(f"param_{{}}/{name}", trainer.group.whole(parameter))

    def on_after_optimizer_step(self, trainer: TrainerView) -> None:
        """Record them; not earlier, as a step whose gradients overflow in fp16 is not measured."""
        self._left_out = False
        _record(trainer, self._waiting)
        self._waiting = []

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Record the activations, unless the batch's step was left out; a batch of an open group has no step."""
        if not (self._left_out and trainer.state.skipped_step):
            _record(trainer, self._activations)
        self._activations = []
        self._leave()  # where the backward pass was skipped

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Leave the modules as they were."""
        self._leave()

    def _leave(self) -> None:
        self._watching.close()
        self._as_written.close()

    def _is_due(self, trainer: TrainerView) -> bool:
        state = trainer.state
        return (state.step - state.epoch_start_step) % self.every_n_steps == 0

    def _wants(self, name: str) -> bool:
        return self.names is None or self.names.search(name) is not None

    def _watch(self, trainer: TrainerView) -> None:
        self._as_written.enter_context(uncompiled())
        for path, module in bare_model(trainer.model).named_modules():
            name = path or "model"
            if self._wants(name) if self.names else not any(True for _ in module.children()):
                handle = module.register_forward_hook(self._hook(name, module, trainer.state))
                self._watching.callback(handle.remove)

    def _hook(self, name: str, of: nn.Module, state: TrainState) -> Callable[[nn.Module, Any, Any], None]:
        def measure(module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG001
            # Copies of the model have copies of the hooks, which must not measure.
            if not state.evaluation and module is of:
                for suffix, tensor in _tensors(output):
                    self._activations += self._numbers(f"activation_{{}}/{name}{suffix}", tensor)

        return measure

    @torch.no_grad()
    def _numbers(self, form: str, tensor: Tensor) -> list[_Number]:
        """The statistics of a tensor, under names of this form."""
        if not tensor.is_floating_point() or not tensor.numel():
            return []
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        return [
            (form.format(name), STATISTICS[name](tensor), "max" if name == "max_abs" else "mean")
            for name in self.statistics
        ]


def _record(trainer: TrainerView, numbers: Sequence[_Number]) -> None:
    for name, value, reduce in numbers:
        trainer.recorder.record(name, value, reduce=reduce)


def at_work(trainer: TrainerView) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters; in an update by name, only its optimizer's, as others have older gradients."""
    held = {id(item) for group in trainer.optimizer.param_groups for item in group["params"]}
    for name, parameter in bare_model(trainer.model).named_parameters():
        if not trainer.state.optimizer_name or id(parameter) in held:
            yield name, parameter


def _tensors(output: Any, suffix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a module's output, each with the suffix of its place."""
    if isinstance(output, Tensor):
        yield suffix, output
        return
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, list | tuple):
        items = enumerate(output)
    for key, item in items:
        yield from _tensors(item, f"{suffix}[{key}]")


def _checked(statistics: Sequence[str]) -> tuple[str, ...]:
    names = tuple(statistics)
    if isinstance(statistics, str) or not names or set(names) - STATISTICS.keys():
        raise ValueError(f"statistics is {statistics!r}: give a list of some of {', '.join(STATISTICS)}")
    return names


def pattern(names: str | None) -> re.Pattern[str] | None:
    """Compile the regular expression for names of parameters or modules; None for all names.

    Raises:
        ValueError: ``names`` is not a regular expression.
    """
    try:
        return None if names is None else re.compile(names)
    except re.error as error:
        raise ValueError(
            f"names is {names!r}, no regular expression ({error}): give one, or leave it out"
        ) from error
