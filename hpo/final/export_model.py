"""Writes a trial's model to a file: its weights, or the whole model by torch.export, with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from hpo.config.code import code_identity
from hpo.config.file_paths import RENAME, no_text
from hpo.config.targets import instantiate
from hpo.errors import InputError, StudyError
from hpo.final.model_card import code_folder, model_card
from hpo.final.models import BestWeights, best_weights, model_with
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder, make_batching
from trainer import BatchOptions
from trainer.callbacks.save_pretrained import has_save_pretrained, is_free, write_pretrained
from trainer.data.batches import make_batches
from trainer.data.sets import first_set
from trainer.files import aside_name, aside_of_folder, replacing
from trainer.step.manual import as_evaluated
from trainer.step.supervised import SupervisedStep

_CPU: Final = torch.device("cpu")
_EXAMPLE: Final = 8  # samples; torch.export treats sizes of 0 and 1 as constants
_SMALLEST: Final = 2


@dataclass(frozen=True)
class Example:
    """The arguments of an example call of a model.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        size: The number of samples in the batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: int

    def is_batched(self, value: Any) -> bool:
        """Whether this is a tensor whose first dimension is the batch's."""
        return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == self.size

    def cut(self, size: int) -> Example:
        """A copy with only the first ``size`` samples."""

        def shorter(value: Any) -> Any:
            return value[:size] if self.is_batched(value) else value

        args, kwargs = pytree.tree_map(shorter, (self.args, self.kwargs))
        return Example(args, kwargs, size)


def check_export_path(path: Path) -> None:
    """Refuse a path that no model can be written to.

    Raises:
        InputError: Its suffix is not a format's, it is a folder, or its bytes are not text.
    """
    if path.suffix and path.suffix not in _WRITERS:
        fix = (
            "end it in .safetensors or .pt (the weights), or in .pt2 (the whole model, by torch.export); a name "
            "without a suffix is a folder for `from_pretrained`"
        )
        raise InputError("has a suffix that names no format", path="--export", value=str(path), fix=fix)
    if not path.suffix and not is_free(path):
        fix = "name a folder that is not there yet"
        raise InputError("holds other things than a model", path="--export", value=str(path), fix=fix)
    if (problem := no_text(path.absolute())) is not None:
        raise InputError(problem, path="--export", value=str(path), fix=RENAME)
    if path.suffix and path.is_dir():
        raise InputError("is a folder", path="--export", value=str(path), fix="name a file in it")


def export_model(opened: OpenStudy, which: str, path: Path, *, command: str) -> dict[str, Any]:
    """Write the model of a trial's best epoch, and a card beside it, ``<file>.md``.

    For weights, the study's own modules are copied to ``<file>.code``, so that the three can be moved together.

    The suffix selects the format: ``.safetensors`` and ``.pt`` hold the weights, ``.pt2`` the whole model as
    torch.export traces it in eval mode, for batches of any size. Without a suffix, the model's own
    ``save_pretrained`` writes a folder for Hugging Face's ``from_pretrained``. The file is read back and compared
    with the model before it replaces an earlier one.

    Args:
        opened: The study.
        which: ``best`` or a trial's number.
        path: The file or folder; missing folders above it are created.
        command: The command that the card names as its origin.

    Returns:
        ``trial``, ``seed``, ``epoch``, ``parameters`` (their number), ``path``, ``card``, and ``warning`` if
        the trial ran under other code or another config, else None.

    Raises:
        InputError: See `check_export_path`.
        StudyError: There is no such trial, it has no weights, or they can't be written; or torch.export can't
            trace the model.
    """
    check_export_path(path)
    found = best_weights(opened, which)
    model = model_with(opened.spec, found)
    path, card = path.absolute(), path.absolute().with_name(f"{path.name}.md")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix:
            with _aside(path) as aside:
                _WRITERS[path.suffix](opened, found, model, aside)
        else:
            _write_pretrained(found, model, path)
        if path.suffix != ".pt2":
            _copy_code(opened, code_folder(path))
        with replacing(card) as file:
            file.write(model_card(opened, found, model, path, command))
    except OSError as error:
        problem = f"{path}: the model can't be written: {error.strerror or error}"
        raise StudyError(f"{problem}\n  fix: free some room, or choose another folder") from error
    return {
        "trial": found.trial,
        "seed": found.seed,
        "epoch": found.epoch,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "path": str(path),
        "card": str(card),
        "warning": found.warning(opened.spec) or None,
    }


def _copy_code(opened: OpenStudy, folder: Path) -> None:
    """Copy the study's own modules, replacing an earlier copy: weights are of no use without the model's code."""
    own = opened.spec.folder
    with aside_of_folder(folder) as aside:
        aside.mkdir()
        for name in code_identity(opened.spec).files:
            source = own / name
            # Not packages in development: they are installed under their own names.
            if source.suffix == ".py" and source.is_file():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A temporary file that replaces ``path`` at the end of the block, or is removed after an error."""
    aside = aside_name(path, path.suffix)  # torch.export needs the suffix
    try:
        aside.touch()
        mode = aside.stat().st_mode
        yield aside
        aside.chmod(mode)  # safetensors creates files that only their owner can read
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _write_safetensors(opened: OpenStudy, found: BestWeights, model: nn.Module, path: Path) -> None:
    from safetensors.torch import load_model, save_model

    facts = {
        "format": "pt",
        "study": opened.spec.study.name,
        "trial": found.trial,
        "seed": found.seed,
        "epoch": found.epoch,
        "model": found.config["model"]["_target_"],
        "params": json.dumps(opened.spec.values(found.params)),
        "metrics": json.dumps(dict(found.metrics)),
    }
    again = model_with(opened.spec, found)
    try:
        # Unlike save_file it accepts weights that two layers share, and stores them once.
        save_model(model, str(path), metadata={name: str(fact) for name, fact in facts.items()})
        load_model(again, str(path))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        fix = "export to .pt, which holds whatever a state dict holds"
        raise StudyError(f"safetensors can't hold this model's weights: {error}\n  fix: {fix}") from error
    _refuse_other_weights(model.state_dict(), again.state_dict())


def _write_weights(opened: OpenStudy, found: BestWeights, model: nn.Module, path: Path) -> None:  # noqa: ARG001
    torch.save(dict(model.state_dict()), path)
    _refuse_other_weights(model.state_dict(), torch.load(path, map_location="cpu", weights_only=True))


def _write_pretrained(found: BestWeights, model: nn.Module, path: Path) -> None:
    if not has_save_pretrained(model):
        raise StudyError(
            f"{found.config['model']['_target_']} has no save_pretrained, which writes a folder\n"
            "  fix: export to .safetensors, or derive it from huggingface_hub.PyTorchModelHubMixin"
        )
    try:
        write_pretrained(model, path, verify=True)
    except ValueError as error:
        raise StudyError(str(error)) from error


def _refuse_other_weights(written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    for name, value in written.items():
        if isinstance(value, Tensor) and not torch.equal(value.nan_to_num(), read[name].nan_to_num()):
            raise StudyError(f"the file was read back with other numbers in {name}; is the disk sound?")


def _write_exported(opened: OpenStudy, found: BestWeights, model: nn.Module, path: Path) -> None:
    example = example_of(Builder(opened.spec), found.config, model)
    batch = torch.export.Dim("batch")
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for value in pytree.tree_leaves((example.args, example.kwargs)):
        if example.is_batched(value):
            shapes[value] = {0: batch}
    dynamic = shapes.dynamic_shapes(model, example.args, example.kwargs)  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad():
            program = torch.export.export(model, example.args, example.kwargs, dynamic_shapes=dynamic)
    except Exception as error:
        # torch raises a dozen types for models that it can't trace.
        raise _not_exportable(found, error) from error
    torch.export.save(program, path)
    again = torch.export.load(path).module()
    for each in (example, example.cut(_SMALLEST)):
        with torch.no_grad():
            _refuse_other_outputs(model(*each.args, **each.kwargs), again(*each.args, **each.kwargs))


def _not_exportable(found: BestWeights, error: BaseException) -> StudyError:
    name, said = found.config["model"]["_target_"], str(error).partition("\nThe error above")[0].strip()
    lines = "\n".join(f"    {line}" for line in said.splitlines()[:12])
    return StudyError(
        f"torch.export can't see through {name}: {type(error).__name__}\n{lines}\n"
        "  fix: change the model's forward there (a branch on values, a batch size written as a number), or "
        "export the weights to .safetensors"
    )


def _refuse_other_outputs(expected: Any, found: Any) -> None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except (AssertionError, TypeError) as error:
        raise StudyError(
            f"the exported model gives other outputs than the model: {error}\n"
            "  fix: see that its forward draws no random numbers and keeps no state, or export to .safetensors"
        ) from error


def example_of(builder: Builder, config: Mapping[str, Any], model: nn.Module) -> Example:
    """The arguments with which the study's step calls the model, for a batch of its validation data.

    Args:
        builder: Has the data.
        config: The trial's whole config.
        model: The model, on the CPU.

    Raises:
        StudyError: The step does not call the model, or calls it with a PackedSequence; or batches have fewer than
            two samples.
    """
    collate = make_batching(builder.resolver, config["loader"]).collate_fn
    options = BatchOptions(eval_batch_size=_EXAMPLE, collate_fn=collate)
    batch = next(iter(make_batches(first_set(builder.data(config)["val"]), options, _CPU, train=False).epoch(0)))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    step: Callable[..., Any] = SupervisedStep(lambda _, __: torch.zeros(()))
    if config["step"] is not None:
        step = as_evaluated(instantiate(builder.resolver, config["step"], _as_function=True))
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            step(model, batch)
    finally:
        hook.remove()
    if not calls:
        raise StudyError(
            "torch.export needs to see the model called, and the study's step calls only parts of it\n"
            "  fix: export the weights to .safetensors"
        )
    args, kwargs = calls[0]
    if any(map(_is_packed, pytree.tree_leaves((args, kwargs), is_leaf=_is_packed))):
        # Its tensors are in time order, and none has the batch as its first dimension.
        fix = "export the weights to .safetensors"
        raise StudyError(f"torch.export takes no PackedSequence, and the model is called with one\n  fix: {fix}")
    size = _batch_size((args, kwargs))
    if size < _SMALLEST:
        fix = "let the validation data give larger batches, or export to .safetensors"
        raise StudyError(f"torch.export needs batches of two samples or more\n  fix: {fix}")
    return Example(args, kwargs, size)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _batch_size(inputs: Any) -> int:
    sizes = (value.size(0) for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.dim())
    return next(sizes, 0)


_WRITERS: Final[Mapping[str, Callable[[OpenStudy, BestWeights, nn.Module, Path], None]]] = {
    ".safetensors": _write_safetensors,
    ".pt": _write_weights,
    ".pt2": _write_exported,
}
