"""Summarises a model: its modules with the shapes of their outputs and their numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from trainer.data.moving import tensors_in, to_device
from trainer.data.random_state import kept_rng
from trainer.step.manual import as_evaluated
from trainer.step.modes import kept_modes
from trainer.step.parts import bare_model
from trainer.step.supervised import Step
from trainer.step.uncompiled import uncompiled

_SHOWN = 3


@dataclass(frozen=True)
class ModuleRow:
    """One module of a model.

    Attributes:
        name: The name in ``named_modules``; empty for the model itself.
        kind: The name of its class.
        shapes: The shapes of the tensors that its first call returned; empty if it was not called.
        parameters: The number of values in the parameters of it and its submodules; a shared one counts once.
        trainable: The number of those that require gradients.
    """

    name: str
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    parameters: int
    trainable: int

    @property
    def depth(self) -> int:
        """The number of modules around it; 0 for the model itself."""
        return self.name.count(".") + bool(self.name)


@dataclass(frozen=True)
class Summary:
    """The modules of a model, each before those inside it; ``str`` makes a table of them."""

    rows: tuple[ModuleRow, ...]

    def __str__(self) -> str:
        cells = [("module", "output", "parameters", "trainable")]
        for row in self.rows:
            own = row.name.rpartition(".")[2]
            name = f"{'  ' * row.depth}{own} ({row.kind})" if own else row.kind
            shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes[:_SHOWN])
            more = " …" if len(row.shapes) > _SHOWN else ""
            cells.append((name, shapes + more or "—", f"{row.parameters:,}", f"{row.trainable:,}"))
        left, middle = (max(len(row[at]) for row in cells) for at in (0, 1))
        return "\n".join(
            f"{name:<{left}}  {shape:<{middle}}  {total:>13}  {own:>13}" for name, shape, total, own in cells
        )


def summary(model: nn.Module, batch: Any, *, step: Step | None = None, depth: int = 2) -> Summary:
    """A model's modules with the shapes of their outputs, from one forward pass, and their parameters.

    The pass is in eval mode, without gradients, and leaves the model's modes and all random generators as they
    were. A lazy module has no parameters before it.

    Args:
        model: The model, also inside torch's wrappers.
        batch: A batch as the training data gives it: ``(inputs, targets)``, or the inputs; moved to the model.
        step: What calls the model with a batch that is none of these, as in validation: ``step(model, batch)``.
        depth: Modules below this depth are part of those around them.

    Raises:
        ValueError: ``depth`` is below 0.
    """
    if depth < 0:
        raise ValueError(f"depth is {depth}: give at least 0")
    bare = bare_model(model)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    with _watched(bare, depth, shapes), kept_rng(), kept_modes(bare), torch.no_grad():
        bare.eval()
        _call(bare, _moved(bare, batch), step)
    return Summary(tuple(_rows(bare, depth, shapes)))


def _rows(model: nn.Module, depth: int, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> Iterator[ModuleRow]:
    for name, module in _modules(model, depth):
        sizes = [(0 if is_lazy(item) else item.numel(), item.requires_grad) for item in module.parameters()]
        total, trainable = sum(size for size, _ in sizes), sum(size for size, needed in sizes if needed)
        yield ModuleRow(name, type(module).__name__, shapes.get(name, ()), total, trainable)


def _modules(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.count(".") + bool(name) <= depth:
            yield name, module


@contextmanager
def _watched(model: nn.Module, depth: int, shapes: dict[str, tuple[tuple[int, ...], ...]]) -> Iterator[None]:
    """Inside the block, note the shapes of what each module returns at its first call."""

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:  # noqa: ARG001 - torch's signature
            shapes.setdefault(name, tuple(tuple(each.shape) for each in tensors_in(outputs)))

        return hook

    with uncompiled(), ExitStack() as handles:
        for name, module in _modules(model, depth):
            handle: RemovableHandle = module.register_forward_hook(note(name))
            handles.callback(handle.remove)
        yield


def _moved(model: nn.Module, batch: Any) -> Any:
    held: Tensor | None = next((item for item in model.parameters()), None)
    return batch if held is None else to_device(batch, held.device)


def _call(model: nn.Module, batch: Any, step: Step | None) -> None:
    if step is not None:
        as_evaluated(step)(model, batch)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        model(batch[0])
    else:
        model(batch)
