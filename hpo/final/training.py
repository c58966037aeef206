"""Final training: continues from a trial's best checkpoint, or trains its parameters from scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpo.config.code import code_identity
from hpo.config.spec import StudySpec
from hpo.config.yaml_dumper import to_yaml
from hpo.errors import StudyError
from hpo.final.learning_rates import learning_rate_plan
from hpo.final.stamp import STAMP_FILE, clear, final_config, read_json, stamp_of, write_json
from hpo.final.starting import Start, start_from
from hpo.study.lineage import Stage
from hpo.trial.builder import Builder
from hpo.trial.peer import Seat
from hpo.trial.peers import Peers
from hpo.trial.place import RunPlace
from trainer import Trainer
from trainer.callback import Callback, TrainerView
from trainer.checkpoint.files import CheckpointFile
from trainer.checkpoint.manager import find_checkpoint, newest_checkpoint, snapshot, write_whole
from trainer.distributed.tensor_shards import is_sharded, load_model, split_state
from trainer.files import replacing
from trainer.state import PAUSED, best_epoch
from trainer.step.parts import bare_model


class DivergedError(StudyError):
    """A training ended without an epoch with a finite value of the study's metric."""


def train_final(
    builder: Builder, start: Start, *, epochs: int | None, device: torch.device, peers: Peers | None = None
) -> dict[str, Any]:
    """Train, keep the best epoch, and write ``final/`` in the output folder.

    An interrupted training there resumes from its newest checkpoint, if it is the same training; a finished one is
    trained again.

    Args:
        builder: Builds the trainer.
        start: The start of the training.
        epochs: Passes over the data to train; None: as long as ``trainer`` says.
        device: The device; with peers, the first of the devices.
        peers: The other processes of a training on several devices; None: it has one.

    Returns:
        What ``final/metrics.json`` holds: study, trial, the value of the study's metric, epochs in all, the best
        of them, the metrics of its weights on validation and test data, the path of those weights, and the hashes
        of the code that they were trained with and of the trial's.

    Raises:
        DivergedError: No epoch has a finite value of the study's metric.
    """
    place = RunPlace(builder.spec.output_dir / "final", "final", start.params)
    file, stamp = place.folder / STAMP_FILE, stamp_of(builder.spec, start.stages, epochs, start.checkpoint)
    if read_json(file) != stamp:
        clear(place.folder)
        place.folder.mkdir(parents=True, exist_ok=True)
        write_json(file, stamp)
    try:
        result = train_at(builder, start, place, epochs=epochs, device=device, peers=peers)
    except DivergedError:
        file.unlink()  # a resumed run would diverge again
        raise
    file.unlink()
    return result


def train_at(
    builder: Builder,
    start: Start,
    place: RunPlace,
    *,
    epochs: int | None,
    device: torch.device,
    peers: Peers | None = None,
) -> dict[str, Any]:
    """Train in a folder, and keep the best epoch there; resumes from the folder's newest checkpoint if it has one.

    Args:
        builder: Builds the trainer.
        start: The start of the training.
        place: The folder and the run's name; checkpoints in the folder must be of the same training.
        epochs: See `train_final`; also for the result.
        device: The device.
        peers: See `train_final`.

    Raises:
        DivergedError: No epoch has a finite value of the study's metric.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    peers = peers or Peers(builder, ())
    with peers.at_work(_Part(start, place, epochs), place.folder):
        trained = _trained(builder, start, place, place, epochs, device, peers.meet)
    return _written(builder.spec, start, place, trained)


@dataclass(frozen=True)
class _Part:
    """A peer's part of a final training: everything but writing.

    Attributes:
        start: The start of the training.
        place: The place where rank 0 writes.
        epochs: Passes over the data.
    """

    start: Start
    place: RunPlace
    epochs: int | None

    def __call__(self, builder: Builder, seat: Seat) -> None:
        """Train and evaluate."""
        own = replace(self.place, folder=seat.folder)
        _trained(builder, self.start, self.place, own, self.epochs, seat.device, seat.ready)


@dataclass(frozen=True)
class _Trained:
    """The result of a final training.

    Attributes:
        trainer: The trainer, with the weights of the best epoch.
        config: The config of the last stage.
        epoch: The best epoch.
        metrics: The metrics of its weights on validation and test data, and the metrics that are optimised.
        weights: Its weights, unsharded.
    """

    trainer: Trainer
    config: Mapping[str, Any]
    epoch: int
    metrics: Mapping[str, float]
    weights: Mapping[str, torch.Tensor]


def _trained(
    builder: Builder,
    start: Start,
    place: RunPlace,
    own: RunPlace,
    epochs: int | None,
    device: torch.device,
    ready: Callable[[], None],
) -> _Trained:
    """Train all stages, and evaluate the best epoch.

    Args:
        builder: Builds the trainer.
        start: The start of the training.
        place: The place where rank 0 writes; all processes resume from its checkpoints.
        own: The place where this process writes.
        epochs: See `train_final`.
        device: The device.
        ready: Called before the first fit.
    """
    begun = newest_checkpoint([place.checkpoints], device)
    if begun is not None:
        print(f"resuming from {begun[0].path}", flush=True)
    before = 0
    for stage in start.stages:
        until = stage.until
        if until is None or begun is None or begun[0].epoch < until:
            config = final_config(builder.spec, stage.params, epochs)
            data = builder.data(config)
            config = builder.laid_out(config, data, start.progress)
            trainer = _trainer(builder, start, stage, config, own, device)
            _load(trainer, start, begun, before)
            for line in _plan(builder, stage, config, trainer):
                print(line, flush=True)
            ready()
            begun = None  # frees its tensors before training
            trainer.fit(data["train"], data["val"])
            if until is None or trainer.state.epoch < until:  # else the next stage follows
                break
            begun = newest_checkpoint([place.checkpoints], device)
        before = until
    return _Trained(trainer, config, *_evaluated(builder.spec, trainer, start, place, data))


def _trainer(
    builder: Builder, start: Start, stage: Stage, config: Mapping[str, Any], place: RunPlace, device: torch.device
) -> Trainer:
    return builder.trainer(
        config,
        replace(place, params=stage.params),
        seed=stage.seed,
        device=device,
        after=start.progress,
        bridge=[] if stage.until is None else [_Until(stage.until)],
    )


def _load(
    trainer: Trainer, start: Start, begun: tuple[CheckpointFile, dict[str, Any]] | None, before: int
) -> None:
    """Load a trainer's state from the training's folder, or from the trial that it starts from.

    Args:
        trainer: The new trainer of the stage.
        start: The start of the training.
        begun: The newest checkpoint of the folder.
        before: The epoch after which the stage begins; 0 for the first.

    Raises:
        StudyError: The trial's checkpoint is of another model or optimizer.
    """
    if begun is None:
        if start.checkpoint is not None:
            start_from(trainer, start.checkpoint, of=start.name)
    elif before and begun[0].progress == (before, 0):
        trainer.load_state_dict(begun[1], fork=True)
        trainer.state.inherited = 0  # all stages are one training, of which any epoch may be the best
    else:
        trainer.load_state_dict(begun[1])


def _plan(builder: Builder, stage: Stage, config: Mapping[str, Any], trainer: Trainer) -> Sequence[str]:
    if stage.until is not None:
        return [f"epochs up to {stage.until} with the parameters of trial {stage.trial}"]
    return learning_rate_plan(builder, config, trainer)


class _Until(Callback):
    """Ends a stage after an epoch."""

    priority = 94

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Stop after that epoch, unless there is another reason to stop."""
        if trainer.state.epoch >= self._epoch:
            trainer.state.stop(PAUSED)


def _evaluated(
    spec: StudySpec, trainer: Trainer, start: Start, place: RunPlace, data: Mapping[str, Any]
) -> tuple[int, Mapping[str, float], Mapping[str, torch.Tensor]]:
    """The best epoch, its metrics and its weights, which the trainer has afterwards."""
    history = trainer.state.history
    epoch = best_epoch(history, spec.study.metric, spec.study.mode, after=trainer.state.inherited)
    if epoch is None:
        raise DivergedError(f"final training diverged: no epoch has a finite {spec.study.metric}")
    if start.checkpoint is not None and epoch <= start.epoch:
        best: dict[str, Any] = start.checkpoint
    else:
        found = find_checkpoint([place.checkpoints], epoch, trainer.device)
        if found is None:
            raise StudyError(f"the checkpoint of epoch {epoch} in {place.checkpoints} can't be read")
        best = found[1]
    load_model(bare_model(trainer.model), best["model"])
    trainer.optimizer.load_state_dict(best["optimizer"])
    split_state(trainer.optimizer)
    metrics = trainer.validate(data["val"])
    if "test" in data:
        metrics |= trainer.test(data["test"])
    # The study's metric may be a callback's, which is only recorded in its epoch.
    recorded = {name: value for name, value in history[epoch - 1].items() if name in spec.study.goals}
    metrics = {**recorded, **metrics}
    own = bare_model(trainer.model).state_dict()
    # A sharded model has no whole weights in one process.
    return epoch, metrics, best["model"] if any(map(is_sharded, own.values())) else own


def _written(spec: StudySpec, start: Start, place: RunPlace, trained: _Trained) -> dict[str, Any]:
    trainer, epoch = trained.trainer, trained.epoch
    weights = place.folder / "model.pt"
    write_whole(snapshot(trained.weights), weights)
    with replacing(place.folder / "config.yaml") as file:
        file.write(to_yaml({**trained.config, "seed": start.seed}))
    result = {
        "study": spec.study.name,
        "trial": start.trial,
        "value": trainer.state.history[epoch - 1][spec.study.metric],
        "epochs": trainer.state.epoch,
        "best_epoch": epoch,
        "stopped": trainer.state.stop_reason,
        "metrics": trained.metrics,
        "model": str(weights),
        "code": code_identity(spec).hash,
        "trial_code": start.code,
    }
    write_json(place.folder / "metrics.json", result)
    return result
