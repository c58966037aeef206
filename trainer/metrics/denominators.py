"""Finds what the mean that a loss returns was divided by: samples, elements, or the targets that count.

The mean over a whole data set is the sum over its batches divided by the sum of these. For a cross-entropy with
class weights or ignored targets, it is neither the number of samples nor the number of targets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[Any, Any], Tensor]
#: Takes (loss, outputs, targets) of a batch; returns what the loss was divided by, or None if it is a sum.
Denominator = Callable[[Tensor, Any, Any], Tensor | float | None]
_Option = Callable[[str], Any]

#: Their mean is over elements.
_OF_ELEMENTS: Final[dict[type[nn.Module], Callable[..., Tensor]]] = {
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    nn.PoissonNLLLoss: functional.poisson_nll_loss,
    nn.KLDivLoss: functional.kl_div,
    nn.SoftMarginLoss: functional.soft_margin_loss,
    nn.HingeEmbeddingLoss: functional.hinge_embedding_loss,
}
#: Their mean is over targets that count, each with the weight of its class.
_OF_TARGETS: Final[dict[type[nn.Module], Callable[..., Tensor]]] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
}
#: Their mean is over samples.
_OF_SAMPLES: Final[dict[type[nn.Module], Callable[..., Tensor]]] = {
    nn.MultiMarginLoss: functional.multi_margin_loss,
    nn.MultiLabelMarginLoss: functional.multilabel_margin_loss,
    nn.MultiLabelSoftMarginLoss: functional.multilabel_soft_margin_loss,
}
_KNOWN: Final = {**_OF_ELEMENTS, **_OF_TARGETS, **_OF_SAMPLES}
_CALL: Final = nn.Module.__call__
#: In these functions ``weight`` weights elements, and the mean is over the weights; their modules have no weight.
_WEIGHS_ELEMENTS: Final = frozenset(
    {functional.mse_loss, functional.l1_loss, functional.huber_loss, functional.smooth_l1_loss}
)
_DEFAULTS: Final = {"reduction": "mean", "weight": None, "ignore_index": -100}
#: Types in which torch's own count of targets is exact, or as precise as the loss.
_EXACT: Final = frozenset({torch.float32, torch.float64})


def denominator_of(loss: Loss) -> Denominator | None:
    """A function that finds what a loss was divided by; None for an unknown loss, taken for a mean over samples.

    Known are torch's losses of two arguments: modules, subclasses that do not override ``forward``, functions of
    ``torch.nn.functional``, `functools.partial` of those, and the compiled form of any of them.
    """
    function, option = _recognised(loss)
    if function is None:
        return None

    def denominator(value: Tensor, outputs: Any, targets: Any) -> Tensor | float | None:
        reduction = option("reduction")  # read each time, as a module's options may change
        if reduction == "sum":
            return None
        if reduction == "batchmean":
            return float(outputs.shape[0]) if outputs.dim() else 1.0
        if function in _OF_SAMPLES.values():
            return float(outputs.shape[0]) if outputs.dim() > 1 else 1.0
        if function in _OF_ELEMENTS.values():
            return _elements(outputs, targets)
        return _counted(value, outputs, targets, option("weight"), option("ignore_index"))

    return denominator


def as_written(loss: Any) -> Any:
    """The loss inside the wrappers of torch.compile; any other loss as it is."""
    while True:
        inner = None
        if isinstance(loss, nn.Module):
            inner = dict(loss.named_children()).get("_orig_mod")  # the mark of torch.compile
        elif isinstance(loss, FunctionType) and _is_of_compiler(loss):
            inner = getattr(loss, "__wrapped__", None)
        if inner is None:
            return loss
        loss = inner


def _is_of_compiler(function: FunctionType) -> bool:
    """Whether torch.compile's code defines it: functools.wraps copies names and attributes, but not globals."""
    return str(function.__globals__.get("__name__", "")).startswith("torch._dynamo.")


def _recognised(loss: Loss) -> tuple[Callable[..., Tensor] | None, _Option]:
    """The torch function that computes a loss, or None; and a function that returns the loss's option by name."""
    loss = as_written(loss)
    if isinstance(loss, nn.Module):
        for kind, function in _KNOWN.items():
            if getattr(loss.forward, "__func__", None) is kind.forward and type(loss).__call__ is _CALL:
                return function, functools.partial(getattr, loss)
        return None, _DEFAULTS.__getitem__
    partial = loss if isinstance(loss, functools.partial) and not loss.args else functools.partial(loss)
    loss, options = as_written(partial.func), partial.keywords
    old = options.get("size_average") is not None or options.get("reduce") is not None
    known = next((function for function in _KNOWN.values() if function is loss), None)
    if old or (options.get("weight") is not None and known in _WEIGHS_ELEMENTS):
        return None, _DEFAULTS.__getitem__
    return known, {**_DEFAULTS, **options}.__getitem__


def _elements(outputs: Tensor, targets: Tensor) -> float:
    if outputs.shape == targets.shape:
        return float(outputs.numel())
    return float(math.prod(torch.broadcast_shapes(outputs.shape, targets.shape)))  # type: ignore[no-untyped-call]


def _counted(
    value: Tensor, outputs: Tensor, targets: Tensor, weight: Tensor | None, ignored: int
) -> Tensor | float:
    """The sum of the weights of the targets that count, on the targets' device."""
    # Torch keeps its divisor for the backward pass; counting again would take a third of the loss's time.
    own = getattr(value.grad_fn, "_saved_total_weight", None)
    if own is not None and own.dtype in _EXACT:
        return own  # type: ignore[no-any-return]
    if targets.shape == outputs.shape:  # class probabilities: no weight and no target to ignore enters the mean
        return float(outputs.numel() // outputs.shape[min(outputs.dim() - 1, 1)])
    counts = targets != ignored
    if weight is None:
        return counts.sum()
    weights = weight if weight.dtype in _EXACT else weight.float()
    # The ignored index may be outside of the classes.
    return (weights[torch.where(counts, targets, 0)] * counts).sum()
