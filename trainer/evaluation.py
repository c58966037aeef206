"""Evaluation: runs data through the model without training, for metrics or outputs, inside a fit or alone."""

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

#: The attributes of the state that belong to the running batch.
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
    """Evaluates and predicts with the model, step and metrics of a trainer.

    Args:
        trainer: The trainer.

    Attributes:
        apart: The prefixes of the sets that ``validate`` leaves out. Those that an `Evaluator` measures during
            training, so that an epoch may lack them, are in ``state.own_times`` too.
    """

    def __init__(self, trainer: Evaluated) -> None:
        self._trainer = trainer
        self._sets: dict[str, Batches] = {}
        self._names: dict[str, str] = {}
        self.apart: set[str] = set()

    @property
    def names(self) -> Mapping[str, str]:
        """The prefix of each set's metrics, by the set's name; the first set also has the name ``""``."""
        return self._names

    def take(self, val: Any) -> None:
        """Take over the validation data of a fit: one data set, several by name, or None."""
        self._sets = {} if val is None else self._batches(val, "val")
        given = val if isinstance(val, Mapping) else ()
        first = dict(zip(("",), self._sets, strict=False))
        self._names = {**first, **dict(zip(given, self._sets, strict=False))}
        self.apart.clear()
        self._trainer.state.own_times.clear()

    def validate(self) -> None:
        """Evaluate the validation sets of the fit one after another, without those in ``apart``."""
        self._trainer.recorder.forget("val_")  # left by a validation that an error interrupted
        for prefix in self._sets:
            if prefix not in self.apart:
                self._run(self._sets, prefix, "validation")

    def now(self, prefix: str, batches: int | None = None) -> dict[str, float]:
        """Evaluate a validation set of the running fit, without any effect on the fit.

        Args:
            prefix: The prefix of the set, one of the values of ``names``.
            batches: Evaluate only this number of its first batches; None: all.

        Returns:
            Its metrics by name.
        """
        sets = self._sets
        if batches is not None:
            sets = {**sets, prefix: FirstBatches(sets[prefix], batches)}
        with self._aside():
            self._run(sets, prefix, "validation")
            return self._trainer.recorder.compute()

    def close(self) -> None:
        """Free the resources of the validation data."""
        for batches in self._sets.values():
            close_batches(batches)

    def alone(self, data: Any, prefix: str, scope: str) -> dict[str, float]:
        """Evaluate data on its own; inside a fit, without any effect on the fit.

        Args:
            data: One data set, or several by name.
            prefix: The prefix of the metrics: ``"val"`` or ``"test"``.
            scope: Which events fire: those of ``"validation"`` or ``"test"``.
        """
        trainer, sets = self._trainer, self._batches(self._beside_training(data), prefix)
        try:
            with trainer.group.session(trainer.device), self._aside():
                if trainer.running:  # inside a fit, whose callbacks are already set up
                    self._run_all(sets, scope)
                else:
                    share_weights(trainer, trainer.group)  # before the first fit, the weights may differ
                    trainer.run_alone(lambda: self._run_all(sets, scope))
                return trainer.recorder.compute()
        finally:
            for batches in sets.values():
                close_batches(batches)

    def predict(self, data: Any, path: Path | str | None = None) -> Any:
        """Compute the outputs for data, in its order; inside a fit, without any effect on the fit.

        With a ``loss``, the outputs are what the model returns for the first part of each batch, whose targets may
        be missing. With a ``step``, they are what its method ``predict(model, batch)`` returns, or without that
        method what the step returns as outputs. The model is in eval mode, and `OptimizerMode` puts the optimizer
        into eval mode.

        Args:
            data: See `trainer.data.batches.make_batches`.
            path: A ``.pt`` or ``.csv`` file to write the outputs to, see `trainer.outputs.collecting`; or None.

        Returns:
            The outputs on the CPU, joined along the first dimension; None if a path is given.

        Raises:
            TypeError: The outputs hold no tensor, or are no table of numbers for a ``.csv``.
            ValueError: The data gave no batch, a DataLoader shuffles it, its outputs can't be joined, or the path
                has another suffix.
        """
        trainer = self._trainer
        refuse_shuffled(data)
        if trainer.group.strategy == "fsdp":
            with trainer.group.session(trainer.device):
                found = self._predicted(data, None if trainer.group.rank else path)
                return found if path is None else None
        if path is not None and trainer.group.rank:  # rank 0 alone computes and writes all
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
        """The data; inside a fit, DataLoaders with other workers, as their own may be inside a training pass."""
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
        """Use another recorder inside the block; restore it, the generators and the running batch at the end."""
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
        """Evaluate one of the sets; its metrics are recorded, and on the state when the end event fires."""
        trainer = self._trainer
        trainer.state.evaluating, trainer.state.absent = prefix, False
        with torch.no_grad(), kept_modes(trainer.model):
            trainer.model.eval()
            trainer.fire(f"on_{scope}_start")
            done = False
            for batch in sets[prefix].epoch(0):
                done = True
                trainer.compute.evaluate(batch, prefix, scope)
            trainer.state.absent = False  # the batches of training may never set it
            if not done:
                raise ValueError(f"the {scope} data gave no batch")
            numbers = trainer.recorder.compute().items()
            found = Metrics((name, it) for name, it in numbers if name.startswith(f"{prefix}_"))
            if prefix == next(iter(sets)):  # only now are the metric names of the step known
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
