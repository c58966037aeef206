"""Chooses the class of a run's group of processes by the strategy."""

from __future__ import annotations

from trainer.distributed.group import Group, Strategy, check_strategy
from trainer.distributed.processes import Processes
from trainer.distributed.ranks import world_size


def group_of_process(strategy: Strategy) -> Group:
    """The group of the run to which this process belongs.

    Raises:
        ValueError: The strategy is unknown.
    """
    check_strategy(strategy)
    if world_size() == 1:
        return Group()
    if strategy == "fsdp":
        from trainer.distributed.sharded import Sharded  # imports half of torch.distributed

        return Sharded()
    return Processes()
