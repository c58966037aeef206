"""Finds the fix for an argument that a target does not take."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any, Final

from hpo.config.paths import nearest, suggest_name
from hpo.trial.callbacks import CALLBACKS

#: How the names of classes end that can replace each other in a section.
_ALIKE: Final = {"loss": "Loss", "optimizer": "", "lr_scheduler": "LR"}
_FOLLOWS_STUDY: Final = {"monitor": "study.metric", "mode": "study.direction"}
_MOST: Final = 3
#: Arguments of torch by their names in other libraries.
_ALSO_CALLED: Final = {"learning_rate": "lr", "lr_rate": "lr", "l2": "weight_decay", "wd": "weight_decay"}


def fix_of_argument(
    name: str, taken: Collection[str], section: str, target: Callable[..., Any], label: str
) -> str:
    """The fix for an argument that a target does not take.

    Args:
        name: The argument.
        taken: The arguments that the target takes.
        section: The section of the study file.
        target: The class or function.
        label: The target's name in the study file.
    """
    called = _ALSO_CALLED.get(name, name)
    name = called if called in taken else name
    listed = suggest_name(name, taken, what="it takes")
    if section == "callbacks" and label in CALLBACKS and name in CALLBACKS[label].given:
        given = _FOLLOWS_STUDY.get(name)
        source = f"it follows `{given}`" if given else "hpo gives it"
        return f"leave it out: {source}; {suggest_name('', taken, what='it takes')}"
    others = _others_with(name, section, target)
    if not others:
        return listed
    plural = " take it" if len(others) > 1 else " takes it"
    guess = f"; or did you mean `{near}`?" if (near := nearest(name, taken)) else ";"
    return f"{' and '.join(others)}{plural}{guess} {label} takes: {', '.join(taken)}"


def _others_with(name: str, section: str, target: Callable[..., Any]) -> list[str]:
    """Torch's classes for a section that take an argument of this name; empty if they are many."""
    end = _ALIKE.get(section)
    package = ".".join(target.__module__.split(".")[:2])
    module = sys.modules.get(package)
    if end is None or package not in ("torch.nn", "torch.optim") or module is None:
        return []
    source = module.lr_scheduler if section == "lr_scheduler" else module
    kinds = [kind for key, kind in vars(source).items() if inspect.isclass(kind) and key.endswith(end)]
    found = sorted({kind.__name__ for kind in kinds if name in inspect.signature(kind).parameters})
    return found if len(found) <= _MOST else []
