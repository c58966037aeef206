"""Which process of a distributed run this is."""

import torch.distributed as dist


def rank() -> int:
    """Rank of this process, 0 where nothing is distributed."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes of this run, 1 where nothing is distributed."""
    return dist.get_world_size() if is_distributed() else 1


def is_distributed() -> bool:
    """Whether a process group has been started."""
    return dist.is_available() and dist.is_initialized()
