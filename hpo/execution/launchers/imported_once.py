"""Chooses what the fork server imports for a study: libraries of its code and its trackers that can be forked."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from hpo.config.schema import FREE_SECTIONS
from hpo.config.spec import StudySpec

#: Libraries known to start no thread, no CUDA and no connection when they are imported. What a study imports from
#: them, the fork server imports once; every other library is imported by each worker.
FORKABLE: Final = frozenset({"pytorch_optimizer", "schedulefree", "scipy", "sklearn"})

#: Environment variable with the names of the modules to import, for `hpo.execution.launchers.study_imports`.
NAMES_VARIABLE: Final = "HPO_IMPORTED_ONCE"

#: Arrow, which pandas imports, starts a thread that frees memory, and a process with a second thread can't be
#: forked for trials. Without the thread, memory is freed when more is allocated.
_ARROW: Final = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class Tracker(NamedTuple):
    """What a tracker's callback would otherwise import in each trial's process.

    Attributes:
        modules: The modules of its library, including those that it imports at its first use.
        environment: Variables that the library reads when it is imported, with the callback's values for them.
    """

    modules: tuple[str, ...]
    environment: Mapping[str, str] = {}


#: Trackers by the name of their callback in a study file. Importing one takes 0.2 to 4 seconds of processor time.
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
    """The environment variables with which the study's fork server starts; values that a person has set stay."""
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
    """The modules of forkable libraries that the study's code imports or its targets name; no code is run."""
    found = set(_target_roots([getattr(spec.config, section) for section in FREE_SECTIONS]))
    found |= set(_target_roots(spec.base_config()["search_space"]))
    for file in spec.folder.glob("*.py"):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, OSError):  # the checks report it
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
