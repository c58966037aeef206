"""SavePretrained: saves a finished run's model as a folder that Hugging Face's `from_pretrained` reads."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView
from trainer.files import aside_of_folder
from trainer.state import DIVERGED, ERROR, PRUNED
from trainer.step.parts import bare_model

DTypeName = Literal["float32", "bfloat16", "float16"]
_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

logger = logging.getLogger(__name__)


class SavePretrained(Callback):
    """Saves the model with its own ``save_pretrained`` when the run is over, for ``from_pretrained``.

    That is a method of the models of transformers, diffusers, PEFT, timm's hub models and all that derive from
    huggingface_hub's ``PyTorchModelHubMixin``. The folder is written aside and put in the place of an earlier one
    when it is whole. It happens in ``teardown``, after `BestWeights` has put the best weights back: with that
    callback it is the best model, else the last. A run that was interrupted, failed, was pruned, or whose weights
    are not finite writes none. A tokenizer is saved into the same folder, after the fit, by its own method.

    Example::

        Trainer(model, optimizer, step=step, callbacks=[BestWeights(), SavePretrained("model")])

        callbacks: {best_weights: true, save_pretrained: {dtype: bfloat16}}

    Args:
        folder: Folder to save to. For a model without ``save_pretrained`` nothing is written, with a warning.
        dtype: Type of the weights in the files: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None: as they are.
        verify: Whether to read the folder back with ``from_pretrained`` and compare it before it is put in place.

    Raises:
        ValueError: ``dtype`` is none of these; or what was read back differs.
        FileExistsError: The folder holds other things than an earlier model.
        OSError: The folder can't be written.
    """

    priority = 96
    rank_zero_only = True
    needs_whole_model = "saves the model in rank 0"
    transient = ("_fitting",)

    def __init__(
        self,
        folder: Path | str,
        dtype: DTypeName | None = None,
        *,
        verify: bool = False,
    ) -> None:
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}: give one of {', '.join(_DTYPES)}")
        self.folder = Path(folder)
        self.dtype = None if dtype is None else _DTYPES[dtype]
        self.verify = verify
        self._fitting = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Check now, rather than after the training, that the folder can be written."""
        if not is_free(self.folder):
            raise FileExistsError(f"{self.folder} holds other things than a model: give another folder")
        self._fitting = has_save_pretrained(bare_model(trainer.model))
        if not self._fitting:
            logger.warning(
                "%s has no save_pretrained (huggingface_hub.PyTorchModelHubMixin gives it one): %s is not written",
                type(bare_model(trainer.model)).__name__,
                self.folder,
            )

    def teardown(self, trainer: TrainerView) -> None:
        """Save the model of a fit that has finished."""
        fitted, self._fitting = self._fitting, False
        state, model = trainer.state, bare_model(trainer.model)
        inside = state.batch_index and state.stop_reason != DIVERGED
        if not fitted or inside or state.stop_reason in {ERROR, PRUNED} or trainer.plan.broken_off(state):
            return
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            logger.warning("%s is not written: the weights are not finite", self.folder)
        elif state.epoch:
            cast = model if self.dtype is None else deepcopy(model).to(self.dtype)
            write_pretrained(cast, self.folder, verify=self.verify)
            logger.info("the model is in %s, for %s.from_pretrained", self.folder, type(model).__name__)


def has_save_pretrained(model: nn.Module) -> bool:
    """Whether a model has ``save_pretrained``, so that Hugging Face's ``from_pretrained`` can read it."""
    return callable(getattr(model, "save_pretrained", None))


def is_free(folder: Path) -> bool:
    """Whether a model may be saved there: the folder is missing, empty, or holds only an earlier model."""
    if not folder.exists():
        return True
    found = list(folder.iterdir()) if folder.is_dir() else [folder]
    weights = any(path.suffix in {".safetensors", ".bin"} for path in found)
    return not found or (weights and folder.is_dir() and all(path.is_file() for path in found))


def write_pretrained(model: nn.Module, folder: Path, *, verify: bool) -> None:
    """Save a model by its ``save_pretrained`` to a temporary folder, which then replaces ``folder``.

    Args:
        model: A model with that method.
        folder: The folder to save to.
        verify: Whether to read the model back and compare it before the folder is replaced.

    Raises:
        FileExistsError: The folder holds something other than an earlier model.
        ValueError: The model that was read back differs.
        OSError: The folder can't be written.
    """
    if not is_free(folder):
        raise FileExistsError(f"{folder} holds other things than a model: give another folder")
    saving: Any = model
    with aside_of_folder(folder) as aside:
        saving.save_pretrained(str(aside))
        if verify:
            _compare(model, aside)


def _compare(model: nn.Module, folder: Path) -> None:
    """Refuse a folder from which the model is read back with other values."""
    kind: Any = type(model)
    again: nn.Module = kind.from_pretrained(str(folder))
    read = again.state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and not torch.equal(value.cpu(), read[name].to("cpu", value.dtype)):
            raise ValueError(f"{folder} was read back with other numbers in {name}: is the disk sound?")
