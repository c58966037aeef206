"""Group: the processes of a run, as the Trainer sees them; that of a run of one process does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, get_args

import torch

from trainer.data.shard import Shard
from trainer.distributed.ranks import world_size
from trainer.state import TrainState

#: How several processes hold the model: each all of it, or each a part of every tensor.
Strategy = Literal["ddp", "fsdp"]
_STRATEGIES: Final = get_args(Strategy)


def check_strategy(strategy: str) -> None:
    """Refuse what is no strategy.

    Raises:
        ValueError: It is none.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: give 'ddp' or 'fsdp'")


class Group:
    """The group of a run of one process.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
    """

    rank = 0
    size = 1

    def device(self, given: torch.device | str | None) -> torch.device:
        """Where this process trains: as given, or the first CUDA device, or the CPU."""
        return torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))

    @contextmanager
    def session(self, device: torch.device, part: Callable[[], Any] = dict) -> Iterator[None]:  # noqa: ARG002
        """Work together from here to the end of the block, which all processes enter.

        Args:
            device: Where this process computes.
            part: Makes what this process adds to a checkpoint.

        Raises:
            RuntimeError: The process group was started after the Trainer was built.
        """
        if world_size() != self.size:
            raise RuntimeError(
                f"the process group of {world_size()} processes was started after the Trainer was built: start it "
                "first, or let torchrun start the script"
            )
        yield

    def shard(self, state: TrainState) -> Shard | None:  # noqa: ARG002
        """Which part of each batch is this process's; None: all of it."""
        return None

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns in the process of rank 0, in all processes."""
        return make()

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank, in all processes."""
        return [value]

    def other_parts(self) -> Sequence[Any]:
        """What the other processes add to a checkpoint that this one makes, by rank."""
        return ()
