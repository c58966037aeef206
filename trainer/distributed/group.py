"""Group: the processes of a run, as the Trainer sees them; that of a run of one process does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.data.shard import Shard
from trainer.distributed.ranks import world_size
from trainer.state import TrainState

#: How several processes hold the model: each all of it, or each a shard of every tensor.
Strategy = Literal["ddp", "fsdp"]
_STRATEGIES: Final = get_args(Strategy)


def check_strategy(strategy: str) -> None:
    """Refuse what is no strategy.

    Raises:
        ValueError: It is none.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: give 'ddp' or 'fsdp'")


def device_of(given: torch.device | str) -> torch.device:
    """A device by its name.

    Raises:
        ValueError: It is none.
    """
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"device is {given!r}: give 'cpu', 'cuda', 'cuda:0' or another one of torch's") from error


class LostShardsError(RuntimeError):
    """A checkpoint can't be made: other processes are gone, and their shards of the model with them."""


class Group:
    """The group of a run of one process.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        strategy: How they hold the model.
    """

    rank = 0
    size = 1
    strategy: Strategy = "ddp"

    def device(self, given: torch.device | str | None) -> torch.device:
        """Where this process trains: as given, or the first CUDA device, or the CPU."""
        return device_of(given or ("cuda" if torch.cuda.is_available() else "cpu"))

    @contextmanager
    def session(
        self,
        device: torch.device,
        share: Callable[[], Any] = dict,  # noqa: ARG002
        whole: Callable[[], Any] = dict,  # noqa: ARG002
    ) -> Iterator[None]:
        """Work together from here to the end of the block, which all processes enter.

        Args:
            device: Where this process computes.
            share: Makes what this process adds to a checkpoint.
            whole: Makes a checkpoint as this process has it, of whose tensors others may hold shards.

        Raises:
            RuntimeError: The process group was started after the Trainer was built.
        """
        if world_size() != self.size:
            raise RuntimeError(
                f"the process group of {world_size()} processes was started after the Trainer was built: start it "
                "first, or let torchrun start the script"
            )
        # Streams and pinned memory are those of the current device where none is named.
        other = device.type == "cuda" and device.index not in {None, torch.cuda.current_device()}
        with torch.cuda.device(device) if other else nullcontext():
            yield

    def take(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        """Get a model and its optimizer ready for a run of this group, which is in a session."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the values of rank 0."""

    def shard(self, state: TrainState) -> Shard | None:  # noqa: ARG002
        """Which part of each batch is this process's; None: all of it."""
        return None

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns in the process of rank 0, in all processes."""
        return make()

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank, in all processes."""
        return [value]

    def arrive(self) -> None:
        """Before what lets this process wait for its device, where the others add something up: be here with all.

        On the host it hears of one that has failed; what waits on the device for that one would not end.
        """

    def other_shares(self) -> Sequence[Any]:
        """What the other processes add to a checkpoint that this one makes, by rank."""
        return ()

    def complete(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with whole tensors in the place of those of which each process holds a shard.

        Raises:
            LostShardsError: The others are gone.
        """
        return checkpoint

    def leave(self, error: BaseException | None = None, reason: str | None = None) -> None:
        """Wait until all are at the end of a fit, and give rank 0 what it asks for meanwhile.

        Args:
            error: This process's, of which the others hear once rank 0 has what it asks for.
            reason: Why the run ends.

        Raises:
            RankError: Another process has failed.
        """

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of which each process may hold a shard, in all of them."""
        return tensor
