"""Runs a final training with one seed in its own folder, resumes it, or finds it finished."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpo.final.stamp import STAMP_FILE, read_json, stamp_of, write_json
from hpo.final.starting import Start
from hpo.final.training import DivergedError, train_at
from hpo.study.folders import CHECKPOINTS, redirect_output
from hpo.trial.builder import Builder
from hpo.trial.peers import Peers
from hpo.trial.place import RunPlace
from trainer.checkpoint.files import list_checkpoints
from trainer.state import DIVERGED


@dataclass(frozen=True)
class SeedRun:
    """The result of a training with one seed.

    Attributes:
        seed: The seed.
        value: The study's metric at the best epoch; None if the training diverged at any epoch.
        best_epoch: The best epoch; None if the training diverged.
        epochs: Epochs trained; None if none of them had a finite value.
        metrics: The best weights' metrics on validation and test data; empty if the training diverged.
        folder: The folder of its files: weights, config, log, learning curve.
        trained_before: Whether it was found finished.
    """

    seed: int
    value: float | None
    best_epoch: int | None
    epochs: int | None
    metrics: Mapping[str, float | None]
    folder: str
    trained_before: bool

    @property
    def diverged(self) -> bool:
        """Whether the training diverged, and so has no value."""
        return self.value is None


@dataclass(frozen=True)
class SeedTrainer:
    """Trains starts with given seeds, each in ``final/<start>/seed-<seed>``.

    Attributes:
        builder: Builds trainers; the data is loaded once for all.
        epochs: Passes over the data to train; None: as long as ``trainer`` says.
        device: Where to train.
        peers: The other processes of a training on several devices; None: it has one.
    """

    builder: Builder
    epochs: int | None
    device: torch.device
    peers: Peers | None = None

    def run(self, start: Start, seed: int, label: str) -> SeedRun:
        """Train with one seed from scratch; the log is written to ``log.txt`` in the training's folder.

        Args:
            start: The parameters.
            seed: The seed.
            label: The start of each printed line.
        """
        start = start.with_seed(seed)
        subject = start.name.replace(" ", "-")
        folder = self.builder.spec.output_dir / "final" / subject / f"seed-{seed}"
        stamp = stamp_of(self.builder.spec, start.stages, self.epochs)
        before = _finished(folder, stamp)
        if before is None:
            _open(folder, stamp)
            begun = list_checkpoints([folder / CHECKPOINTS])
            how = f"resuming from epoch {begun[-1].epoch}" if begun else "training"
            print(f"{label}: {how}, log in {folder / 'log.txt'}", flush=True)
            self._train(start, RunPlace(folder, f"final-{subject}-seed-{seed}", start.params))
        run = _seed_run(
            seed, folder, before or read_json(folder / "metrics.json"), trained_before=before is not None
        )
        print(f"{label}: {self._told(run)}", flush=True)
        return run

    def _train(self, start: Start, place: RunPlace) -> None:
        try:
            with redirect_output(place.folder / "log.txt"):
                train_at(self.builder, start, place, epochs=self.epochs, device=self.device, peers=self.peers)
        except DivergedError:
            write_json(place.folder / "metrics.json", {"stopped": DIVERGED})
        # The result is in model.pt; a finished training is not resumed.
        shutil.rmtree(place.checkpoints, ignore_errors=True)

    def _told(self, run: SeedRun) -> str:
        if run.value is None:
            return "diverged"
        text = f"{self.builder.spec.study.metric} {run.value:.5g}, best epoch {run.best_epoch} of {run.epochs}"
        return f"{text}, trained before" if run.trained_before else text


def _seed_run(seed: int, folder: Path, result: Mapping[str, Any], *, trained_before: bool) -> SeedRun:
    # A training that diverged after a good epoch counts as diverged, as in the study.
    diverged = result["stopped"] == DIVERGED
    return SeedRun(
        seed,
        None if diverged else result["value"],
        None if diverged else result["best_epoch"],
        result.get("epochs"),
        {} if diverged else result["metrics"],
        str(folder),
        trained_before,
    )


def _finished(folder: Path, stamp: Mapping[str, Any]) -> Any:
    """The result of a finished training in this folder, if it is the requested one; else None."""
    result = read_json(folder / "metrics.json") if read_json(folder / STAMP_FILE) == stamp else None
    if result is None or not (result["stopped"] == DIVERGED or (folder / "model.pt").is_file()):
        return None
    return result


def _open(folder: Path, stamp: Mapping[str, Any]) -> None:
    """Create the folder of a training; removes the files of an earlier training with another stamp."""
    if folder.exists() and read_json(folder / STAMP_FILE) != stamp:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STAMP_FILE, stamp)
