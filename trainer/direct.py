"""Backward pass and optimizer step without the wrappers around them, where nobody could tell the difference.

Torch checks and announces both in Python, which for a model of a few thousand parameters takes a good part of the
step. What is left out here has nothing to do in the cases described; in all others the whole is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

_ENGINE: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001

# Exact classes, as for the fused forms: what a subclass puts around its step is not ours to leave out.
_KNOWN = (SGD, Adam, AdamW)


class DirectStep:
    """Takes an optimizer's step.

    Torch puts a profiler's mark, hooks and a compiler's graph breaks around each. They are left out for SGD, Adam
    and AdamW while no hook is registered, nothing profiles, and nobody but torch's schedulers replaced
    ``optimizer.step``.

    Args:
        optimizer: The optimizer; hooks may be registered on it later, and are then honoured.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._raw: Callable[[Optimizer], Any] | None = None
        differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
        if type(optimizer) in _KNOWN and not differentiable:
            self._raw = _without_torchs_wrappers(type(optimizer).step)

    def __call__(self) -> None:
        """Take the step."""
        optimizer = self._optimizer
        own = vars(optimizer).get("step")
        if self._raw is None or _has_hooks(optimizer) or not (own is None or self._is_of_a_scheduler(own)):
            optimizer.step()
            return
        with torch.no_grad():
            self._raw(optimizer)
        if own is not None:
            mark_stepped(optimizer)

    def _is_of_a_scheduler(self, step: Callable[..., Any]) -> bool:
        return hasattr(step, "_wrapped_by_lr_sched") and _without_torchs_wrappers(step) is self._raw


def _without_torchs_wrappers(step: Any) -> Callable[[Optimizer], Any] | None:
    """What torch.optim put its wrappers around; None where somebody else put one."""
    while hasattr(step, "__wrapped__"):
        if not step.__globals__["__name__"].startswith("torch.optim."):
            return None
        step = step.__wrapped__
    return step if step.__globals__["__name__"].startswith("torch.optim.") else None


def mark_stepped(optimizer: Optimizer) -> None:
    """What the wrapper of torch's schedulers notes at a step, and they ask for to warn about a wrong order."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_pre_hooks  # noqa: SLF001
        or torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
    )


def backward(loss: Tensor) -> None:
    """``loss.backward()``.

    Torch looks for subclasses, several losses, given gradients and transforms first; for a plain scalar outside
    of any transform there are none.
    """
    plain = type(loss) is Tensor and not loss.dim() and loss.is_floating_point()
    if not plain or torch._C._are_functorch_transforms_active() or torch._C._is_torch_function_mode_enabled():  # noqa: SLF001
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
