"""The checkpoint that a fork begins with: another run's, with the hyperparameters of the fork in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from torch.optim import Optimizer

from trainer.lr_schedulers import GROUP_RATES, SCHEDULER_RATES

#: What an optimizer was built with: of each parameter group all but its parameters and how it is computed.
Built = Sequence[Mapping[str, Any]]
_NOT_BUILT: Final = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer's groups hold now that says what is computed, not how; a copy."""
    return [
        {name: deepcopy(value) for name, value in group.items() if name not in _NOT_BUILT}
        for group in optimizer.param_groups
    ]


def forked(checkpoint: Mapping[str, Any], built: Built, seed: int) -> dict[str, Any]:
    """The checkpoint of a run that begins where another run's epoch has ended, with hyperparameters of its own.

    Weights, the optimizer's state, the states of callbacks, the history and the place in schedule and data stay.
    A hyperparameter of the optimizer that the two runs were built with alike stays as it is by now; one that
    differs is the fork's. Learning rates keep their place in the schedule: those of each group, and those from
    which the scheduler computes later ones, are multiplied by the ratio of the rates that the runs were built
    with. Limits in absolute numbers (``eta_min``) and all else that a scheduler holds stay the other run's.

    Args:
        checkpoint: The other run's, at the end of an epoch; it is left as it is.
        built: What the fork's optimizer was built with, by `hyperparameters`.
        seed: The fork's, from which the passes that are to come draw their order.

    Raises:
        ValueError: The checkpoint lies inside an epoch, or is of another kind of optimizer.
    """
    state = checkpoint["state"]
    if state["batch_index"]:
        raise ValueError("a run can't be forked inside an epoch: give a checkpoint of an epoch's end")
    before: Built = checkpoint["built"]
    if [group.keys() for group in before] != [group.keys() for group in built]:
        raise ValueError("a run can't be forked with another kind of optimizer or other parameter groups")
    pairs = list(zip(before, built, strict=True))
    return {
        **checkpoint,
        "optimizer": _optimizer(checkpoint["optimizer"], iter(pairs)),
        "scheduler": _schedule(checkpoint["scheduler"], [(_rate(then), _rate(now)) for then, now in pairs]),
        # A size that a callback had set is the other run's; the fork's own holds from its next pass on.
        "state": {**state, "inherited": state["epoch"], "stop_reason": None, "batch_size": None},
        "seed": seed,
        "built": built,
    }


def _optimizer(state: Mapping[str, Any], pairs: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """An optimizer's state as the fork has it, or that of several; takes a pair for each parameter group."""
    if "by_name" in state:
        return {"by_name": {name: _optimizer(each, pairs) for name, each in state["by_name"].items()}}
    return {**state, "param_groups": [_group(group, *next(pairs)) for group in state["param_groups"]]}


def _group(group: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group as the fork has it."""
    changed = {name: value for name, value in now.items() if name not in GROUP_RATES and value != then[name]}
    rates = {name: _moved(group[name], _rate(then), _rate(now)) for name in GROUP_RATES if name in group}
    return {**group, **changed, **rates}


def _schedule(state: Any, rates: Sequence[tuple[Any, Any]]) -> Any:
    """A scheduler's state, and those of the schedulers inside it, with the fork's learning rates."""
    if not isinstance(state, Mapping):
        return state
    if "by_name" in state:  # several, each over some of the groups
        return {"by_name": {name: _one_of(each, rates) for name, each in state["by_name"].items()}}
    moved = dict(state)
    for name in (*SCHEDULER_RATES, "_last_lr"):
        if isinstance(values := state.get(name), list) and len(values) == len(rates):
            moved[name] = [_moved(value, *pair) for value, pair in zip(values, rates, strict=True)]
    if "main" in state:
        moved["main"] = _schedule(state["main"], rates)
    if "_schedulers" in state:
        moved["_schedulers"] = [_schedule(inner, rates) for inner in state["_schedulers"]]
    return moved


def _one_of(saved: Mapping[str, Any], rates: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    first, last = saved["groups"]
    return {**saved, "state": _schedule(saved["state"], rates[first:last])}


def _rate(group: Mapping[str, Any]) -> Any:
    """The learning rate that a group's schedule begins from."""
    return group.get("initial_lr", group.get("lr", 0.0))


def _moved(rate: Any, then: Any, now: Any) -> Any:
    """A learning rate of a run built with the rate ``then``, for one built with ``now``."""
    if rate == then:
        return now
    return rate / then * now if then and then != now else rate
