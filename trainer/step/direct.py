"""Backward pass and optimizer step without torch's Python wrappers, if the wrappers have nothing to do.

For a model of a few thousand parameters, these wrappers take a tenth of the time of a step. Torch's own methods
are called if one of them was replaced, the optimizer has a hook, or something watches torch: a profiler, anomaly
detection, a mode that sees functions or operations, a functorch transform, or debug logging.
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

# Looked up once, because each step calls them twice.
_profiles: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # noqa: SLF001
_finds_anomalies: Any = torch.is_anomaly_enabled
_sees_functions: Any = torch._C._is_torch_function_mode_enabled  # noqa: SLF001
_sees_operations: Any = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_transforms: Any = torch._C._are_functorch_transforms_active  # noqa: SLF001
# What torch.no_grad calls; it takes a tenth of the time of torch.no_grad.
_set_grad: Any = torch._C._set_grad_enabled  # noqa: SLF001

# Exact classes, as for the fused forms: a subclass may add something around its step that must run.
_KNOWN = (SGD, Adam, AdamW)


class DirectStep:
    """Steps an optimizer.

    Torch wraps each step with a profiler mark, hooks and a compiler's graph breaks. For SGD, Adam and AdamW, this
    class calls the step without them, unless ``step`` was replaced (by anything but torch's schedulers), has a
    hook, or something watches torch. Each step checks that again.

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
    """The function inside torch.optim's wrappers; None if another module wrapped it too."""
    while hasattr(step, "__wrapped__"):
        if not _is_of_torch(step):
            return None
        step = step.__wrapped__
    return step if _is_of_torch(step) else None


def _is_of_torch(function: Any) -> bool:
    """Whether the function's code is torch's; by its globals, as functools.wraps copies names but not globals."""
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.startswith(("torch.optim.", "torch.autograd")) or module == "torch._tensor"


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark the optimizer as stepped, as torch's schedulers do: without the mark they warn about a wrong order."""
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
    """Whether a profiler, anomaly detection, a torch mode or a transform watches what runs."""
    return bool(_profiles() or _finds_anomalies() or _sees_functions() or _sees_operations() or _transforms())


def _backward_functions() -> tuple[Any, ...]:
    """The chain of functions that ``loss.backward()`` calls."""
    return Tensor.backward, torch.autograd.backward, torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # noqa: SLF001


# None if one of them was replaced before this module was imported.
_TORCHS = _backward_functions() if all(_is_of_torch(function) for function in _backward_functions()) else None


def backward(loss: Tensor) -> None:
    """``loss.backward()``.

    Torch first checks for subclasses, several losses and given gradients; a plain scalar has none. For a device
    with threads of its own, torch also passes the compiler's settings to these threads, so there its own method
    runs.
    """
    # Not `vars`, which would make the tensor create a `__dict__`.
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
