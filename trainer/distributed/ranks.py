"""Tells which process of a distributed run this is."""

import os
from typing import Final

import torch.distributed as dist

#: Environment variables that torchrun sets; a process needs all of them to find the others.
_DESCRIPTION: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    """Rank of this process, known also before a process group is started; 0 if not distributed."""
    if is_distributed():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_described() else 0


def world_size() -> int:
    """Number of processes of this run, known also before a process group is started; 1 if not distributed."""
    if is_distributed():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if is_described() else 1


def local_rank() -> int:
    """Number of this process among those of its machine, from torchrun's environment; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_distributed() -> bool:
    """Whether a process group has been started."""
    return dist.is_available() and dist.is_initialized()


def is_described() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process as one of a group."""
    return all(name in os.environ for name in _DESCRIPTION)
