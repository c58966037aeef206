"""Identifies the training of a folder of final training, so that only the same training resumes there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hpo.config.code import code_identity
from hpo.config.identity import identity
from hpo.config.spec import StudySpec
from hpo.study.folders import CHECKPOINTS
from hpo.study.lineage import Stage
from hpo.study.outcome import finite
from trainer.checkpoint.files import list_checkpoints
from trainer.files import replacing

#: The file in a training's folder that identifies the training.
STAMP_FILE: Final = "run.json"


def final_config(spec: StudySpec, params: Mapping[str, Any], epochs: int | None) -> dict[str, Any]:
    """The whole config of a final training.

    It is resolved with these epochs, so that a schedule written as ``${trainer.max_epochs}`` spans them; lengths
    that depend on the data are still without their numbers.
    """
    length = {} if epochs is None else {"trainer.max_epochs": epochs, "trainer.max_steps": None}
    return spec.resolve({**params, **length})


def stamp_of(
    spec: StudySpec, stages: Sequence[Stage], epochs: int | None, begun: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """A hash of everything that a training's result depends on, except machine and packages.

    Args:
        spec: The study file.
        stages: The stages of the training, in order.
        epochs: Passes over the data to train; None: as long as ``trainer`` says.
        begun: The checkpoint that the training starts from; None: from scratch.
    """
    *lineage, own = stages
    parts = {
        "config": identity(final_config(spec, own.params, epochs)),
        "lineage": [(identity(final_config(spec, stage.params, epochs)), stage.until) for stage in lineage],
        "seed": own.seed,
        "data_seed": spec.seed,
        "goal": (spec.study.metric, spec.study.direction),
        "code": dict(code_identity(spec).files),
    }
    if begun is not None:
        parts["begun"] = begun["state"]["history"]
    return {"identity": hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()}


def clear(folder: Path) -> None:
    """Remove an earlier training's checkpoints and stamp, before another training uses the folder."""
    (folder / STAMP_FILE).unlink(missing_ok=True)
    for file in list_checkpoints([folder / CHECKPOINTS]):
        file.path.unlink()


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file in one step; numbers that are not finite become null."""
    with replacing(path) as file:
        file.write(json.dumps(finite(data), indent=2, allow_nan=False) + "\n")
