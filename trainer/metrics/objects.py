"""MetricObjects: metrics that are updated batch by batch and computed once, a copy for each set."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from trainer.checkpoint.readable import UnreadableError, readable
from trainer.data.batches import map_tensors
from trainer.metrics.whole_set import WholeSet
from trainer.recorded import number

_PLAIN = (bool, int, float, str, type(None))
_STRUCTURES = (tuple, list, dict)


class MetricObject(Protocol):
    """The interface of torchmetrics."""

    def update(self, outputs: Any, targets: Any) -> Any:
        """Take in one batch."""
        ...

    def compute(self) -> Any:
        """The value of all batches since the last reset."""
        ...

    def reset(self) -> Any:
        """Forget all batches."""
        ...


#: A function of (outputs, targets), or an object.
Metric = Callable[[Any, Any], Any] | MetricObject

#: What makes a metric an object of its own, rather than a function.
METHODS = ("update", "compute", "reset")


def is_object(metric: Any) -> TypeGuard[MetricObject]:
    """Whether a metric, or the instances of a class, are updated rather than called."""
    return all(callable(getattr(metric, name, None)) for name in METHODS)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse what is no metric, and names that are taken.

    Raises:
        TypeError: A metric is neither a function nor an object with ``update``, ``compute`` and ``reset``.
        ValueError: A metric is called ``loss`` or ``lr``.
    """
    for name, metric in metrics.items():
        if name in ("loss", "lr"):
            raise ValueError(f"a metric is called {name!r}, and {name} is recorded already: give it another name")
        if isinstance(metric, type):
            raise TypeError(f"metric {name} is the class {metric.__name__}: give an instance of it")
        if not callable(metric) and not is_object(metric):
            raise TypeError(
                f"metric {name} is a {type(metric).__name__}: give a function of (outputs, targets), or an object "
                "with update, compute and reset"
            )


def measured_alone(metric: Any, outputs: Any, targets: Any) -> Any:
    """What a metric gives for one batch alone; an object is left as it is."""
    if not is_object(metric):
        return metric(outputs, targets)
    alone = deepcopy(metric)
    alone.reset()
    alone.update(outputs, targets)
    return alone.compute()


def metric_at_work(error: BaseException) -> str:
    """The metric object, by the name that a person gave it, that an exception came from; empty for any other."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), MetricObjects) and "name" in frame.f_locals:
            return str(frame.f_locals["name"]).partition("_")[2]
    return ""


class MetricObjects:
    """Copies of metric objects, one for each of train, val and test, on the device.

    The objects that a person gave are left as they are.

    Args:
        originals: The objects by name.
        device: Where their copies are to lie.
    """

    def __init__(self, originals: Mapping[str, MetricObject], device: torch.device) -> None:
        self._originals = originals
        self._device = device
        self._copies: dict[str, Any] = {}
        # Those that have been updated since they were reset.
        self._active: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._originals)

    def update(self, prefix: str, outputs: Any, targets: Any) -> None:
        """Hand one batch of a set to that set's copies."""
        if type(outputs) in _STRUCTURES or isinstance(outputs, Tensor):
            outputs = map_tensors(torch.detach, outputs)  # an object that keeps them would keep their graph
        for metric in self._originals:
            name = f"{prefix}_{metric}"
            self._activated(name).update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """The value of each copy that has seen a batch.

        Raises:
            MetricError: One gave something else than a real number.
        """
        values: dict[str, float] = {}
        with torch.no_grad():
            for name in self._active:
                values[name] = _one_number(name, self._copies[name].compute())
        return values

    def forget(self, prefix: str = "") -> None:
        """Reset what was updated under names that begin so."""
        for name in [item for item in self._active if item.startswith(prefix)]:
            self._copies[name].reset()
            del self._active[name]

    def state_dict(self) -> dict[str, Any]:
        """State of the copies that have seen a batch.

        Raises:
            TypeError: One holds what no checkpoint can.
        """
        return {name: _state_of(self._copies[name], name) for name in self._active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned; those of metrics that are gone are left out."""
        self.forget()
        known = {name for name in state if name.partition("_")[2] in self._originals}
        for name in state:
            if name in known:
                # A copy: the object takes over what it is given, and it may be loaded once more.
                saved = map_tensors(lambda tensor: tensor.detach().to(self._device, copy=True), state[name])
                _put_back(self._activated(name), saved)

    def _activated(self, name: str) -> Any:
        if name not in self._copies:
            self._copies[name] = self._copied(name)
        self._active[name] = None
        return self._copies[name]

    def _copied(self, name: str) -> Any:
        metric: Any = deepcopy(self._originals[name.partition("_")[2]])
        if isinstance(metric, WholeSet):
            metric.name = name
        for part in _modules(metric).values():
            persistent: Any = getattr(part, "persistent", None)
            if callable(persistent):
                persistent(mode=True)  # torchmetrics saves nothing otherwise
        if callable(getattr(metric, "to", None)):
            moved = metric.to(self._device)
            metric = metric if moved is None else moved
        metric.reset()
        return metric


def _one_number(name: str, value: Any) -> float:
    single = isinstance(value, Tensor) and value.numel() == 1
    return number(name, value.reshape(()) if single else value)


def _modules(metric: Any) -> dict[str, nn.Module]:
    return dict(metric.named_modules()) if isinstance(metric, nn.Module) else {}


def _state_of(metric: Any, name: str) -> Any:
    """What has to be put back into a fresh copy: its own word, and all plain attributes where it gives none."""
    if isinstance(metric, nn.Module):
        plain = {path: _plain_attributes(part) for path, part in _modules(metric).items()}
        state: dict[str, Any] = {"state": dict(metric.state_dict()), "plain": plain}
    elif callable(getattr(metric, "state_dict", None)) and callable(getattr(metric, "load_state_dict", None)):
        state = {"state": metric.state_dict()}
    else:
        state = {"plain": {"": dict(vars(metric))}}
    try:
        # A copy of its lists, to which it keeps appending.
        return map_tensors(lambda tensor: tensor, readable(state))
    except UnreadableError as error:
        raise TypeError(
            f"metric {name}: {error}; or give the metric `state_dict` and `load_state_dict` of its own"
        ) from error


def _put_back(metric: Any, saved: Mapping[str, Any]) -> None:
    if "state" in saved:
        metric.load_state_dict(saved["state"])
    parts: Mapping[str, Any] = _modules(metric) or {"": metric}
    for path, attributes in saved.get("plain", {}).items():
        vars(parts[path]).update(attributes)


def _plain_attributes(part: nn.Module) -> dict[str, Any]:
    """Counts and flags that are no part of a module's ``state_dict``."""
    return {key: value for key, value in vars(part).items() if type(value) in _PLAIN}
