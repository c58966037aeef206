"""Sharded: a group of processes in which each holds a shard of every tensor of the model (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.optim import Optimizer

from trainer.distributed.group import LostShardsError, Strategy
from trainer.distributed.processes import FAILED, GRADIENTS, PARTS, TENSORS, TOGETHER, Processes
from trainer.distributed.rank_error import RankError
from trainer.distributed.splitting import check_split, check_splits, recover, split
from trainer.distributed.tensor_shards import held, is_sharded, replaced, shards_in
from trainer.step.parts import bare_model

_LOST: Final = "no checkpoint is made: the other processes are gone, and their parts of the model with them"


class Sharded(Processes):
    """The group of a run whose model is split.

    On the CPU, torch's FSDP2 sends its tensors through this group: if one process fails, or a hook computes with
    the model in one process alone, the others do not wait for ever. On CUDA it sends them through NCCL.
    """

    strategy: Strategy = "fsdp"

    def __init__(self) -> None:
        super().__init__()
        self._make_whole: Callable[[], Any] = dict

    @contextmanager
    def session(
        self, device: torch.device, share: Callable[[], Any] = dict, whole: Callable[[], Any] = dict
    ) -> Iterator[None]:
        """See `Group.session`."""
        if self._control is None:
            self._make_whole = whole
            with super().session(device, share):
                yield
            return
        self._meet(TOGETHER)  # a process that failed at the end of the fit would not take part in the block
        try:
            yield
        except BaseException as error:
            self._break_off(error)
            raise

    def take(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        """Split a whole model, with the weights of rank 0, and prepare the split model."""
        if self._control is None:  # before the first session
            return
        bare = bare_model(model)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(  # noqa: TRY004 - as check_alone
                f"the model is wrapped in {type(model).__name__}, and strategy 'fsdp' splits it: hand over the "
                "model that is in it"
            )
        if not any(map(is_sharded, bare.parameters())):
            check_splits(bare, optimizer)
            self.broadcast([*bare.parameters(), *bare.buffers()])
            split(bare, optimizer, device, self.size)
        check_split(bare, self.size)
        for module in bare.modules():
            if isinstance(module, FSDPModule):
                self._get_ready(module, device)
        recover(bare)

    def complete(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with whole CPU tensors in place of the shards.

        Raises:
            RuntimeError: This process is not rank 0, or the others are not on their way to a meeting.
            LostShardsError: Another process has failed.
        """
        if next(shards_in(checkpoint), None) is None:
            return checkpoint
        if self._control is None and self.failed:
            raise LostShardsError(_LOST)
        if self.rank or not self.will_meet:
            raise RuntimeError(
                "with strategy 'fsdp' a checkpoint is made by rank 0 alone, in the hooks on_fit_start, "
                "on_train_batch_end, on_epoch_end or on_fit_end: let Checkpoint write it"
            )
        try:
            self._exchange(TENSORS)
            self._compare(checkpoint)
            return replaced(checkpoint, self.whole)  # type: ignore[no-any-return]
        except RankError as error:
            raise LostShardsError(_LOST) from error

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor on the CPU, from the shards of all processes; each calls this with its own shard."""
        if not is_sharded(tensor):
            return tensor
        rows = -(-tensor.shape[0] // self.size)
        piece = held(tensor.detach()).cpu()
        sent = piece.new_zeros((rows, *tensor.shape[1:]))
        sent[: len(piece)] = piece
        found = sent.new_empty((rows * self.size, *tensor.shape[1:]))
        self._finish(self._begun(lambda control: control.allgather(list(found.chunk(self.size)), sent)))
        return found[: tensor.shape[0]]

    # ---- inside

    def _break_off(self, error: BaseException) -> None:
        """Tell the others of an error in a session inside a fit, as they may wait for parts from this process.

        If all processes have failed, they are at the same place, and a hook may catch the error.
        """
        with suppress(RankError):
            # No meeting on CUDA, where the host of another process may wait for its device.
            if self._on_cuda or self._said(FAILED, 0)[0] != FAILED:
                self.fail(error)

    def _answer(self, word: int) -> None:
        if word != TENSORS:
            super()._answer(word)
            return
        checkpoint = self._make_whole()
        self._compare(checkpoint)
        for tensor in shards_in(checkpoint):
            self.whole(tensor)

    def _compare(self, checkpoint: Any) -> None:
        """Check that all processes are about to send the same tensors."""
        shapes = [tuple(tensor.shape) for tensor in shards_in(checkpoint)]
        if any(other != shapes for other in self._gathered_now(shapes)):
            raise RuntimeError(
                "the processes hold parts of different tensors: a callback with rank_zero_only keeps tensors of "
                "the model, which strategy 'fsdp' leaves in parts"
            )

    def _get_ready(self, module: FSDPModule, device: torch.device) -> None:
        """Set up a module so that gradients are summed, and parameters are shards between passes."""
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_forward(True, recurse=False)
        if device.type != "cuda":
            module.set_custom_all_gather(_Gather(self))
            module.set_custom_reduce_scatter(_Scatter(self))

    def all_gather(self, found: Tensor, sent: Tensor) -> None:
        """Concatenate what all processes send into ``found``, by rank."""
        self._said(PARTS, sent.numel())
        self._finish(self._begun(lambda control: control._allgather_base(found, sent)))  # noqa: SLF001

    def reduce_scatter(self, found: Tensor, sent: Tensor) -> None:
        """Sum what all processes send, and put this process's shard of the sum into ``found``."""
        self._said(GRADIENTS, sent.numel())
        self._finish(self._begun(lambda control: control._reduce_scatter_base(found, sent)))  # noqa: SLF001


class _OwnMemory:
    """Allocates memory for what is sent, as torch's default does."""

    def __init__(self, group: Sharded) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_OwnMemory, AllGather):
    """Gathers parameters before they are used."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002 - the mesh's group
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        self._group.all_gather(output_tensor, input_tensor)


class _Scatter(_OwnMemory, ReduceScatter):
    """Sums gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002
        op: Any,  # noqa: ARG002 - always a sum, see `_get_ready`
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        self._group.reduce_scatter(output_tensor, input_tensor)
