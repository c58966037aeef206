"""Which process of a distributed run this is."""

import os
from typing import Final

import torch.distributed as dist

#: What torchrun tells each process that it starts; all of it is needed to find the others.
_DESCRIPTION: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    """Rank of this process, 0 where nothing is distributed; known before a process group is started."""
    if is_distributed():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_described() else 0


def world_size() -> int:
    """Number of processes of this run, 1 where nothing is distributed; known before a process group is started."""
    if is_distributed():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_described() else 1


def local_rank() -> int:
    """Number of this process among those of its machine, by torchrun's environment; 0 where that says nothing."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_distributed() -> bool:
    """Whether a process group has been started."""
    return dist.is_available() and dist.is_initialized()


def is_described() -> bool:
    """Whether torchrun, or what works as it does, has started this process as one of a group."""
    return all(name in os.environ for name in _DESCRIPTION)
