"""Explains torch's errors for data, model and loss that do not fit together, and gives their fixes."""

from __future__ import annotations

import re
from typing import Final

_FIXES: Final = (
    (
        r"the data set is empty: there is nothing",
        "look at how the samples are selected and split: each set that is returned needs some",
    ),
    (
        r"the training data gave no batch",
        "write a smaller `loader.batch_size`, or leave `drop_last` out",
    ),
    (
        r"optimizer got an empty parameter list",
        "the model has no parameters: keep its layers as attributes or in a `torch.nn.ModuleList`, not in a list",
    ),
    (
        r"same dtype.* Double and Float|Double but (got|found) Float|Float but (got|found) Double",
        "the data are float64, and the model float32: return `x.float()`",
    ),
    (
        r"target dtype to be Long|scalar type Long but",
        "the targets are no whole numbers: return those of classes as `y.long()`, or choose another loss",
    ),
    (
        r"Target -?\d+ is out of bounds",
        "classes are numbered from 0: give the model an output for each, or number them anew",
    ),
    (
        r"Target size .* must be the same as input size",
        "this loss takes a real number for each output: return such targets, or choose a loss for classes",
    ),
    (
        r"a loss returns a tensor of one number, not",
        "return the mean over the batch as a tensor, such as `loss.mean()`, without `.item()`",
    ),
    (
        r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        r"a layer takes \2 features and gets \1: give the model the size of the data",
    ),
)
#: The warning of torch's losses about shapes that they broadcast; it names the targets before the outputs.
_BROADCAST: Final = re.compile(
    r"target size \(torch\.Size\(\[(.*?)\]\)\) that is different to the input size \(torch\.Size\(\[(.*?)\]\)\)"
)


def fix_of(message: str) -> str:
    """The fix for an error's message; empty if the message is not known."""
    for pattern, fix in _FIXES:
        if match := re.search(pattern, message):
            return match.expand(fix) if "\\" in fix else fix
    return ""


def broadcast_in(warning: str) -> tuple[str, str] | None:
    """The problem and fix of torch's warning that a loss broadcasts outputs and targets; None for others."""
    match = _BROADCAST.search(warning)
    if match is None:
        return None
    targets, outputs = (each.split(", ") for each in match.groups())
    if outputs == [*targets, "1"]:
        fix = "return the targets as `y.unsqueeze(-1)`, or the model's outputs as `outputs.squeeze(-1)`"
    elif targets == [*outputs, "1"]:
        fix = "return the targets as `y.squeeze(-1)`, or the model's outputs as `outputs.unsqueeze(-1)`"
    else:
        fix = "let the model's outputs and the targets have one shape"
    if outputs[0] == targets[0]:  # batch sizes differ, so `batch` is shown
        outputs[0] = targets[0] = "batch"
    shapes = f"outputs of shape [{', '.join(outputs)}] and targets of shape [{', '.join(targets)}]"
    return f"{shapes} are broadcast: the loss compares samples with the targets of others", fix
