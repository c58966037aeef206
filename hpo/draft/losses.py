"""Chooses the loss that fits a model's outputs and the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpo.draft.data import Look

_MULTIPLE = 50.0


@dataclass(frozen=True)
class Loss:
    """A loss of a study file.

    Attributes:
        target: Its import path.
        why: Why it was chosen, as a comment in the file.
        body: The line of a function of the study's own, if no loss of torch fits directly.
        imports: The functions of `torch.nn.functional` in that line.
        warning: A doubt about the model with this loss.
    """

    target: str
    why: str
    body: str = ""
    imports: str = ""
    warning: str = ""


def loss_for(outputs: Any, look: Look, larger: Any = None) -> Loss | str:
    """Choose a loss by targets and outputs, or return why there is none.

    Args:
        outputs: The model's outputs for ``look.inputs``.
        look: The data's properties.
        larger: Its outputs for inputs far from zero, which show whether outputs are bounded; None: unknown.
    """
    targets = look.targets
    if not isinstance(outputs, Tensor):
        return f"the model returns a {type(outputs).__name__} and not one tensor"
    if not isinstance(targets, Tensor):
        return f"the targets are a {type(targets).__name__} and not one tensor"
    if not targets.is_floating_point():
        return _of_classes(outputs, targets, look)
    if outputs.shape != targets.shape and not _same_but_for_ones(outputs, targets):
        return f"outputs have the shape {_shape(outputs)} and targets {_shape(targets)}"
    return _binary(outputs, targets, larger) if look.binary else _squared(outputs, targets)


def _of_classes(outputs: Tensor, targets: Tensor, look: Look) -> Loss | str:
    scores = outputs.ndim == targets.ndim + 1 and outputs.shape[0] == targets.shape[0]
    if scores and outputs.shape[2:] == targets.shape[1:] and outputs.shape[1] > 1:
        return _of_scores(outputs, targets, look)
    if _same_but_for_ones(outputs, targets) and look.binary:
        return Loss(
            "study_parts.loss",
            "targets are 0 or 1, with one output for each",
            body="return binary_cross_entropy_with_logits(outputs.flatten(), targets.flatten().float())",
            imports="binary_cross_entropy_with_logits",
        )
    shapes = f"outputs have the shape {_shape(outputs)}, for targets of shape {_shape(targets)}"
    return f"{shapes} with {look.classes} classes"


def _of_scores(outputs: Tensor, targets: Tensor, look: Look) -> Loss | str:
    if look.classes is not None and look.classes > outputs.shape[1]:
        return f"the model has {outputs.shape[1]} outputs, and the targets {look.classes} classes"
    why = f"targets are the numbers of {look.classes} classes"
    if targets.dtype != torch.int64:
        body = "return cross_entropy(outputs, targets.long())"
        return Loss("study_parts.loss", f"{why}, of type {targets.dtype}", body=body, imports="cross_entropy")
    ones = torch.ones_like(outputs[:, 0])
    if torch.allclose(outputs.exp().sum(dim=1), ones, atol=1e-3):
        return Loss("torch.nn.NLLLoss", f"{why}, and outputs are log-probabilities")
    warning = ""
    if bool((outputs >= 0).all()) and torch.allclose(outputs.sum(dim=1), ones, atol=1e-3):
        warning = (
            "the model's outputs are probabilities (it ends with a softmax), and CrossEntropyLoss takes the "
            "scores before it: remove the softmax, or it learns slowly"
        )
    return Loss("torch.nn.CrossEntropyLoss", why, warning=warning)


def _binary(outputs: Tensor, targets: Tensor, larger: Any) -> Loss:
    bounded = all(
        isinstance(item, Tensor) and bool(((item >= 0) & (item <= 1)).all()) for item in (outputs, larger)
    )
    name = "binary_cross_entropy" if bounded else "binary_cross_entropy_with_logits"
    why = "targets are 0 or 1" + (", and outputs probabilities" if bounded else "")
    if outputs.shape == targets.shape:
        return Loss("torch.nn.BCELoss" if bounded else "torch.nn.BCEWithLogitsLoss", why)
    return Loss("study_parts.loss", why, body=f"return {name}(outputs.flatten(), targets.flatten())", imports=name)


def _squared(outputs: Tensor, targets: Tensor) -> Loss:
    why = "targets are real numbers"
    if outputs.shape == targets.shape:
        return Loss("torch.nn.MSELoss", why)
    return Loss(
        "study_parts.loss",
        f"{why} of shape {_shape(targets)}, outputs of {_shape(outputs)}",
        body="return mse_loss(outputs.flatten(), targets.flatten())",
        imports="mse_loss",
    )


def _same_but_for_ones(outputs: Tensor, targets: Tensor) -> bool:
    """Whether the shapes differ only by dimensions of size 1."""
    return [size for size in outputs.shape[1:] if size > 1] == [size for size in targets.shape[1:] if size > 1]


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(["batch", *map(str, tensor.shape[1:])]) + "]"


def farther(inputs: Any) -> Any:
    """The inputs moved far from zero, to see whether outputs are bounded; None unless they are real numbers."""
    return inputs * _MULTIPLE if isinstance(inputs, Tensor) and inputs.is_floating_point() else None
