"""A trial's training once more: alone, undisturbed, in a fresh folder."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpo.study.lineage import Stage
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from trainer import Trainer
from trainer.callback import Callback, TrainerView
from trainer.recorded import Metrics
from trainer.state import DIVERGED


@dataclass(frozen=True)
class Alone:
    """What came of it.

    Attributes:
        history: The metrics of each finished epoch.
        diverged: Whether it diverged.
        error: What it raised.
        model: The weights at the end; empty where it raised.
    """

    history: list[Metrics]
    diverged: bool = False
    error: Exception | None = None
    model: Mapping[str, Tensor] | None = None


class _StopAfter(Callback):
    """Ends the training after an epoch, for trials that were ended from outside.

    Args:
        epochs: After so many.
    """

    priority = 99

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs

    def on_epoch_end(self, trainer: TrainerView) -> None:
        if trainer.state.epoch >= self._epochs:
            trainer.state.stop("as far as the trial came")


def train_alone(
    builder: Builder,
    lineage: Sequence[Stage],
    *,
    threads: int,
    epochs: int | None,
) -> Alone:
    """Train as `hpo.trial.run` does, without a pruner, a storage or a disturbance.

    Args:
        builder: The study's; its data may be there already.
        lineage: The trial, behind those that it was forked from one after another.
        threads: The trial's number of threads: results are equal bits at an equal number only.
        epochs: Stop after so many; None: as long as the study file says.
    """
    if epochs == 0:
        return Alone([])
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            begun = None
            for stage in lineage[:-1]:
                trainer = _made(builder, stage.params, Path(folder), stage.seed, stage.until, begun)
                trainer.fit(*_data(builder, stage.params))
                begun = trainer.state_dict()
            last = lineage[-1]
            return _train(builder, last.params, Path(folder), last.seed, epochs, begun)
    finally:
        torch.set_num_threads(kept)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _made(
    builder: Builder,
    params: Mapping[str, Any],
    folder: Path,
    seed: int,
    epochs: int | None,
    begun: dict[str, Any] | None,
) -> Trainer:
    """A trainer, which stops after so many epochs, and begins with another one's state if there is one."""
    config = builder.spec.resolve(params)
    trainer = builder.trainer(
        builder.laid_out(config, builder.data(config)),
        RunPlace(folder, "alone", params),
        seed=seed,
        device=torch.device("cpu"),
        bridge=[] if epochs is None else [_StopAfter(epochs)],
    )
    if begun is not None:
        trainer.load_state_dict(begun, fork=True)
    return trainer


def _data(builder: Builder, params: Mapping[str, Any]) -> tuple[Any, Any]:
    data = builder.data(builder.spec.resolve(params))
    return data["train"], data["val"]


def _train(
    builder: Builder,
    params: Mapping[str, Any],
    folder: Path,
    seed: int,
    epochs: int | None,
    begun: dict[str, Any] | None,
) -> Alone:
    history: list[Metrics] = []
    try:
        trainer = _made(builder, params, folder, seed, epochs, begun)
        history = trainer.state.history
        trainer.fit(*_data(builder, params))
    except Exception as error:  # noqa: BLE001 - a trial's own error is its outcome, whatever it is
        return Alone(history, error=error)
    return Alone(history, trainer.state.stop_reason == DIVERGED, None, trainer.model.state_dict())
