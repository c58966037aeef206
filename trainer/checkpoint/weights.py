"""load_weights: loads the weights in a file into a model before training, all of them or those that fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.files import CheckpointError
from trainer.checkpoint.versions import versioned
from trainer.distributed.tensor_shards import load_model
from trainer.step.parts import bare_model

logger = logging.getLogger(__name__)

# The most names that a message lists; `LoadedWeights` has them all.
_SHOWN = 5


@dataclass(frozen=True)
class LoadedWeights:
    """Which weights of a file were loaded into a model.

    Attributes:
        loaded: Names of the weights that were loaded.
        missing: Names that the model has and the file lacks; these weights keep their values.
        unexpected: Names that the file has and the model lacks.
        mismatched: Weights with another shape in the file, as ``name [2, 3] for [2, 4]``; they keep their values.
    """

    loaded: Sequence[str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    mismatched: Sequence[str]

    @property
    def skipped(self) -> str:
        """A text on what was not loaded; empty if everything was."""
        parts = (
            ("not in the file", self.missing),
            ("not in the model", self.unexpected),
            ("of another shape", self.mismatched),
        )
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def load_weights(model: nn.Module, path: Path | str, *, strict: bool = True) -> LoadedWeights:
    """Load weights into a model before it is trained; of a checkpoint only the weights.

    Args:
        model: Its parameters and buffers are changed in place.
        path: A checkpoint or merged weights of this package, a file of ``torch.save(model.state_dict(), …)``, or
            a ``.safetensors`` file.
        strict: Whether all weights must fit by name and shape. If False, those that fit are loaded, and a warning
            lists the others.

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointError: The file can't be read, or holds no weights; the text says what it holds.
        ValueError: A weight does not fit, or with ``strict=False`` none does. The model is unchanged.
    """
    bare = bare_model(model)
    path, own = Path(path), bare.state_dict()
    found = _read(path)
    same = [name for name in own if name in found]
    fits = [name for name in same if _shape(own[name]) == _shape(found[name])]
    tied = _tied(bare, fits)
    outcome = LoadedWeights(
        fits,
        [name for name in own if name not in found and name not in tied],
        [name for name in found if name not in own],
        [f"{name} {_shape(found[name])} for {_shape(own[name])}" for name in same if name not in set(fits)],
    )
    if outcome.skipped and (strict or (own and not fits)):
        raise ValueError(_of_another_model(path, outcome, own, found))
    load_model(bare, versioned({name: found[name] for name in fits}, found), strict=False)
    if outcome.skipped:
        logger.warning("%d of %d weights come from %s; %s", len(fits), len(own), path, outcome.skipped)
    return outcome


def _tied(model: nn.Module, fits: Sequence[str]) -> set[str]:
    """Names of tensors that are also in ``fits`` under another name: safetensors writes only one of tied names."""
    own = model.state_dict(keep_vars=True)
    filled = {id(own[name]) for name in fits}
    return {name for name, value in own.items() if isinstance(value, Tensor) and id(value) in filled}


def _of_another_model(path: Path, outcome: LoadedWeights, own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The text of the error: what does not fit, and what to do about it."""
    fits = (
        f"{len(outcome.loaded)} of its {len(found)} weights fit" if outcome.loaded else "none of its weights fits"
    )
    return f"{path} holds another model: {fits}; {outcome.skipped}; {_fix(outcome, own, found)}"


def _fix(outcome: LoadedWeights, own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """What to do about weights of another model: rename them, make that model, or take those that fit."""
    for name in outcome.unexpected:
        prefix = name[: -len(same)] if (same := _end_of(name, own)) else ""
        if prefix and all(each.startswith(prefix) for each in found):
            return f"every name in it begins with `{prefix}`: save it without, or the model that has that part"
    for name in outcome.missing:
        prefix = name[: -len(same)] if (same := _end_of(name, found)) else ""
        if prefix and all(each.startswith(prefix) for each in own):
            return f"every name in the model begins with `{prefix}`: save the file with it, or load the part"
    if outcome.loaded:
        return "make the model with the arguments that the file's was made with; strict=False takes those that fit"
    return "name a file of this model"


def _end_of(name: str, names: Mapping[str, Any]) -> str:
    """The longest of ``names`` that ``name`` ends with after a dot; empty if there is none."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(1, len(parts)))
    return next((end for end in ends if end in names), "")


def _read(path: Path) -> Mapping[str, Any]:
    """The weights in a file, by name."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no readable weights: there is no such file")
    try:
        content = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    except ImportError:
        raise
    except Exception as error:
        # torch, pickle and zipfile raise a dozen types; the reader needs just one.
        raise CheckpointError(f"{path}: no readable weights: {_unread(error)}") from error
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not _has_weights(content):
        raise CheckpointError(f"{path}: holds no weights by name, as a state dict does, but {_holds(content)}")
    return content


def _has_weights(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())


def _unread(error: Exception) -> str:
    """Why a file can't be read; replaces torch's text, which advises to unpickle anything."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    if found := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
        return f"it holds objects ({found[1]}), which are not unpickled; save `model.state_dict()` instead"
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"it is no file of `torch.save` or safetensors ({why:.80})"


def _holds(content: Any) -> str:
    """What a file without weights holds, and where in it the weights may be."""
    if isinstance(content, Tensor):
        return f"one tensor of shape {list(content.shape)}; save `model.state_dict()`"
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}; save `model.state_dict()`"
    inner = [key for key, value in content.items() if isinstance(value, Mapping) and _has_weights(value)]
    names = _listed([f"`{key}`" for key in content]) or "nothing"
    if inner:
        return f"{names}; its weights are under `{inner[0]}`: save that part alone, or under the name `model`"
    return f"{names}; save `model.state_dict()`"


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
