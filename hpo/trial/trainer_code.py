"""The Trainer as training code: built from the trial's config, bridged to its session, resumed, and fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from hpo.errors import StudyError
from hpo.study.outcome import prediction_record
from hpo.trial.builder import Builder, RunPlace
from hpo.trial.micro_batch import MicroBatches, cut, finer
from hpo.trial.pruner_callback import PrunerCallback
from hpo.trial.session import Session
from hpo.trial.watch import Watch
from trainer import Trainer
from trainer.callbacks import LossPrediction
from trainer.recorded import Metrics
from trainer.state import CONTINUED


@dataclass
class TrainerCode:
    """Trains with a Trainer; see `hpo.trial.training_code.TrainingCode`.

    Attributes:
        builder: Builds the trainer.
    """

    builder: Builder
    _session: Session | None = None
    _trainer: Trainer | None = None

    @property
    def history(self) -> Sequence[Metrics]:
        """The trainer's history, which its checkpoints hold."""
        return [] if self._trainer is None else self._trainer.state.history

    @property
    def returned(self) -> None:
        """None: its best epoch counts."""

    @property
    def prediction(self) -> Mapping[str, Any] | None:
        """Predictions of the final loss beside what it came to, where the trainer predicts."""
        if self._trainer is None:
            return None
        state, whole = self._trainer.state, self._trainer.finished
        found = None
        for callback in self._trainer.callbacks.callbacks:
            if isinstance(callback, LossPrediction):
                record = prediction_record(
                    state.history, callback.metric, state.max_epochs, whole=whole, after=state.inherited
                )
                found = record or found
        return found

    def train(self, session: Session) -> str | None:
        """Build the trainer at the point where the trial last was, and fit it."""
        self._session = session
        trainer, data = self._prepared(session)
        reason = trainer.fit(data["train"], data["val"]).stop_reason
        # Asked for too late: nothing is left to train.
        return None if reason in CONTINUED and trainer.finished else reason

    def smaller(self) -> int | None:
        """Parts for each batch that are smaller than those of this run; None where the config can't cut them."""
        if self._trainer is None or self._session is None:
            return None
        config = self._session.config
        ready = isinstance(self.builder.data(config)["train"], DataLoader)
        return None if ready else finer(config, self._session.parts)

    def _prepared(self, session: Session) -> tuple[Trainer, Mapping[str, Any]]:
        data = self.builder.data(session.config)
        config = self.builder.laid_out(session.config, data)
        if config != session.config:
            session.keep_config(config)
        trainer = self._trainer = self.builder.trainer(
            cut(config, session.parts),
            RunPlace(session.folder, f"trial-{session.number}", session.params),
            seed=session.seed,
            device=session.device,
            bridge=[Watch(session), MicroBatches(session.parts), PrunerCallback(session)],
        )
        found = session.checkpoints.newest()
        if found is not None:
            trainer.load_state_dict(found[1])
        elif (checkpoint := session.checkpoints.of_parent()) is not None:
            _fork(trainer, checkpoint)
        return trainer, data


def _fork(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Begin with another trial's checkpoint, with this one's parameters."""
    try:
        trainer.load_state_dict(checkpoint, fork=True)
    except (RuntimeError, ValueError) as error:
        raise StudyError(
            f"the checkpoint of its parent does not fit the parameters of this fork: {error}\n"
            "  fix: leave what changes the model out of `study.scheduler.perturb`"
        ) from error
