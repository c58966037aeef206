"""Where a training run writes, and what it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.study.folders import CHECKPOINTS


@dataclass(frozen=True)
class RunPlace:
    """Where one training run puts its things and what it is called there.

    Attributes:
        folder: Folder for its files.
        name: Name shown in W&B and MLflow.
        params: The trial's parameters.
    """

    folder: Path
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / CHECKPOINTS
