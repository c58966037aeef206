"""Trains a trial with the Trainer: builds it from the config, connects it to the session, resumes, and fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpo.config.targets import TARGET
from hpo.errors import StudyError
from hpo.study.outcome import prediction_record
from hpo.trial.builder import Builder
from hpo.trial.callbacks import configured
from hpo.trial.checkpoints import Checkpoints
from hpo.trial.micro_batch import MicroBatches, cut, finer
from hpo.trial.peer import Seat
from hpo.trial.peers import Peers
from hpo.trial.place import RunPlace
from hpo.trial.pruner_callback import PrunerCallback
from hpo.trial.session import Session
from hpo.trial.watch import Watch
from trainer import BatchOptions, Callback, Trainer, declared
from trainer.callbacks import LossPrediction
from trainer.data.batches import is_batched, known_length, make_batches
from trainer.recorded import Metrics
from trainer.state import CONTINUED


def read_hooks(builder: Builder) -> None:
    """Read the source code of the callbacks' hooks, which each trial's trainer checks, once for all trials."""
    own = (node[TARGET] for node in configured(builder.spec.resolve()).values() if TARGET in node)
    kinds = [Watch, MicroBatches, PrunerCallback, *map(builder.resolver.resolve, own)]
    declared.read_hooks(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Callback))


@dataclass
class TrainerCode:
    """Trains with a Trainer; see `hpo.trial.training_code.TrainingCode`.

    Attributes:
        builder: Builds the trainer.
        peers: The other processes of a training on several devices; None: there is one device.
    """

    builder: Builder
    peers: Peers | None = None
    _session: Session | None = None
    _trainer: Trainer | None = None

    @property
    def history(self) -> Sequence[Metrics]:
        """The trainer's history, which is also in its checkpoints."""
        return [] if self._trainer is None else self._trainer.state.history

    @property
    def returned(self) -> None:
        """None: its best epoch counts."""

    @property
    def prediction(self) -> Mapping[str, Any] | None:
        """Predictions of the final loss beside the actual one, where the trainer predicts."""
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
        peers = self.peers or Peers(self.builder, ())
        work = _RankWork.of(session)
        with peers.at_work(work, session.folder):
            trainer, data = self._prepared(session, work)
            peers.meet()
            state = trainer.fit(data["train"], data["val"])
        if state.stop_reason in CONTINUED and not trainer.plan.broken_off(state):
            return None  # the request came too late: nothing is left to train
        return state.stop_reason

    def smaller(self) -> int | str:
        """A larger number of parts for each batch than in this run; see `hpo.trial.training_code`."""
        if self._trainer is None or self._session is None:  # memory ran out before the first batch
            return ""
        config = self._session.config
        train = self.builder.data(config)["train"]
        if is_batched(train):
            return "its batches are ready ones, which are not cut"
        one_by_one = make_batches(train, BatchOptions(batch_size=1), torch.device("meta"), train=True)
        parts = finer(config, self._session.parts, known_length(one_by_one))
        return "its batches can't be cut any further" if parts is None else parts

    def _prepared(self, session: Session, work: _RankWork) -> tuple[Trainer, Mapping[str, Any]]:
        data = self.builder.data(session.config)
        config = self.builder.laid_out(session.config, data)
        if config != session.config:
            session.keep_config(config)
        bridge = [Watch(session), MicroBatches(session.parts), PrunerCallback(session)]
        trainer = self._trainer = work.trainer(self.builder, config, session.folder, session.device, bridge)
        return trainer, data


@dataclass(frozen=True)
class _RankWork:
    """The work of all ranks of a trial, with all that a peer knows about the trial.

    Attributes:
        number: The trial's number.
        params: Its parameters.
        config: Its config, without the lengths that follow from the data.
        seed: Its seed.
        parts: Parts into which each batch is cut.
        checkpoints: Its checkpoints, from which it resumes.
    """

    number: int
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    seed: int
    parts: int
    checkpoints: Checkpoints

    @classmethod
    def of(cls, session: Session) -> _RankWork:
        """The work for a trial's session."""
        return cls(
            session.number,
            session.params,
            session.config,
            session.seed,
            session.parts,
            session.checkpoints,
        )

    def __call__(self, builder: Builder, seat: Seat) -> None:
        """Run in a peer: build the trainer, and fit it."""
        data = builder.data(self.config)
        config = builder.laid_out(self.config, data)
        trainer = self.trainer(builder, config, seat.folder, seat.device, [MicroBatches(self.parts)])
        seat.ready()
        trainer.fit(data["train"], data["val"])

    def trainer(
        self,
        builder: Builder,
        config: dict[str, Any],
        folder: Path,
        device: torch.device,
        bridge: Sequence[Callback],
    ) -> Trainer:
        """The trainer, resumed from the trial's newest checkpoint, or its parent's, if there is one."""
        place = RunPlace(folder, f"trial-{self.number}", self.params)
        config = cut(config, self.parts)
        trainer = builder.trainer(config, place, seed=self.seed, device=device, bridge=bridge)
        checkpoints = self.checkpoints.on(device)
        found = checkpoints.newest()
        if found is not None:
            trainer.load_state_dict(found[1])
        elif (checkpoint := checkpoints.of_parent()) is not None:
            _fork(trainer, checkpoint)
        return trainer


def _fork(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Begin with the parent's checkpoint, but with the fork's own parameters."""
    try:
        trainer.load_state_dict(checkpoint, fork=True)
    except (RuntimeError, ValueError) as error:
        raise StudyError(
            f"the checkpoint of its parent does not fit the parameters of this fork: {error}\n"
            "  fix: leave what changes the model out of `study.scheduler.perturb`"
        ) from error
