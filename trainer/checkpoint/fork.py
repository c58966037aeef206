"""Makes the checkpoint that a forked run begins with: another run's, with the fork's hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from torch.optim import Optimizer

from trainer.lr_schedulers import GROUP_RATES, SCHEDULER_RATES

#: What an optimizer was built with: the settings of each parameter group that are not in `_NOT_BUILT`.
Built = Sequence[Mapping[str, Any]]
_NOT_BUILT: Final = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the present settings of each parameter group, without its parameters and the form of its step."""
    return [
        {name: deepcopy(value) for name, value in group.items() if name not in _NOT_BUILT}
        for group in optimizer.param_groups
    ]


def forked(checkpoint: Mapping[str, Any], built: Built, seed: int) -> dict[str, Any]:
    """The checkpoint of a run that continues from the end of another run's epoch, with its own hyperparameters.

    Weights, the optimizer's state, the states of callbacks, the history and the position in schedule and data are
    kept. An optimizer hyperparameter that both runs were built with alike keeps its present value; one that
    differs gets the fork's value. Learning rates keep their position in the schedule: the rate of each group, and
    the rates from which the scheduler computes later ones, are multiplied by the ratio of the rates that the two
    runs were built with. Absolute limits (``eta_min``) and all else in a scheduler stay those of the other run.

    Args:
        checkpoint: The other run's, at the end of an epoch; it is not changed.
        built: What the fork's optimizer was built with, from `hyperparameters`.
        seed: The fork's seed, which orders the data in its epochs.

    Raises:
        ValueError: The checkpoint was written inside an epoch, or for another kind of optimizer.
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
        # A batch size that a callback set belongs to the other run; the fork's own applies from its next epoch on.
        "state": {**state, "inherited": state["epoch"], "stop_reason": None, "batch_size": None},
        "seed": seed,
        "built": built,
    }


def _optimizer(state: Mapping[str, Any], pairs: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """The fork's state of an optimizer, or of several; takes one pair for each parameter group."""
    if "by_name" in state:
        return {"by_name": {name: _optimizer(each, pairs) for name, each in state["by_name"].items()}}
    return {**state, "param_groups": [_group(group, *next(pairs)) for group in state["param_groups"]]}


def _group(group: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The fork's form of a parameter group."""
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
    """The learning rate that a group's schedule starts from."""
    return group.get("initial_lr", group.get("lr", 0.0))


def _moved(rate: Any, then: Any, now: Any) -> Any:
    """Convert a learning rate of a run built with the rate ``then`` for a run built with ``now``."""
    if rate == then:
        return now
    return rate / then * now if then and then != now else rate
