"""MetricObjects: metrics that are updated batch by batch and computed once, a copy for each set."""

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
        """Take in one batch, as [samples, …] each; what it returns is not looked at."""
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
            return str(frame.f_locals["name"])
    return ""


def synchronises_itself(metric: Any) -> bool:
    """Whether a metric's ``compute`` asks the other processes what they have seen, as torchmetrics' do."""
    return hasattr(metric, "sync_on_compute") and bool(metric.sync_on_compute)


def check_mergeable(metrics: Mapping[str, Any], *, both: bool = False) -> None:
    """Refuse metric objects of which those of several processes can't be put together.

    Args:
        metrics: The objects by name.
        both: Whether they have to be merged here, so that it does not help if ``compute`` would do so.

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
    """Copies of metric objects, one for each set of data, on the device.

    The objects that a person gave are left as they are.

    Args:
        originals: The objects by name.
        device: Where their copies are to lie.
        group: The processes that update them.

    Raises:
        ValueError: There are several processes, and an object says nothing about how theirs are put together.
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
        # By set and name; those that have been updated since they were reset, with their value if it is known.
        self._copies: dict[tuple[str, str], Any] = {}
        self._active: dict[tuple[str, str], float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._originals)

    def update(self, prefix: str, outputs: Any, targets: Any, *, counts: bool = True) -> None:
        """Hand one batch of a set to that set's copies; one that does not count leaves them as they are."""
        if type(outputs) in _STRUCTURES or isinstance(outputs, Tensor):
            outputs = map_tensors(torch.detach, outputs)  # an object that keeps them would keep their graph
        for name in self._originals:
            copy = self._activated(prefix, name)
            if counts:
                copy.update(outputs, targets)

    def compute(self) -> dict[str, float]:
        """The value of each copy that has seen a batch, computed once.

        Raises:
            MetricError: One gave something else than a real number.
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
        """Have the same copies to compute, in the same order, as all other processes."""
        of_ranks = self._group.gather(list(self._active.items()))
        known = [{key for key, value in of_rank if value is not None} for of_rank in of_ranks]
        for key in dict.fromkeys(key for of_rank in of_ranks for key, _ in of_rank):
            if any(key not in of_rank for of_rank in known):
                self._activated(*key)
        self._active = {
            key: self._active[key] for key in dict.fromkeys(key for of_rank in of_ranks for key, _ in of_rank)
        }

    def _value(self, prefix: str, name: str) -> float:
        """The value of all batches, in several processes of all that these have seen."""
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
        """Reset what was updated under names that begin so."""
        for key in [key for key in self._active if "_".join(key).startswith(prefix)]:
            self._copies[key].reset()
            del self._active[key]

    def state_dict(self) -> dict[str, Any]:
        """State of the copies that have seen a batch, by set and name.

        Raises:
            TypeError: One holds what no checkpoint can.
        """
        state: dict[str, Any] = {}
        for prefix, name in self._active:
            state.setdefault(prefix, {})[name] = _state_of(self._copies[prefix, name], f"{prefix}_{name}")
        return state

    def add(self, state: Mapping[str, Any]) -> None:
        """Take in what ``state_dict`` returned; those of metrics that are gone are left out.

        Raises:
            ValueError: Another process's state is there already, and the object can't be merged.
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
                    # A copy: the object takes over what it is given, and it may be loaded once more.
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
        plain = {path: _plain_attributes(module) for path, module in _modules(metric).items()}
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
    modules: Mapping[str, Any] = _modules(metric) or {"": metric}
    for path, attributes in saved.get("plain", {}).items():
        vars(modules[path]).update(attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Counts and flags that are no part of a module's ``state_dict``."""
    return {key: value for key, value in vars(module).items() if type(value) in _PLAIN}
