"""Optimizers and Schedulers: several of them by name, that the rest of the Trainer handles like one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from inspect import Parameter, signature
from numbers import Real
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.lr_schedulers import check_interval

logger = logging.getLogger(__name__)

Interval = Literal["epoch", "step"]


class Optimizers(Optimizer):
    """Several optimizers as one: its parameter groups are those of all, in order.

    A Trainer makes it of the mapping that it is given; ``trainer.optimizer["generator"]`` is one of them.

    Args:
        optimizers: The optimizers by name. A name has no dot: it becomes part of the names of metrics.

    Raises:
        TypeError: One of them is not an optimizer.
        ValueError: The mapping is empty, or a name is not an identifier.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # Not torch's own __init__, which would make groups and state that belong to no optimizer.
        if not optimizers:
            raise ValueError("optimizer is an empty mapping: give each optimizer by its name")
        for name, optimizer in optimizers.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"an optimizer is called {name!r}: give a name such as 'generator'")
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"optimizer {name!r} is no torch.optim.Optimizer: {optimizer!r}")
        self.by_name = dict(optimizers)
        self.defaults = {}

    def __getitem__(self, name: str) -> Optimizer:
        """The optimizer with this name."""
        return self.by_name[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all optimizers; their own mappings, not copies."""
        return [group for optimizer in self.by_name.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The state of each parameter; if two optimizers train a parameter, that of the later one."""
        return {key: value for optimizer in self.by_name.values() for key, value in optimizer.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer with the present gradients.

        Raises:
            ValueError: A closure is given; it would be evaluated between their steps.
        """
        if closure is not None:
            raise ValueError("several optimizers take no closure together: step each by itself")
        for optimizer in self.by_name.values():
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of each by its name."""
        return {"by_name": {name: optimizer.state_dict() for name, optimizer in self.by_name.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore each.

        Raises:
            ValueError: The state is that of others.
        """
        saved = _same_names("optimizers", state_dict, self.by_name)
        for name, optimizer in self.by_name.items():
            optimizer.load_state_dict(saved[name])


def _same_names(kind: str, state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved states by name; ValueError if their names differ from those of this run."""
    saved: Mapping[str, Any] = state.get("by_name", {})
    if saved.keys() != own.keys():
        raise ValueError(
            f"the checkpoint has the {kind} {', '.join(saved) or 'of a run with only one'}, and this run "
            f"{', '.join(own)}"
        )
    return saved


def as_optimizer(optimizer: Optimizer | Mapping[str, Optimizer]) -> Optimizer:
    """The optimizer itself, or several given by name as one `Optimizers`."""
    return Optimizers(optimizer) if isinstance(optimizer, Mapping) else optimizer


def each_of(optimizer: Optimizer) -> Mapping[str, Optimizer]:
    """The optimizers by name; a single one has the name ``""``."""
    return optimizer.by_name if isinstance(optimizer, Optimizers) else {"": optimizer}


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a copy of the state into an optimizer, or into several.

    The step counts of torch's optimizers are moved to the CPU first. A fused or capturable optimizer moves them to
    its device; any other leaves them where they are, and on a GPU would wait for each of them in every step.
    """
    own = deepcopy(dict(state))
    states = own.get("by_name", {"": own})
    for name, each in each_of(optimizer).items():
        if type(each).__module__.startswith("torch.optim."):
            for kept in states.get(name, {}).get("state", {}).values():
                count_on_cpu(kept)
    optimizer.load_state_dict(own)


def count_on_cpu(kept: Any) -> None:
    """Move the step count in an optimizer's state of one parameter to the CPU, if there is one."""
    if isinstance(kept, dict) and isinstance(count := kept.get("step"), Tensor):
        kept["step"] = count.cpu()


def shared_parameters(optimizer: Optimizer) -> str:
    """A text on which optimizers share how many parameters, and so can't step together; empty if none do.

    Code that scales or clips all gradients would process the gradient of a shared parameter several times.
    """
    holders: dict[int, set[str]] = {}
    for name, each in each_of(optimizer).items():
        for group in each.param_groups:
            for parameter in group["params"]:
                holders.setdefault(id(parameter), set()).add(name)
    several = [names for names in holders.values() if len(names) > 1]
    if not several:
        return ""
    sharing = ", ".join(repr(name) for name in each_of(optimizer) if any(name in names for names in several))
    return f"the optimizers {sharing} can't step together, as they share {len(several)} of their parameters"


def first_rate(optimizer: Optimizer) -> float | Tensor | None:
    """The first parameter group's learning rate; None if it has none, as an optimizer that finds its own."""
    rate = optimizer.param_groups[0].get("lr")
    return rate if isinstance(rate, Real | Tensor) else None  # type: ignore[return-value]


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """The first parameter group's learning rate, as ``lr``; of several optimizers also each ``lr_<name>``."""
    rates = {"lr": first_rate(optimizer)}
    if isinstance(optimizer, Optimizers):
        rates |= {f"lr_{name}": first_rate(each) for name, each in optimizer.by_name.items()}
    return {name: float(rate) for name, rate in rates.items() if rate is not None}


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer's ``step`` needs a closure: LBFGS, and classes with ``needs_closure = True``."""
    declared = getattr(optimizer, "needs_closure", None)
    if isinstance(declared, bool):
        return declared
    parameter = signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is Parameter.empty


class Schedulers:
    """Several schedulers by name, each over one of a trainer's optimizers, stepped at its own interval.

    Args:
        schedulers: The schedulers by name; two may be over one optimizer and step in this order.
        intervals: When each steps: by name, or one interval for all.
        optimizer: The trainer's optimizer, or several as one.

    Raises:
        ValueError: A name of ``intervals`` is not a scheduler's, or a scheduler is over another optimizer.
    """

    def __init__(
        self,
        schedulers: Mapping[str, LRScheduler],
        intervals: Interval | Mapping[str, Interval],
        optimizer: Optimizer,
    ) -> None:
        if isinstance(intervals, str):
            intervals = dict.fromkeys(schedulers, intervals)
        if unknown := intervals.keys() - schedulers.keys():
            raise ValueError(
                f"scheduler_interval names {', '.join(sorted(unknown))}, and the schedulers are "
                f"{', '.join(schedulers)}"
            )
        self.by_name = dict(schedulers)
        self.intervals: dict[str, Interval] = {name: intervals.get(name, "epoch") for name in schedulers}
        self._groups = {name: _groups_of(name, each, optimizer) for name, each in schedulers.items()}

    @property
    def _schedulers(self) -> list[LRScheduler]:
        """The schedulers, under the name that torch's ChainedScheduler has for its own."""
        return list(self.by_name.values())

    def state_dict(self) -> dict[str, Any]:
        """The state of each by name, with the range of its parameter groups among those of all optimizers."""
        return {
            "by_name": {
                name: {"groups": list(self._groups[name]), "state": each.state_dict()}
                for name, each in self.by_name.items()
            }
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore each.

        Raises:
            ValueError: The state is that of others.
        """
        saved = _same_names("schedulers", state_dict, self.by_name)
        for name, each in self.by_name.items():
            each.load_state_dict(saved[name]["state"])


Scheduler = LRScheduler | Schedulers


def load_scheduler(scheduler: Scheduler | None, state: Mapping[str, Any] | None) -> None:
    """Load a copy of the state into a scheduler, or into several.

    If only the checkpoint or only this run has a scheduler, a warning says so and nothing is loaded.

    Raises:
        ValueError: The state is that of other schedulers.
    """
    if scheduler is None or state is None:
        if scheduler is not None:
            logger.warning("the checkpoint has no scheduler: that of this run begins anew")
        elif state is not None:
            logger.warning(
                "the checkpoint has a scheduler, and this run none: the learning rate stays as it was there"
            )
        return
    if not isinstance(scheduler, Schedulers) and "by_name" in state:
        raise ValueError(f"the checkpoint has the schedulers {', '.join(state['by_name'])}, and this run only one")
    scheduler.load_state_dict(deepcopy(dict(state)))


def as_scheduler(
    scheduler: LRScheduler | Mapping[str, LRScheduler] | None,
    interval: Interval | Mapping[str, Interval],
    optimizer: Optimizer,
) -> Scheduler | None:
    """The scheduler itself, or several given by name as one `Schedulers`.

    Raises:
        ValueError: Intervals by name are given for one scheduler, or `Schedulers` refuses the arguments.
    """
    if isinstance(scheduler, Mapping):
        return Schedulers(scheduler, interval, optimizer) if scheduler else None
    if isinstance(interval, Mapping):
        raise ValueError(f"scheduler_interval is {interval!r}: by name it goes with schedulers by name")  # noqa: TRY004
    return scheduler


def check_intervals(scheduler: Scheduler | None, interval: Any) -> None:
    """Refuse an interval at which a scheduler can't step; see `trainer.lr_schedulers.check_interval`.

    Raises:
        ValueError: A scheduler can't step at its interval.
    """
    if isinstance(scheduler, Schedulers):
        for name, each in scheduler.by_name.items():
            check_interval(each, scheduler.intervals[name])
    else:
        check_interval(scheduler, interval)


def due(scheduler: Scheduler | None, interval: Any, moment: Interval, optimizer: Optimizer) -> list[LRScheduler]:
    """The schedulers that step at a moment; after an optimizer step, only those over that optimizer.

    Args:
        scheduler: The trainer's scheduler or schedulers.
        interval: When it steps, if there is only one.
        moment: The end of an epoch, or an optimizer step.
        optimizer: The optimizer that has stepped; several as one if all have.
    """
    if not isinstance(scheduler, Schedulers):
        return [] if scheduler is None or interval != moment else [scheduler]
    over = (optimizer, *each_of(optimizer).values())
    return [
        each
        for name, each in scheduler.by_name.items()
        if scheduler.intervals[name] == moment and each.optimizer in over
    ]


def _groups_of(name: str, scheduler: LRScheduler, optimizer: Optimizer) -> tuple[int, int]:
    """Begin and end of a scheduler's parameter groups among those of all optimizers."""
    begin = 0
    for each in each_of(optimizer).values():
        end = begin + len(each.param_groups)
        if getattr(scheduler, "optimizer", None) is each:
            return begin, end
        begin = end
    raise ValueError(f"scheduler {name!r} was built over another optimizer: build it over one of the trainer's")
