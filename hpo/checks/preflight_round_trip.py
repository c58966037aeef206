"""Checks that a checkpoint of a run that is tried out is the same after saving and loading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpo.checks.findings import Finding, finding
from hpo.checks.preflight_blame import Attempt, section_of
from hpo.study.folders import CHECKPOINTS
from trainer import Trainer
from trainer.checkpoint.files import CheckpointError
from trainer.checkpoint.manager import CheckpointManager, load_checkpoint, newest_checkpoint, snapshot
from trainer.checkpoint.readable import readable


def round_trip(attempt: Attempt, trainer: Trainer, folder: Path) -> list[Finding]:
    """Warnings about parts of a checkpoint that change when it is saved, read with ``weights_only``, and loaded.

    Raises:
        InputError: The checkpoint can't be saved and read back.
    """
    if trainer.group.strategy == "fsdp":  # its checkpoints need all ranks, inside a run
        if newest_checkpoint([folder / CHECKPOINTS]) is None:
            raise attempt.unsaved(CheckpointError("none that can be read was written"))
        return []
    try:
        saved = snapshot(readable(trainer.state_dict()))
        file = CheckpointManager(folder / "round-trip").write(saved, trainer.state.epoch)
        loaded = load_checkpoint(file, trainer.device)
    except (CheckpointError, OSError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise attempt.unsaved(error) from error
    if not _equal(saved, snapshot(loaded)):
        raise attempt.unsaved(CheckpointError("it is not equal to what was saved"))
    trainer.load_state_dict(loaded)
    restored = snapshot(readable(trainer.state_dict()))
    changed = [name for name in ("model", "optimizer", "scheduler") if not _equal(saved[name], restored[name])]
    changed += [
        f"callbacks ({name})"
        for name, value in saved["callbacks"].items()
        if not _equal(value, restored["callbacks"][name])
    ]
    problem = "changes when a checkpoint saves and restores it: a resumed trial would differ"
    fix = "let load_state_dict restore everything that state_dict returns"
    return [finding(attempt.builder.spec, f"{name} {problem}", path=section_of(name), fix=fix) for name in changed]


def _equal(left: Any, right: Any) -> bool:
    """Equality of plain data and tensors; NaN equals itself."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        alike = isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == right.dtype
        return alike and left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    if isinstance(left, Mapping):
        same_keys = isinstance(right, Mapping) and left.keys() == right.keys()
        return same_keys and all(_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        same_size = isinstance(right, list | tuple) and len(left) == len(right)
        return same_size and all(map(_equal, left, right))
    return bool(left == right) or (left != left and right != right)
