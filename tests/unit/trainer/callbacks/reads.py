"""Finds what makes a training step wait for its device, also where there is none but the CPU."""

from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.support import At
from trainer import Callback

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READS, f"{func} reads from the device inside a step"
        return func(*args, **(kwargs or {}))


def no_reads_inside_a_step() -> list[Callback]:
    """Callbacks that let any read of a tensor's value between a batch's start and its end fail."""
    stack = ExitStack()
    return [
        At("on_train_batch_start", lambda trainer: stack.enter_context(_NoReads()), priority=-1000),
        At("on_train_batch_end", lambda trainer: stack.close(), priority=1000),
        At("on_exception", lambda trainer, error: stack.close(), priority=-1000),
    ]
