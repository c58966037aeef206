"""The folder and the name of one training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.study.folders import CHECKPOINTS


@dataclass(frozen=True)
class RunPlace:
    """The folder, name and parameters of one training run.

    Attributes:
        folder: Folder for its files.
        name: Its name in W&B, MLflow and other trackers.
        params: The trial's parameters.
    """

    folder: Path
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / CHECKPOINTS
