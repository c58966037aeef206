"""What trains a trial: takes a session, trains on it, and has the history of its epochs afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpo.trial.forks import only_in
from hpo.trial.session import Session, TrainingStoppedError
from trainer.data.random_state import seed_all
from trainer.recorded import Metrics
from trainer.state import PAUSED


class TrainingCode(Protocol):
    """Trains one attempt at one trial."""

    @property
    def history(self) -> Sequence[Metrics]:
        """The metrics of each finished epoch so far, those of attempts that it resumes included."""
        ...

    @property
    def prediction(self) -> Mapping[str, Any] | None:
        """What the trial was predicted to end at, see `hpo.study.outcome.prediction_record`; None: nothing."""
        ...

    def train(self, session: Session) -> str | None:
        """Train to the end, or up to a request to stop.

        Returns:
            Why it ended early, ``"diverged"``, ``"pruned"``, ``"paused"`` and ``"interrupted"`` among others
            (`trainer.state`); None where it ran to its end.

        Raises:
            optuna.TrialPruned: The trial is pruned.
            LeaseLostError: Another attempt has the trial.
            BaseException: Whatever the study's code raises.
        """
        ...

    def smaller(self) -> int | None:
        """After the device's memory ran out: parts for each batch next time; None where it can't be cut."""
        ...


@dataclass
class FunctionCode:
    """A function that trains by itself, on what a session offers.

    The global random generators are seeded with the session's seed before it is called.

    Attributes:
        function: Takes the session; its return value is not used.
    """

    function: Callable[[Session], object]
    _session: Session | None = None

    @property
    def history(self) -> Sequence[Metrics]:
        """The reported epochs."""
        return [] if self._session is None else self._session.history

    @property
    def prediction(self) -> None:
        """None: only the Trainer's callbacks predict."""

    def train(self, session: Session) -> str | None:
        """Call the function; see `TrainingCode`."""
        self._session = session
        seed_all(session.seed)
        try:
            with only_in(session.process), contextlib.suppress(TrainingStoppedError):
                self.function(session)
        finally:
            try:
                session.finish()
            finally:
                session.reports.close()
        has_ended = session.max_epochs and session.epoch >= session.max_epochs
        return None if session.stop_reason == PAUSED and has_ended else session.stop_reason

    def smaller(self) -> None:
        """None: its batches are its own."""
