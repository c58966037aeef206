"""The group of processes of a run, by how its model is trained in them."""

from __future__ import annotations

from trainer.distributed.group import Group, Strategy, check_strategy
from trainer.distributed.processes import Processes
from trainer.distributed.ranks import world_size


def group_of_process(strategy: Strategy) -> Group:
    """The group of the run that this process takes part in.

    Raises:
        ValueError: The strategy is none.
    """
    check_strategy(strategy)
    if world_size() == 1:
        return Group()
    if strategy == "fsdp":
        from trainer.distributed.sharded import Sharded  # which loads half of torch.distributed

        return Sharded()
    return Processes()
