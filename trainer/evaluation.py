"""Evaluation: data goes through the model without training, for its numbers or its outputs, in a fit or alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.callback import TrainerView
from trainer.data.batches import Batches, close_batches, make_batches, refuse_shuffled
from trainer.data.limits import FirstBatches, eval_batches
from trainer.data.loading import with_own_workers
from trainer.data.options import BatchOptions
from trainer.data.random_state import kept_rng
from trainer.data.sets import check_distinct, data_sets, each_set
from trainer.distributed.callbacks import share_weights
from trainer.distributed.group import Group
from trainer.outputs import Outputs, collecting
from trainer.recorded import Metrics
from trainer.step.compute import Compute
from trainer.step.modes import kept_modes

#: What the state says of the batch being worked on.
_OF_BATCH = ("batch", "outputs", "loss", "weight", "scalars", "absent", "loss_of_all")


class Evaluated(TrainerView, Protocol):
    """What an evaluation needs of the Trainer."""

    batching: BatchOptions
    compute: Compute
    group: Group
    running: bool

    def run_alone(self, work: Callable[[], None]) -> None:
        """Run ``work`` between the events of a run's beginning and end."""
        ...


class Evaluation:
    """Evaluates with the model of a trainer, its step and its metrics.

    Args:
        trainer: Whose they are.

    Attributes:
        apart: Sets that ``validate`` leaves out, by what the names of their numbers begin with. Those that are
            also measured while training, and may be missing from an epoch, are in ``state.own_times``.
    """

    def __init__(self, trainer: Evaluated) -> None:
        self._trainer = trainer
        self._sets: dict[str, Batches] = {}
        self._names: dict[str, str] = {}
        self.apart: set[str] = set()

    @property
    def names(self) -> Mapping[str, str]:
        """What the names of each set's numbers begin with, by the set's name; the first is called ``""`` too."""
        return self._names

    def take(self, val: Any) -> None:
        """Take over the validation data of a fit: one data set, or several by name; None: there is none."""
        self._sets = {} if val is None else self._batches(val, "val")
        given = val if isinstance(val, Mapping) else ()
        first = dict(zip(("",), self._sets, strict=False))
        self._names = {**first, **dict(zip(given, self._sets, strict=False))}
        self.apart.clear()
        self._trainer.state.own_times.clear()

    def validate(self) -> None:
        """Evaluate the validation data of the fit, set by set, without those that are evaluated apart."""
        self._trainer.recorder.forget("val_")  # of a validation that was broken off
        for prefix in self._sets:
            if prefix not in self.apart:
                self._run(self._sets, prefix, "validation")

    def now(self, prefix: str, batches: int | None = None) -> dict[str, float]:
        """Evaluate a validation set of the running fit, which then continues as if nothing had been.

        Args:
            prefix: Which one, of ``names``.
            batches: How many of its first batches; None: all.

        Returns:
            Its numbers by name.
        """
        sets = self._sets
        if batches is not None:
            sets = {**sets, prefix: FirstBatches(sets[prefix], batches)}
        with self._aside():
            self._run(sets, prefix, "validation")
            return self._trainer.recorder.compute()

    def close(self) -> None:
        """Free what the validation data holds."""
        for batches in self._sets.values():
            close_batches(batches)

    def alone(self, data: Any, prefix: str, scope: str) -> dict[str, float]:
        """Evaluate data for itself, also inside a fit, which then continues as if nothing had been.

        Args:
            data: One data set, or several by name.
            prefix: What the names of the numbers begin with: ``"val"`` or ``"test"``.
            scope: Whose events fire: ``"validation"`` or ``"test"``.
        """
        trainer, sets = self._trainer, self._batches(self._beside_training(data), prefix)
        try:
            with trainer.group.session(trainer.device), self._aside():
                if trainer.running:  # inside a fit, whose callbacks are set up already
                    self._run_all(sets, scope)
                else:
                    share_weights(trainer, trainer.group)  # before the first fit each process may have its own
                    trainer.run_alone(lambda: self._run_all(sets, scope))
                return trainer.recorder.compute()
        finally:
            for batches in sets.values():
                close_batches(batches)

    def predict(self, data: Any, path: Path | str | None = None) -> Any:
        """Outputs for data, in its order, also inside a fit, which then continues as if nothing had been.

        Of a Trainer with a ``loss`` they are what the model returns for the first part of each batch, whose
        targets may be missing; with a ``step`` what that returns as outputs, or its method ``predict(model,
        batch)`` if it has one. The model is in eval mode, and an optimizer with weights of its own for evaluation
        has these.

        Args:
            data: See `trainer.data.batches.make_batches`.
            path: A file to write them to, ``.pt`` or ``.csv``, see `trainer.outputs.collecting`; None: none.

        Returns:
            The outputs on the CPU, joined along the first dimension; None with a path.

        Raises:
            TypeError: The outputs hold no tensor, or are no table of numbers for a ``.csv``.
            ValueError: The data gave no batch, a DataLoader shuffles it, its outputs can't be joined, or the path
                ends otherwise.
        """
        trainer = self._trainer
        refuse_shuffled(data)
        if trainer.group.strategy == "fsdp":
            with trainer.group.session(trainer.device):
                found = self._predicted(data, None if trainer.group.rank else path)
                return found if path is None else None
        if path is not None and trainer.group.rank:  # each process computes all, and one writes
            return None
        return self._predicted(data, path)

    def _predicted(self, data: Any, path: Path | str | None) -> Any:
        trainer = self._trainer
        batches = make_batches(
            self._beside_training(data), trainer.batching, trainer.device, train=False, seed=trainer.seed
        )
        try:
            with self._aside(), collecting(path) as outputs:
                if trainer.running:
                    self._predict(batches, outputs)
                else:
                    trainer.run_alone(lambda: self._predict(batches, outputs))
            return outputs.joined() if path is None else None
        finally:
            close_batches(batches)

    def _beside_training(self, data: Any) -> Any:
        """The data; inside a fit with workers of its own, for a loader's may be inside a pass of training."""
        return each_set(with_own_workers, data) if self._trainer.running else data

    def _predict(self, batches: Batches, outputs: Outputs) -> None:
        trainer, done = self._trainer, False
        with torch.no_grad(), kept_modes(trainer.model):
            trainer.model.eval()
            trainer.fire("on_predict_start")
            for batch in batches.epoch(0):
                done = True
                outputs.add(trainer.compute.predict(batch))
            if not done:
                raise ValueError("the data to predict for gave no batch")
            trainer.fire("on_predict_end")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Record for itself, and put back, at the end, the random generators and the batch being worked on."""
        trainer, state = self._trainer, self._trainer.state
        kept, trainer.recorder = trainer.recorder, trainer.recorder.fresh()
        before = {name: getattr(state, name) for name in _OF_BATCH}
        skips = set(state.skips)
        try:
            with kept_rng():
                yield
        finally:
            trainer.recorder = kept
            for name, value in before.items():
                setattr(state, name, value)
            state.skips = skips

    def _run_all(self, sets: Mapping[str, Batches], scope: str) -> None:
        for prefix in sets:
            self._run(sets, prefix, scope)

    def _run(self, sets: Mapping[str, Batches], prefix: str, scope: str) -> None:
        """Evaluate one of the sets; its numbers are recorded, and on the state when the end's event fires."""
        trainer = self._trainer
        trainer.state.evaluating, trainer.state.absent = prefix, False
        with torch.no_grad(), kept_modes(trainer.model):
            trainer.model.eval()
            trainer.fire(f"on_{scope}_start")
            done = False
            for batch in sets[prefix].epoch(0):
                done = True
                trainer.compute.evaluate(batch, prefix, scope)
            trainer.state.absent = False  # what follows in training may never say so
            if not done:
                raise ValueError(f"the {scope} data gave no batch")
            numbers = trainer.recorder.compute().items()
            found = Metrics((name, it) for name, it in numbers if name.startswith(f"{prefix}_"))
            if prefix == next(iter(sets)):  # only now are the names known that the step gives
                check_distinct(sets, [name.removeprefix(f"{prefix}_") for name in found])
            trainer.state.evaluated = found
            trainer.fire(f"on_{scope}_end")

    def _batches(self, data: Any, prefix: str) -> dict[str, Batches]:
        trainer, sets = self._trainer, data_sets(data, prefix)
        check_distinct(sets, trainer.metrics)
        return {
            name: eval_batches(
                item,
                trainer.batching,
                trainer.device,
                prefix,
                seed=trainer.seed,
                shard=trainer.group.shard(trainer.state),
            )
            for name, item in sets.items()
        }
