"""load_weights: the weights that a model begins with, all of them or those that fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.files import CheckpointError
from trainer.step.parts import bare_model

logger = logging.getLogger(__name__)

# Names in a message; the record has them all.
_SHOWN = 5


@dataclass(frozen=True)
class LoadedWeights:
    """What became of a file of weights.

    Attributes:
        loaded: Names of what the model has from the file.
        missing: What the model has and the file lacks: it keeps its value.
        unexpected: What the file has and the model lacks.
        mismatched: What has another shape there, as ``name [2, 3] for [2, 4]``: it keeps its value.
    """

    loaded: Sequence[str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    mismatched: Sequence[str]

    @property
    def skipped(self) -> str:
        """What was not taken over, for people; empty where everything was."""
        parts = (
            ("not in the file", self.missing),
            ("not in the model", self.unexpected),
            ("of another shape", self.mismatched),
        )
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def load_weights(model: nn.Module, path: Path | str, *, strict: bool = True) -> LoadedWeights:
    """Give a model weights to begin with, before it is trained; nothing else of a checkpoint is taken.

    Args:
        model: Its parameters and buffers are changed in place.
        path: A checkpoint or merged weights of this package, a file of ``torch.save(model.state_dict(), …)``, or
            ``.safetensors``.
        strict: Whether all must fit by name and shape. If not, what fits is taken, and a warning says what is not.

    Returns:
        What was taken over and what was not.

    Raises:
        CheckpointError: The file can't be read, or holds no weights.
        ValueError: Something does not fit, or with ``strict=False`` nothing does. The model is as it was.
    """
    bare = bare_model(model)
    path, own = Path(path), bare.state_dict()
    found = _read(path)
    same = [name for name in own if name in found]
    fits = [name for name in same if _shape(own[name]) == _shape(found[name])]
    outcome = LoadedWeights(
        fits,
        [name for name in own if name not in found],
        [name for name in found if name not in own],
        [f"{name} {_shape(found[name])} for {_shape(own[name])}" for name in same if name not in set(fits)],
    )
    if outcome.skipped and strict:
        raise ValueError(f"{path} does not fit the model; {outcome.skipped}; strict=False takes what fits")
    if own and not fits:
        raise ValueError(f"nothing in {path} fits the model; {outcome.skipped}")
    bare.load_state_dict({name: found[name] for name in fits}, strict=False)
    if outcome.skipped:
        logger.warning("%d of %d weights come from %s; %s", len(fits), len(own), path, outcome.skipped)
    return outcome


def _read(path: Path) -> Mapping[str, Any]:
    """The weights in a file, by name."""
    try:
        content = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    except ImportError:
        raise
    except Exception as error:
        # torch, pickle and zipfile raise a dozen types; the reader needs just one.
        raise CheckpointError(f"{path}: no readable weights: {error}") from error
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path}: holds no weights by name, as a state dict does")
    return content


def _torch(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f"reading {path.name} needs the package safetensors: pip install safetensors") from error
    return load_file(path)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
