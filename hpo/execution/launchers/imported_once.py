"""What the fork server imports for one study: libraries of its code and of its trackers that can be forked."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from hpo.config.schema import FREE_SECTIONS
from hpo.config.spec import StudySpec

#: Libraries known to start no thread, no CUDA and no connection when they are imported. What a study imports of
#: them is imported once, ahead of the workers; any other library each worker imports by itself.
FORKABLE: Final = frozenset({"pytorch_optimizer", "schedulefree", "scipy", "sklearn"})

#: Their names, for `hpo.execution.launchers.study_imports`.
NAMES_VARIABLE: Final = "HPO_IMPORTED_ONCE"

#: Arrow, which pandas imports, starts a thread that gives memory back; a process with a thread can't be forked for
#: its trials. Without the thread the memory is given back as more is asked for.
_ARROW: Final = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class Tracker(NamedTuple):
    """What a tracker's callback would import in the process of each trial.

    Attributes:
        modules: Those of its library, with those that it imports at its first use.
        environment: Variables that the library reads as it is imported, and the callback's values for them.
    """

    modules: tuple[str, ...]
    environment: Mapping[str, str] = {}


#: By the name of its callback in a study file. They take 0.2 to 4 seconds of a processor.
TRACKERS: Final[Mapping[str, Tracker]] = {
    "comet": Tracker(("comet_ml",), {"COMET_DISABLE_AUTO_LOGGING": "1", "COMET_ERROR_TRACKING_ENABLE": "false"}),
    "mlflow": Tracker(
        ("mlflow", "mlflow.store.tracking.rest_store", "mlflow.store.tracking.sqlalchemy_store"),
        {"MLFLOW_DISABLE_TELEMETRY": "true"},
    ),
    "tensorboard": Tracker(("torch.utils.tensorboard",)),
    "wandb": Tracker(("wandb", "wandb.sdk.launch", "pandas")),
}


def environment_of(spec: StudySpec) -> dict[str, str]:
    """The variables with which the study's fork server starts; those that a person has set stay."""
    trackers = [
        tracker for name, tracker in TRACKERS.items() if spec.config.callbacks.get(name, False) is not False
    ]
    names = forkable_imports(spec).union(*(tracker.modules for tracker in trackers))
    usual = dict(_ARROW)
    for tracker in trackers:
        usual |= tracker.environment
    chosen = {name: os.environ.get(name, value) for name, value in usual.items()}
    return chosen | {NAMES_VARIABLE: " ".join(sorted(names))}


def forkable_imports(spec: StudySpec) -> set[str]:
    """The modules of forkable libraries that the study's code imports or its targets name; nothing is run."""
    found = set(_target_roots([getattr(spec.config, section) for section in FREE_SECTIONS]))
    found |= set(_target_roots(spec.base_config()["search_space"]))
    for file in spec.folder.glob("*.py"):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, OSError):  # said when the study is checked
            found |= set(_imported(ast.parse(file.read_bytes())))
    return {name for name in found if name.partition(".")[0] in FORKABLE}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _target_roots(node: Any) -> Iterator[str]:
    """First parts of all texts that look like import paths."""
    if isinstance(node, str) and "." in node:
        yield node.partition(".")[0]
    elif isinstance(node, dict):
        for value in node.values():
            yield from _target_roots(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _target_roots(value)
