"""Builds the content of a checkpoint from a Trainer, and restores a Trainer from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, Protocol

import torch

from trainer.callback import TrainerView
from trainer.checkpoint.fork import forked
from trainer.checkpoint.manager import snapshot
from trainer.data.random_state import rng_state
from trainer.distributed.group import Group
from trainer.distributed.tensor_shards import load_model, split_state
from trainer.runner import CallbackRunner
from trainer.step.direct import mark_stepped
from trainer.step.fused import leave_fused
from trainer.step.optimizers import load_optimizer, load_scheduler
from trainer.step.parts import bare_model, load_step, state_of_step

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION: Final = 8
#: Versions that can be read. 6 has no shares of other ranks, as there was only one process; 7 has no batch sizes.
_READABLE: Final = (6, 7, 8)


class Resumable(TrainerView, Protocol):
    """What a checkpoint needs of the Trainer.

    Attributes:
        built: What the optimizer was built with.
        callbacks: The callbacks of the run.
        group: The processes of the run.
        epoch_rng: The states of the random generators where the run stopped inside an epoch; None otherwise.
        epoch_shares: The shares (`rank_share`) of the other processes at that point, by rank.
    """

    built: list[dict[str, Any]]
    callbacks: CallbackRunner
    group: Group
    epoch_rng: dict[str, Any] | None
    epoch_shares: Sequence[Any]


def contents(trainer: Resumable) -> dict[str, Any]:
    """Everything a bit-exact continuation needs, in tensors and plain values."""
    others = trainer.epoch_shares or trainer.group.other_shares()
    return {**trainer.group.complete(contents_here(trainer)), "ranks": list(others)}


def contents_here(trainer: Resumable) -> dict[str, Any]:
    """This process's part of `contents`, which may have only a shard of each tensor of the model."""
    return {
        "version": CHECKPOINT_VERSION,
        "model": bare_model(trainer.model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "built": trainer.built,
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "step": state_of_step(trainer.step, trainer.optimizer),
        "state": trainer.state.state_dict(),
        "seed": trainer.seed,
        "threads": torch.get_num_threads(),
        "rng": trainer.epoch_rng or rng_state(),
        "recorder": trainer.recorder.state_dict(),
        "precision": trainer.precision.state_dict(),
        "callbacks": trainer.callbacks.state_dict(),
        "processes": trainer.group.size,
        "strategy": trainer.group.strategy,
    }


def rank_share(trainer: Resumable) -> Callable[[], dict[str, Any]]:
    """A function that makes this process's share of a checkpoint inside an epoch: what differs by rank."""
    return lambda: snapshot(
        {
            "rng": trainer.epoch_rng or rng_state(),
            "recorder": trainer.recorder.state_dict(),
            "callbacks": trainer.callbacks.state_dict(by_rank=True),
        }
    )


def restore(trainer: Resumable, checkpoint: dict[str, Any], *, fork: bool) -> None:
    """Restore a checkpoint; see `trainer.Trainer.load_state_dict`."""
    if checkpoint.get("version") not in _READABLE:
        raise ValueError(f"checkpoint version {checkpoint.get('version')!r}, expected {CHECKPOINT_VERSION}")
    if fork:
        checkpoint = forked(checkpoint, trainer.built, trainer.seed)
    elif trainer.device.type == "cpu" and not trainer.group.rank:
        _compare_threads(checkpoint)
    trainer.fire("on_before_load_checkpoint", checkpoint)
    load_model(bare_model(trainer.model), checkpoint["model"])
    load_optimizer(trainer.optimizer, checkpoint["optimizer"])
    split_state(trainer.optimizer)
    leave_fused(trainer.optimizer)
    load_scheduler(trainer.scheduler, checkpoint["scheduler"])
    load_step(trainer.step, checkpoint["step"])
    # A copy: the state keeps the objects that it is given, and the checkpoint may be loaded again.
    trainer.state.load_state_dict(deepcopy(checkpoint["state"]))
    trainer.seed = checkpoint["seed"]
    if trainer.state.step:
        mark_stepped(trainer.optimizer)
    trainer.precision.load_state_dict(checkpoint["precision"])
    share = _own_share(trainer, checkpoint)
    trainer.epoch_rng = share["rng"] if trainer.state.batch_index else None
    trainer.epoch_shares = share["others"] if trainer.state.batch_index else ()
    trainer.recorder.load_state_dict(*share["recorders"])
    trainer.callbacks.load_state_dict({**checkpoint["callbacks"], **share["callbacks"]})
    trainer.fire("on_load_checkpoint", checkpoint)


def _compare_threads(checkpoint: Mapping[str, Any]) -> None:
    """Warn if the CPU will use another number of threads, which changes the rounding of sums."""
    before, now = checkpoint.get("threads"), torch.get_num_threads()
    if before not in (None, now):
        logger.warning(
            "the checkpoint was written with %d threads and is resumed with %d, so that the rounding of sums may "
            "be another from here on: torch.set_num_threads(%d) before resuming leaves it as it was",
            before,
            now,
            before,
        )


def _own_share(trainer: Resumable, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """This process's share of the state that differs by rank.

    If the number of processes or the strategy has changed, rank 0 takes over the sums of all.
    """
    rank, size, others = trainer.group.rank, trainer.group.size, checkpoint.get("ranks", [])
    before, strategy = checkpoint.get("processes", 1), checkpoint.get("strategy", "ddp")
    if (before, strategy) == (size, trainer.group.strategy):
        if rank and others:
            own = others[rank - 1]
            return {**own, "recorders": [own["recorder"]], "others": others}
        recorders, rng = ([], None) if rank else ([checkpoint["recorder"]], checkpoint["rng"])
        return {"rng": rng, "recorders": recorders, "callbacks": {}, "others": others}
    if not rank:
        logger.warning(
            "the checkpoint was written by %d processes and is resumed by %d%s: the random numbers of the running "
            "epoch and the rounding of sums are others from here on",
            before,
            size,
            f", with strategy {trainer.group.strategy!r} after {strategy!r}" if before == size else "",
        )
    recorders = [] if rank else [checkpoint["recorder"], *(other["recorder"] for other in others)]
    dealt: dict[str, Any] = {}
    if trainer.state.batch_index:
        states = [checkpoint["callbacks"], *(other["callbacks"] for other in others)]
        split = "fsdp" in {strategy, trainer.group.strategy}
        dealt = _given_up(trainer) if split else trainer.callbacks.redealt(states, rank)
    rng = None if rank else checkpoint["rng"]
    return {"rng": rng, "recorders": recorders, "callbacks": dealt, "others": ()}


def _given_up(trainer: Resumable) -> dict[str, Any]:
    """An empty state for each callback whose state differs by rank, as that state belongs to other shards."""
    names = list(trainer.callbacks.state_dict(by_rank=True))
    if names and not trainer.group.rank:
        logger.warning(
            "%s begins anew inside the epoch: what it had of a split model fits no other split", ", ".join(names)
        )
    return {name: {} for name in names}
