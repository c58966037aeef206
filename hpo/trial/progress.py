"""How far the training of a trial is, for those who watch it."""

from __future__ import annotations

from typing import Protocol

from trainer.recorded import Metrics


class RunProgress(Protocol):
    """How far a trial's training is."""

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        ...

    @property
    def max_epochs(self) -> int:
        """Epochs of a run to the end; 0 where that is not known."""
        ...

    @property
    def history(self) -> list[Metrics]:
        """The metrics of each finished epoch."""
        ...
