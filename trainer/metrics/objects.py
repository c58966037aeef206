"""MetricObjects: metrics that are updated with each batch and computed once, with a copy for each data set."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from trainer.checkpoint.readable import UnreadableError, readable
from trainer.data.moving import map_tensors
from trainer.distributed.group import Group
from trainer.metrics.whole_set import WholeSet
from trainer.recorded import number

_PLAIN = (bool, int, float, str, type(None))
_STRUCTURES = (tuple, list, dict)


class MetricObject(Protocol):
    """The interface of torchmetrics."""

    def update(self, outputs: Any, targets: Any) -> Any:
        """Take in one batch, outputs and targets as [samples, …]; the return value is ignored."""
        ...

    def compute(self) -> Any:
        """The value of all batches since the last reset."""
        ...

    def reset(self) -> Any:
        """Forget all batches."""
        ...


#: A function of (outputs, targets), or an object.
Metric = Callable[[Any, Any], Any] | MetricObject

#: The methods by which a metric counts as an object, rather than a function.
METHODS = ("update", "compute", "reset")


def is_object(metric: Any) -> TypeGuard[MetricObject]:
    """Whether a metric, or a class's instances, are objects that are updated rather than functions."""
    return all(callable(getattr(metric, name, None)) for name in METHODS)


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Refuse objects that are no metrics, and names that are taken.

    Raises:
        TypeError: A metric is neither a function nor an object with ``update``, ``compute`` and ``reset``.
        ValueError: A metric is called ``loss`` or ``lr``.
    """
    for name, metric in metrics.items():
        if name in ("loss", "lr"):
            raise ValueError(f"a metric is called {name!r}, and {name} is recorded already: give it another name")
        if metric is None:
            raise TypeError(f"metric {name} is None: give a function of (outputs, targets), or leave the name out")
        if isinstance(metric, type):
            raise TypeError(f"metric {name} is the class {metric.__name__}: give an instance of it")
        if not callable(metric) and not is_object(metric):
            raise TypeError(
                f"metric {name} is a {type(metric).__name__}: give a function of (outputs, targets), or an object "
                "with update, compute and reset"
            )


def measured_alone(metric: Any, outputs: Any, targets: Any) -> Any:
    """The value of a metric for one batch alone; an object is not changed."""
    if not is_object(metric):
        return metric(outputs, targets)
    alone = deepcopy(metric)
    alone.reset()
    alone.update(outputs, targets)
    return alone.compute()


def metric_at_work(error: BaseException) -> str:
    """The user's name of the metric object that an exception came from; empty if it came from none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), MetricObjects) and "name" in frame.f_locals:
            return str(frame.f_locals["name"])
    return ""


def synchronises_itself(metric: Any) -> bool:
    """Whether a metric's ``compute`` itself combines what all processes have seen, as in torchmetrics."""
    return hasattr(metric, "sync_on_compute") and bool(metric.sync_on_compute)


def check_mergeable(metrics: Mapping[str, Any], *, both: bool = False) -> None:
    """Refuse metric objects whose states from several processes can't be merged.

    Args:
        metrics: The objects by name.
        both: Whether an object needs ``merge_state`` even if its ``compute`` combines all processes.

    Raises:
        ValueError: One has no ``merge_state``.
    """
    for name, metric in metrics.items():
        if not callable(getattr(metric, "merge_state", None)) and (both or not synchronises_itself(metric)):
            raise ValueError(
                f"metric {name} ({type(metric).__name__}) has seen only a part of the data in each of several "
                "processes: give it a method `merge_state(others)` that takes in what other objects of its class "
                "have seen, or use WholeSet or a metric of torchmetrics"
            )


class MetricObjects:
    """Copies of metric objects on the device, one for each data set.

    The user's objects are not changed.

    Args:
        originals: The user's objects by name.
        device: The device of the copies.
        group: The processes that update them.

    Raises:
        ValueError: There are several processes, and an object can't be merged.
    """

    def __init__(
        self, originals: Mapping[str, MetricObject], device: torch.device, group: Group | None = None
    ) -> None:
        group = group or Group()
        if group.size > 1:
            check_mergeable(originals)
        self._group = group
        self._originals = originals
        self._device = device
        # By set and name. ``_active`` has those updated since their reset, with the value if it is known.
        self._copies: dict[tuple[str, str], Any] = {}
        self._active: dict[tuple[str, str], float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._originals)

    def update(self, prefix: str, outputs: Any, targets: Any, *, counts: bool = True) -> None:
        """Update a set's copies with one of its batches; without ``counts`` they only become active."""
        if type(outputs) in _STRUCTURES or isinstance(outputs, Tensor):
            outputs = map_tensors(torch.detach, outputs)  # an object that keeps outputs must not keep their graph
        for name in self._originals:
            copy = self._activated(prefix, name)
            if counts:
                copy.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """The value of each copy that has seen a batch, computed once.

        Raises:
            MetricError: A value is not a real number.
        """
        values: dict[str, float] = {}
        if self._group.size > 1 and self._originals:
            self._align()
        with torch.no_grad():
            for (prefix, name), value in self._active.items():
                full = f"{prefix}_{name}"
                values[full] = self._value(prefix, name) if value is None else value
                self._active[prefix, name] = values[full]
        return values

    def _align(self) -> None:
        """Make the active copies, and their order, the same in all processes."""
        of_ranks = self._group.gather(list(self._active.items()))
        known = [{key for key, value in of_rank if value is not None} for of_rank in of_ranks]
        for key in dict.fromkeys(key for of_rank in of_ranks for key, _ in of_rank):
            if any(key not in of_rank for of_rank in known):
                self._activated(*key)
        self._active = {
            key: self._active[key] for key in dict.fromkeys(key for of_rank in of_ranks for key, _ in of_rank)
        }

    def _value(self, prefix: str, name: str) -> float:
        """The value over all batches, of all processes."""
        own, full = self._copies[prefix, name], f"{prefix}_{name}"
        if self._group.size > 1 and not synchronises_itself(own):
            states = self._group.gather(_state_of(own, full))
            own, *others = [self._restored(prefix, name, state) for state in states]
            own.merge_state(others)
        return _one_number(full, own.compute())

    def _restored(self, prefix: str, name: str, state: Mapping[str, Any]) -> Any:
        copy = self._copied(prefix, name)
        _put_back(copy, map_tensors(lambda tensor: tensor.detach().to(self._device, copy=True), state))
        return copy

    def forget(self, prefix: str = "") -> None:
        """Reset the active copies whose names begin with ``prefix``."""
        for key in [key for key in self._active if "_".join(key).startswith(prefix)]:
            self._copies[key].reset()
            del self._active[key]

    def state_dict(self) -> dict[str, Any]:
        """The states of the active copies, by set and name.

        Raises:
            TypeError: A copy holds something that can't be saved in a checkpoint.
        """
        state: dict[str, Any] = {}
        for prefix, name in self._active:
            state.setdefault(prefix, {})[name] = _state_of(self._copies[prefix, name], f"{prefix}_{name}")
        return state

    def add(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, merged with the present states; unknown metrics are left out.

        Raises:
            ValueError: An object already has the state of another process and can't be merged.
        """
        for prefix, of_set in state.items():
            for name, saved in of_set.items():
                if name not in self._originals:
                    continue
                if (prefix, name) in self._active:
                    check_mergeable({name: self._originals[name]}, both=True)
                    own, other = self._copies[prefix, name], self._restored(prefix, name, saved)
                    own.merge_state(other if synchronises_itself(own) else [other])
                else:
                    # A copy: the object keeps what it is given, and the checkpoint may be loaded again.
                    copy = map_tensors(lambda tensor: tensor.detach().to(self._device, copy=True), saved)
                    _put_back(self._activated(prefix, name), copy)

    def _activated(self, prefix: str, name: str) -> Any:
        if (prefix, name) not in self._copies:
            self._copies[prefix, name] = self._copied(prefix, name)
        self._active[prefix, name] = None
        return self._copies[prefix, name]

    def _copied(self, prefix: str, name: str) -> Any:
        metric: Any = deepcopy(self._originals[name])
        if isinstance(metric, WholeSet):
            metric.name = f"{prefix}_{name}"
        for module in _modules(metric).values():
            persistent: Any = getattr(module, "persistent", None)
            if callable(persistent):
                persistent(mode=True)  # otherwise torchmetrics saves nothing
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
    """A metric's state: its ``state_dict`` if it has one, plain attributes of modules, or else all attributes."""
    if isinstance(metric, nn.Module):
        plain = {path: _plain_attributes(module) for path, module in _modules(metric).items()}
        state: dict[str, Any] = {"state": dict(metric.state_dict()), "plain": plain}
    elif callable(getattr(metric, "state_dict", None)) and callable(getattr(metric, "load_state_dict", None)):
        state = {"state": metric.state_dict()}
    else:
        state = {"plain": {"": dict(vars(metric))}}
    try:
        # Copies its containers, as the metric appends to its lists.
        return map_tensors(lambda tensor: tensor, readable(state))
    except UnreadableError as error:
        raise TypeError(
            f"metric {name}: {error}; or give the metric `state_dict` and `load_state_dict` of its own"
        ) from error


def _put_back(metric: Any, saved: Mapping[str, Any]) -> None:
    if "state" in saved:
        metric.load_state_dict(saved["state"])
    modules: Mapping[str, Any] = _modules(metric) or {"": metric}
    for path, attributes in saved.get("plain", {}).items():
        vars(modules[path]).update(attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Counts and flags of a module that its ``state_dict`` lacks."""
    return {key: value for key, value in vars(module).items() if type(value) in _PLAIN}
