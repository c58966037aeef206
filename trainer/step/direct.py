"""Backward pass and optimizer step without torch's Python wrappers, where those have nothing to do.

Torch checks and announces both in Python, which for a model of a few thousand parameters takes a tenth of it.
Torch's own methods are called as soon as one was replaced, a hook of the optimizer is registered, or torch is
watched: by a profiler, anomaly detection, a mode that sees functions or operations, a transform, debug logging.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from trainer.step.optimizers import each_of
from trainer.step.plain_adam import take_plain_step

_ENGINE: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001

# Looked up once: they are asked twice in every step.
_profiles: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # noqa: SLF001
_finds_anomalies: Any = torch.is_anomaly_enabled
_sees_functions: Any = torch._C._is_torch_function_mode_enabled  # noqa: SLF001
_sees_operations: Any = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms: Any = torch._C._are_functorch_transforms_active  # noqa: SLF001
# What torch.no_grad calls, of whose time it is a tenth.
_set_grad: Any = torch._C._set_grad_enabled  # noqa: SLF001

# Exact classes, as for the fused forms: what a subclass puts around its step is not ours to leave out.
_KNOWN = (SGD, Adam, AdamW)


class DirectStep:
    """Takes an optimizer's step.

    Torch puts a profiler's mark, hooks and a compiler's graph breaks around each. They are left out for SGD, Adam
    and AdamW unless ``step`` was replaced (by anything but torch's schedulers), a hook is registered on it or
    torch is watched. All of that is asked at each step.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._raw: Callable[[Optimizer], Any] | None = None
        self._is_adam = type(optimizer) in (Adam, AdamW)
        self._of_the_class = type(optimizer).step
        if type(optimizer) in _KNOWN and not optimizer.defaults.get("differentiable"):
            self._raw = _without_torchs_wrappers(self._of_the_class)

    def __call__(self) -> None:
        """Take the step."""
        optimizer = self._optimizer
        own = vars(optimizer).get("step")
        if self._raw is None or self._is_replaced(own) or _has_hooks(optimizer) or _is_watched():
            optimizer.step()
            return
        graded = torch.is_grad_enabled()
        try:
            _set_grad(False)
            if not (self._is_adam and take_plain_step(optimizer)):
                self._raw(optimizer)
        finally:
            _set_grad(graded)
        if own is not None:
            mark_stepped(optimizer)

    def _is_replaced(self, own: Callable[..., Any] | None) -> bool:
        """Whether anything but a scheduler of torch replaced the step, for this optimizer or its class."""
        if type(self._optimizer).step is not self._of_the_class:
            return True
        if own is None:
            return False
        return not hasattr(own, "_wrapped_by_lr_sched") or _without_torchs_wrappers(own) is not self._raw


def _without_torchs_wrappers(step: Any) -> Callable[[Optimizer], Any] | None:
    """What torch.optim put its wrappers around; None where another module put one."""
    while hasattr(step, "__wrapped__"):
        if not _is_of_torch(step):
            return None
        step = step.__wrapped__
    return step if _is_of_torch(step) else None


def _is_of_torch(function: Any) -> bool:
    """Whether its code is torch's; functools.wraps copies names but not globals."""
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.startswith(("torch.optim.", "torch.autograd")) or module == "torch._tensor"


def mark_stepped(optimizer: Optimizer) -> None:
    """What the wrapper of torch's schedulers notes at a step, and they ask for to warn about a wrong order."""
    for each in each_of(optimizer).values():
        each._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_pre_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001
    )


def _is_watched() -> bool:
    """Whether a profiler, a debugger of torch or a transform wants to see what runs."""
    return bool(_profiles() or _finds_anomalies() or _sees_functions() or _sees_operations() or _transforms())


def _backward_functions() -> tuple[Any, ...]:
    """What ``loss.backward()`` calls, one through the other."""
    return Tensor.backward, torch.autograd.backward, torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # noqa: SLF001


# None where one of them was replaced before this module was imported.
_TORCHS = _backward_functions() if all(_is_of_torch(function) for function in _backward_functions()) else None


def backward(loss: Tensor) -> None:
    """``loss.backward()``.

    Torch looks for subclasses, several losses and given gradients first; for a plain scalar there are none. Where
    a device has threads of its own it hands the compiler's settings over to them, too: that is left to torch.
    """
    # Not by `vars`, which gives the tensor a dictionary of its own.
    own = getattr(loss.backward, "__func__", None) is not Tensor.backward
    plain = type(loss) is Tensor and not own and not loss.dim() and loss.is_floating_point()
    logs = graph.log.isEnabledFor(logging.DEBUG)
    here = loss.is_cpu and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not plain or not here or logs or _backward_functions() != _TORCHS or _is_watched():
        loss.backward()  # type: ignore[no-untyped-call]
        return
    keep_graph = create_graph = False
    _ENGINE.run_backward(
        (loss,),
        (torch.ones_like(loss),),
        keep_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
