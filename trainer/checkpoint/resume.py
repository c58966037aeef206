"""Finds the checkpoint that `Trainer.fit` begins with: the newest, that of the best epoch, or one from a file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from trainer.checkpoint.files import CheckpointError, CheckpointFile
from trainer.checkpoint.manager import CheckpointManager, find_checkpoint, load_checkpoint, newest_checkpoint
from trainer.state import Mode, best_epoch

logger = logging.getLogger(__name__)

Found = tuple[Path, dict[str, Any]]


@runtime_checkable
class Keeper(Protocol):
    """A callback that keeps checkpoints, as `trainer.callbacks.Checkpoint` does."""

    manager: CheckpointManager
    monitor: str
    mode: Mode


def find_start(ckpt: str | Path, callbacks: Iterable[object], device: torch.device) -> dict[str, Any] | None:
    """The checkpoint that a fit begins with; None if there is none yet.

    Args:
        ckpt: ``"last"``, the newest readable checkpoint of the trainer's `Checkpoint` callbacks; ``"best"``, the
            one of the epoch with the best value of the metric that the first of these callbacks monitors; or a
            file; or a folder, whose newest checkpoint is taken.
        callbacks: The trainer's callbacks.
        device: The device to load tensors to.

    Raises:
        ValueError: ``"last"`` or ``"best"`` without a callback that keeps checkpoints.
        CheckpointError: A file or folder has no readable checkpoint, or the best epoch has none.
    """
    if ckpt in ("last", "best"):
        keepers = [callback for callback in callbacks if isinstance(callback, Keeper)]
        if not keepers:
            raise ValueError(f"ckpt is {ckpt!r}, but no callback keeps checkpoints: add Checkpoint(folder)")
        found = _newest([keeper.manager.folder for keeper in keepers], device)
        if found is not None and ckpt == "best":
            found = _best(keepers[0], found, device)
    else:
        found = _at(Path(ckpt), device)
    if found is None:
        logger.info("there is no checkpoint yet: training starts from the beginning")
        return None
    logger.info("resuming from %s", found[0])
    return found[1]


def _newest(folders: Sequence[Path], device: torch.device) -> Found | None:
    return _with_path(newest_checkpoint(folders, device))


def _best(keeper: Keeper, newest: Found, device: torch.device) -> Found:
    """The checkpoint of the best epoch in the history of the newest checkpoint."""
    state = newest[1]["state"]
    epoch = best_epoch(state["history"], keeper.monitor, keeper.mode, after=state["inherited"])
    if epoch is None:
        raise CheckpointError(f"{newest[0]}: no epoch has a finite {keeper.monitor}: give ckpt='last'")
    found = _with_path(find_checkpoint([keeper.manager.folder], epoch, device))
    if found is None:
        raise CheckpointError(f"{keeper.manager.folder} has no readable checkpoint of the best epoch, {epoch}")
    return found


def _at(path: Path, device: torch.device) -> Found:
    if not path.is_dir():
        checkpoint = load_checkpoint(path, device)
        if "version" not in checkpoint:
            raise CheckpointError(
                f"{path}: no checkpoint of a run; if it holds weights, begin with load_weights(model, path)"
            )
        return path, checkpoint
    found = _newest([path], device)
    if found is None:
        raise CheckpointError(
            f"{path} holds no readable checkpoint; ckpt='last' starts where the trainer's Checkpoint has none yet"
        )
    return found


def _with_path(found: tuple[CheckpointFile, dict[str, Any]] | None) -> Found | None:
    return None if found is None else (found[0].path, found[1])
