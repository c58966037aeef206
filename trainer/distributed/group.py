"""Group: the interface through which the Trainer uses the processes of a run; this one is for a single process."""

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

#: How several processes hold the model: each the whole model, or each a shard of every tensor.
Strategy = Literal["ddp", "fsdp"]
_STRATEGIES: Final = get_args(Strategy)


def check_strategy(strategy: str) -> None:
    """Refuse an unknown strategy.

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}: give 'ddp' or 'fsdp'")


def device_of(given: torch.device | str) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: It is not a device of torch's.
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
        strategy: How the processes hold the model.
    """

    rank = 0
    size = 1
    strategy: Strategy = "ddp"

    def device(self, given: torch.device | str | None) -> torch.device:
        """The device on which this process trains: the given one, or the first CUDA device, or the CPU."""
        return device_of(given or ("cuda" if torch.cuda.is_available() else "cpu"))

    @contextmanager
    def session(
        self,
        device: torch.device,
        share: Callable[[], Any] = dict,  # noqa: ARG002
        whole: Callable[[], Any] = dict,  # noqa: ARG002
    ) -> Iterator[None]:
        """Let the processes work together inside the block, which all of them enter.

        Args:
            device: The device of this process.
            share: Makes this process's share of a checkpoint.
            whole: Makes this process's part of a checkpoint, which may have only its shards of tensors.

        Raises:
            RuntimeError: The process group was started after the Trainer was built.
        """
        if world_size() != self.size:
            raise RuntimeError(
                f"the process group of {world_size()} processes was started after the Trainer was built: start it "
                "first, or let torchrun start the script"
            )
        # Streams and pinned memory without a given device belong to the current one.
        other = device.type == "cuda" and device.index not in {None, torch.cuda.current_device()}
        with torch.cuda.device(device) if other else nullcontext():
            yield

    def take(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        """Prepare a model and its optimizer for training in this group."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the values of rank 0."""

    def shard(self, state: TrainState) -> Shard | None:  # noqa: ARG002
        """This process's part of each batch; None if it has the whole batch."""
        return None

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` in rank 0 alone, and return its result in all processes."""
        return make()

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, by rank, in all processes."""
        return [value]

    def arrive(self) -> None:
        """Meet the other processes before this one waits for sums on its device.

        At the meeting, on the host, it learns of a process that has failed; a wait on the device would never end.
        """

    def other_shares(self) -> Sequence[Any]:
        """The shares of the other processes for a checkpoint that this process makes, by rank."""
        return ()

    def complete(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with whole tensors in place of those that are split over the processes.

        Raises:
            LostShardsError: The other processes are gone.
        """
        return checkpoint

    def leave(self, error: BaseException | None = None, reason: str | None = None) -> None:
        """Wait until all processes are at the end of a fit, and answer rank 0's requests meanwhile.

        Args:
            error: The error of this process, if any; the others learn of it after these requests.
            reason: The stop reason of the run.

        Raises:
            RankError: Another process has failed.
        """

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor in all processes, of which each may hold only a shard."""
        return tensor
