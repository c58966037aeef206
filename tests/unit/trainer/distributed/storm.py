"""Storms: runs of several processes, each of which one rank ends at a place drawn by a seed, and what follows."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.unit.trainer.distributed.ranks import Outcome, Ranks
from tests.unit.trainer.distributed.runs import PrunedError, build
from tests.unit.trainer.support import At
from trainer.callbacks import Checkpoint, NaNDetection
from trainer.distributed.rank_error import RankError
from trainer.distributed.ranks import rank

Kind = Literal["prune", "nan", "stop", "kill"]

EPOCHS, BATCHES = 3, 4
#: Where a rank may be killed: inside a batch, and elsewhere.
INSIDE = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step")
EVENTS = (*INSIDE, "on_train_batch_end", "on_validation_batch_end", "on_epoch_end")


@dataclass(frozen=True)
class Strike:
    """What ends a run.

    Attributes:
        kind: How.
        rank: Which rank does it.
        epoch: Epochs that are finished before.
        batch: Batches of the next epoch that are finished before.
        event: The hook that does it.
    """

    kind: Kind
    rank: int
    epoch: int
    batch: int
    event: str

    @classmethod
    def drawn(cls, kind: Kind, size: int, chance: random.Random) -> Strike:
        """One at random, before the last epoch's end."""
        place = {"rank": chance.randrange(size), "epoch": chance.randrange(EPOCHS)}
        if kind == "prune":
            return cls(kind, place["rank"], chance.randint(1, EPOCHS - 1), 0, "on_epoch_end")
        if kind == "nan":
            return cls(kind, **place, batch=chance.randrange(BATCHES), event="on_after_forward")
        if kind == "stop":
            return cls(kind, **place, batch=chance.randint(1, BATCHES), event="on_train_batch_end")
        event = chance.choice(EVENTS)
        if event == "on_epoch_end":
            return cls(kind, place["rank"], chance.randint(1, EPOCHS - 1), 0, event)
        batch = chance.randrange(BATCHES) if event in INSIDE else chance.randint(1, BATCHES)
        return cls(kind, **place, batch=BATCHES if event == "on_validation_batch_end" else batch, event=event)

    def act(self, trainer: Any) -> None:
        """Do it."""
        if self.kind == "prune":
            trainer.state.stop_reason = "pruned"
            raise PrunedError("no more")
        if self.kind == "nan":
            trainer.state.loss = trainer.state.loss * float("nan")
        elif self.kind == "stop":
            trainer.state.stop("interrupted", now=True)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, at: int) -> Ended:
        """How the run ends that it strikes, in a rank that lives."""
        batch, step = self.batch, self.epoch * BATCHES + self.batch
        if self.kind == "nan":
            return Ended("", "diverged", self.epoch, batch + 1, step + 1)
        if self.kind == "stop":
            return Ended("", "interrupted", self.epoch, batch, step)
        if self.kind == "prune":
            told = "" if at == self.rank else f"RankError: rank {self.rank} failed: "
            return Ended(f"{told}PrunedError: no more", "pruned", self.epoch, batch, step)
        # The others wait for it where they need it next: batch norm does in the forward pass. A batch counts once
        # its loss is recorded.
        batch += self.event in INSIDE[1:]
        step += self.event == "on_before_optimizer_step"
        told = f"RankError: rank {self.rank} died without a word, as a process that is killed does"
        return Ended(told, "error", self.epoch, batch, step)

    @property
    def saved(self) -> int:
        """Epochs of the newest checkpoint that the run leaves behind, if it is none inside an epoch."""
        return self.epoch - (self.kind == "kill" and self.event == "on_epoch_end" and self.rank == 0)


@dataclass(frozen=True)
class Ended:
    """Where a run has ended in one rank: its error, the reason, and the state's counts."""

    error: str
    reason: str | None
    epoch: int
    batch: int
    step: int


@dataclass(frozen=True)
class Run:
    """What a run has come to in one rank."""

    ended: Ended
    trained: int
    history: list[dict[str, float]]
    weights: dict[str, Tensor]


def run(folder: str, strike: Strike | None = None, epochs: int = EPOCHS) -> Run:
    """A run in each rank, from the newest checkpoint in the folder."""
    torch.manual_seed(0)
    trained = 0

    def count(_: Any) -> None:
        nonlocal trained
        trained += 1

    callbacks: list[Any] = [NaNDetection(every_n_batches=1), Checkpoint(folder, max_overhead=1)]
    if strike is not None:
        place = (strike.epoch, strike.batch)
        callbacks.append(
            At(
                strike.event,
                strike.act,
                lambda t: rank() == strike.rank and (t.state.epoch, t.state.batch_index) == place,
            )
        )
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    trainer, train, val = build("mlp", callbacks, model=model, max_epochs=epochs, samples=16 * BATCHES - 3)
    trainer.callbacks.register("on_train_batch_end", count, priority=0)
    error = ""
    try:
        trainer.fit(train, val, ckpt="last")
    except (PrunedError, RankError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    state = trainer.state
    ended = Ended(error, state.stop_reason, state.epoch, state.batch_index, state.step)
    return Run(ended, trained, [dict(item) for item in state.history], dict(trainer.model.state_dict()))


class Storm:
    """Strikes upon runs of so many processes, and what is found to be wrong after each.

    Attributes:
        seconds: Of each strike and its resumption, by kind.
        problems: What was not as it should be.
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.problems: list[str] = []
        self._size = size
        self._folder = folder
        self._lasting = Ranks(size)
        #: What a run comes to that nothing ends, by its epochs.
        self._whole = {
            epochs: self._lasting.values(run, str(folder / f"{epochs}"), None, epochs)
            for epochs in range(EPOCHS + 1)
        }

    def strike(self, strike: Strike) -> None:
        """Let one run end so, and resume it."""
        folder = self._folder / "struck"
        began = time.monotonic()
        mortal = Ranks(self._size) if strike.kind == "kill" else self._lasting
        try:
            found = mortal.call(run, str(folder), strike)
        finally:
            if mortal is not self._lasting:
                mortal.close()
        resumed = self._lasting.values(run, str(folder))
        self.seconds.setdefault(strike.kind, []).append(time.monotonic() - began)
        shutil.rmtree(folder, ignore_errors=True)
        for number in range(self._size):
            self.problems += [
                f"{strike}: rank {number}: {text}"
                for text in self._wrong(strike, number, found[number], resumed[number])
            ]

    def _wrong(self, strike: Strike, number: int, outcome: Outcome, resumed: Run) -> Iterator[str]:
        if strike.kind == "kill" and number == strike.rank:
            if outcome.error != "killed":
                yield f"was to be killed: {outcome}"
        elif outcome.error:
            yield outcome.error
        else:
            struck: Run = outcome.value
            if struck.ended != strike.end(number):
                yield f"ended as {struck.ended}, not as {strike.end(number)}"
            whole = self._whole[EPOCHS][number]
            if struck.history != whole.history[: len(struck.history)] or len(struck.history) != strike.epoch:
                yield f"{len(struck.history)} epochs of its history, or others"
        epochs = strike.epoch if strike.kind == "prune" else EPOCHS
        whole = self._whole[epochs][number]
        begun = strike.epoch * BATCHES + strike.batch if strike.kind == "stop" else strike.saved * BATCHES
        if resumed.trained != epochs * BATCHES - begun:
            yield f"{resumed.trained} batches after {begun}"
        if resumed.history != whole.history or resumed.ended.step != whole.ended.step:
            yield f"resumes to another history: {resumed.history}"
        if not all(torch.equal(weight, resumed.weights[key]) for key, weight in whole.weights.items()):
            yield "resumes to other weights"

    def close(self) -> None:
        """End the processes."""
        self._lasting.close()


def blow(size: int, folder: Path, counts: Mapping[Kind, int], seed: int = 0) -> Storm:
    """A storm with so many strikes of each kind, in an order that the seed draws."""
    chance = random.Random(f"{seed} {size}")
    kinds: list[Kind] = [kind for kind, count in counts.items() for _ in range(count)]
    chance.shuffle(kinds)
    storm = Storm(size, folder)
    try:
        for kind in kinds:
            storm.strike(Strike.drawn(kind, size, chance))
    finally:
        storm.close()
    return storm
