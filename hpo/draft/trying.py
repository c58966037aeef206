"""Builds a model with suggested arguments, sends a batch through it, and keeps the values that work."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, Final

import torch
from torch import Tensor, nn

from hpo.draft.arguments import FILL_IN, Argument, Arguments
from hpo.draft.data import Look
from hpo.draft.losses import Loss, farther, loss_for
from trainer.error_text import error_text

_COMBINATIONS: Final = 64
#: The time limit in seconds for trying values; `hpo check` finds the rest.
_PATIENCE: Final = 10.0


@dataclass
class Fit:
    """A model that was tried on its data.

    Attributes:
        loss: The loss for it, or why there is none.
        notes: Notes for the person.
    """

    loss: Loss | str
    notes: list[str] = field(default_factory=list)


def fit_to_data(build: Callable[..., nn.Module], arguments: Arguments, look: Look | None) -> Fit:
    """Set the arguments that follow the data, and remove searched values that do not work.

    Args:
        build: Builds the model.
        arguments: Its arguments, changed in place.
        look: The data's properties; None if not known.
    """
    following = [item for item in arguments if item.role is not None]
    if look is None or look.inputs is None:
        why = "the data are not known" if look is None else f"a batch is {look.batch}, and not (inputs, targets)"
        return Fit(why)
    if set(arguments.missing) - {item.name for item in following}:
        chosen, fit = _likeliest(following, look), Fit("the model needs arguments that are not known")
    else:
        chosen, fit = _best(build, arguments, following, look)
    for item in following:
        value = chosen.get(item.name)
        if value is not None and (item.required or value != item.default):
            arguments.give(item.name, value=value, note="as the data have it")
    if isinstance(fit.loss, Loss):
        fit.notes += _without_failing(build, arguments, look)
    return fit


def _best(
    build: Callable[..., nn.Module], arguments: Arguments, following: list[Argument], look: Look
) -> tuple[dict[str, Any], Fit]:
    """The first values of the following arguments with which a loss fits, else with which the model runs."""
    running: tuple[dict[str, Any], Fit] | None = None
    failed: BaseException | None = None
    options = [_candidates(item, look) for item in following]
    for values in islice(product(*options), _COMBINATIONS):
        given = {item.name: value for item, value in zip(following, values, strict=True) if value is not None}
        try:
            outputs, larger = _outputs(build, arguments.values(**given), look)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - code of the person's
            failed = failed or error
            continue
        fit = Fit(loss_for(outputs, look, larger))
        if isinstance(fit.loss, Loss):
            return given, fit
        running = running or (given, fit)
    if running is not None:
        return running
    why = "the model does not run on a batch"
    text = "" if failed is None else error_text(failed).strip().partition("\n")[0]
    return _likeliest(following, look), Fit(why, [f"{why}: {text}"])


def _likeliest(following: list[Argument], look: Look) -> dict[str, Any]:
    return {item.name: _candidates(item, look)[0] for item in following}


def _outputs(build: Callable[..., nn.Module], values: dict[str, Any], look: Look) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        model = build(**{name: value for name, value in values.items() if value != FILL_IN}).eval()
        far = farther(look.inputs)
        return model(look.inputs), None if far is None else model(far)


def _candidates(item: Argument, look: Look) -> list[Any]:
    """The values to try for an argument that follows the data, the likeliest first; None is its own default."""
    known: list[Any] = list(dict.fromkeys(value for value in _of_data(item, look) if value))
    if item.required:
        return known or [FILL_IN]
    return [*known, None] if item.role == "outputs" else [None, *known]


def _of_data(item: Argument, look: Look) -> list[int | None]:
    inputs, targets = look.inputs, look.targets
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()
    if item.role == "outputs":
        wide = targets.shape[1] if isinstance(targets, Tensor) and targets.ndim > 1 else 1
        return [look.classes, 1] if look.classes is not None else [wide]
    if item.role == "tokens":
        return [look.tokens]
    if item.role == "length":
        return [*shape[:1]] if look.tokens else [*shape[-2:-1], *shape[-1:]]
    if not shape:
        return []
    flat, last, first = int(torch.Size(shape).numel()), shape[-1], shape[0]
    return [first, last, flat] if item.role == "channels" else [last, flat, first]


def _without_failing(build: Callable[..., nn.Module], arguments: Arguments, look: Look) -> list[str]:
    """Try each searched argument at its ends or choices; remove values that fail, and return notes about them."""
    notes, end = [], time.monotonic() + _PATIENCE
    for item in [item for item in arguments if item.entry]:
        entry = dict(item.entry or {})
        values = entry.get("choices") or [entry["low"], entry["high"]]
        tried = [value for value in values if time.monotonic() < end]
        failing = [value for value in tried if _fails(build, arguments.values(**{item.name: value}), look)]
        if not failing:
            continue
        left = [value for value in entry.get("choices", ()) if value not in failing]
        arguments.give(item.name, entry={**entry, "choices": left} if len(left) > 1 else None)
        if not isinstance(failing[0], str):  # no note on activations: their names are guesses
            notes.append(
                f"not searched, since the model fails with it: {item.name}={', '.join(map(str, failing))}"
            )
    return notes


def _fails(build: Callable[..., nn.Module], values: dict[str, Any], look: Look) -> bool:
    try:
        _outputs(build, values, look)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - code of the person's
        return True
    return False
