"""StepMetrics: records the metrics of single optimizer steps for the loggers and trackers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.callbacks.metric_names import MetricNames
from trainer.checks import check_count
from trainer.events import LOG_PRIORITY
from trainer.metrics.epoch import Recorded
from trainer.step.optimizers import each_of, first_rate
from trainer.step_log import StepLog, StepRecord

_SUFFIXES: Final = {"csv": ".csv", "json": ".jsonl"}


class StepMetrics(Callback):
    """Records metrics of single optimizer steps: all that batches record, gradient norms and the learning rate.

    That is ``train_loss``, the functions among the metrics, the step's further scalars, and what callbacks hand
    to ``trainer.recorder.record`` while training; a value of a step is the mean, sum or maximum of its batches',
    as that of an epoch is. Batches whose step was left out count to the next one. ``grad_norm`` is there where a
    callback measures it (`GradientMonitor` does), ``lr`` is the rate that the step was taken with, of several
    optimizers the first one's beside each one's ``lr_<name>``. Metric objects have no numbers of single steps.
    With several processes the loss of a batch is that of the whole batch, and all else that is recorded of it that
    of rank 0's part, by which the batches of one step are weighed too.

    A step keeps what is recorded anyway and waits for nothing: the numbers lie on the device until
    ``transfer_every_n_steps`` steps are over or the epoch is, and come over in one transfer. They are then
    appended to ``steps.csv`` or ``steps.jsonl``, and shown by the callbacks that listen to ``on_log_steps``: the
    console (``every_n_steps``), the progress bar, TensorBoard, W&B and MLflow, the trackers under names that
    begin with ``step/``. A checkpoint holds what waits. A run that resumes cuts the file back to what the
    checkpoint knows, and trackers are sent what they lack of it: no step is there twice, and none is missing.

    Example::

        Trainer(model, optimizer, loss, callbacks=[StepMetrics("run", every_n_steps=10)])

        callbacks: {step_metrics: {every_n_steps: 10}}

    Args:
        folder: Where the file goes; made if needed.
        every_n_steps: Record every n-th step, at least 1.
        transfer_every_n_steps: Steps whose numbers are transferred from the device together, at least 1; a killed
            run that resumes trains these again.
        metrics: Patterns such as ``train_*`` for the metrics to record; None: all.
        format: ``"csv"``, or ``"json"`` for one object per line.
        earlier: The ``folder`` of each earlier attempt at this run.

    Raises:
        OSError: The file can't be written when a fit starts.
        ValueError: A number is out of range, there is no such format, or a metric is called ``step`` or ``epoch``.
    """

    priority = LOG_PRIORITY - 1
    rank_zero_only = True
    graph_safe = True
    reads_batches = True

    def __init__(
        self,
        folder: Path | str,
        every_n_steps: int = 1,
        transfer_every_n_steps: int = 100,
        metrics: Sequence[str] | None = None,
        format: Literal["csv", "json"] = "csv",  # noqa: A002 - the word for it
        earlier: Sequence[Path | str] = (),
    ) -> None:
        check_count("every_n_steps", every_n_steps)
        check_count("transfer_every_n_steps", transfer_every_n_steps)
        if format not in _SUFFIXES:
            raise ValueError(f"format is {format!r}: give 'csv' or 'json'")
        self.every_n_steps = every_n_steps
        self.transfer_every_n_steps = transfer_every_n_steps
        self.metrics = MetricNames(metrics)
        name = f"steps{_SUFFIXES[format]}"
        self.log = StepLog(Path(folder) / name, [Path(other) / name for other in earlier])
        self._wants = cache(self.metrics.__contains__)
        self._tap: list[Recorded] = []
        self._of_batches = 0
        # The learning rates of the optimizers that have stepped in the running step, by name.
        self._rates: dict[str, Tensor | float | None] = {}
        self._step: int | None = None  # the latest step taken into account; None: the one at which the fit starts
        self._forget()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Cut the file back to the step from which this run resumes."""
        state = trainer.state
        if state.is_new:
            self._forget()
        self._hold([*self.log.unwritten, *self._records])  # records that an earlier fit could not write
        self._of_batches = len(self._tap)
        if self._step is None:
            self._step = state.step
        trainer.recorder.tap = self._tap if state.batch_index else None
        self._take(trainer)  # a step after which an error kept the batch from ending
        self.log.cut(self._logged)
        state.step_log = self.log

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """From here on, recorded values belong to steps."""
        trainer.recorder.tap = self._tap

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Keep the learning rate: a scheduler may change it before the batch ends, in place with a CUDA graph."""
        name = trainer.state.optimizer_name
        at_work = {name: trainer.optimizer} if name else each_of(trainer.optimizer)
        self._rates |= {name: _rate(optimizer) for name, optimizer in at_work.items()}

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Take the values of the step, if there was one, and pass on the steps that are due."""
        self._of_batches = len(self._tap)
        before = self._take(trainer)
        if trainer.state.step // self.transfer_every_n_steps > before // self.transfer_every_n_steps:
            self._hand_on(trainer)

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Write the records, to which callbacks before this one may have added."""
        self._logged = records[-1].step
        self.log.append(records)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Pass on the epoch's last steps, before its metrics are logged."""
        trainer.recorder.tap = None
        self._take(trainer)  # the step of batches that were left over to accumulate
        self._tap.clear()
        self._hand_on(trainer)
        self.log.epoch_ends[trainer.state.epoch + 1] = trainer.state.step

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Pass on the remaining steps of a run that ends inside an epoch."""
        trainer.recorder.tap = None
        if trainer.state.step_log is self.log:  # else the fit failed before `on_fit_start`: it is another run's
            self._hand_on(trainer)

    def teardown(self, trainer: TrainerView) -> None:
        """Remove the file of this fit from the state."""
        trainer.state.step_log = None

    def state_dict(self) -> dict[str, Any]:
        """The waiting records and values, and the last step in the file."""
        self._transfer()
        held = [*self.log.unwritten, *self._records]
        return {
            "logged": self._logged,
            "records": [(record.step, record.epoch, record.values) for record in held],
            "tap": [list(item) for item in self._tap],
            "epoch_ends": dict(self.log.epoch_ends),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; the file is cut when the fit starts."""
        self._forget()
        self._logged = state["logged"]
        self._hold([StepRecord(step, epoch, dict(values)) for step, epoch, values in state["records"]])
        self._tap.extend(tuple(item) for item in state["tap"])
        self.log.epoch_ends = dict(state["epoch_ends"])

    def _forget(self) -> None:
        self._step = None
        self._logged = 0
        self._tap.clear()
        self._rates.clear()
        self._waiting: list[_Taken] = []
        self._records: list[StepRecord] = []
        self.log.epoch_ends, self.log.unwritten = {}, []

    def _hold(self, records: list[StepRecord]) -> None:
        """Keep these records waiting, and count only the steps before them as written."""
        self._records = records
        self._logged = min([self._logged, *(record.step - 1 for record in records)])

    def _take(self, trainer: TrainerView) -> int:
        """Take the values of the step, if there was one since the previous call; returns that call's step."""
        state = trainer.state
        step, before = state.step, self._step or 0
        self._step = step
        if step == before:
            return before
        if step // self.every_n_steps > before // self.every_n_steps:
            # Without values recorded after the last batch, which are those of the whole epoch.
            wanted = [item for item in self._tap[: self._of_batches] if self._wants(item[0])]
            wanted += [(name, norm, 1.0, "mean") for name, norm in state.grad_norms.items() if self._wants(name)]
            rates = self._named_rates(trainer.optimizer)
            self._waiting.append(_Taken(step, state.epoch + 1, rates, wanted))
        self._tap.clear()
        self._rates.clear()
        return before

    def _named_rates(self, optimizer: Optimizer) -> dict[str, Tensor | float]:
        """The step's learning rates, named as in epochs; for an optimizer that did not step, its present one."""
        kept = self._rates
        rates = {name: kept[name] if name in kept else _rate(each) for name, each in each_of(optimizer).items()}
        named = {"lr": next(iter(rates.values())), **{f"lr_{name}": rate for name, rate in rates.items() if name}}
        return {name: rate for name, rate in named.items() if rate is not None and self._wants(name)}

    def _transfer(self) -> None:
        """Transfer the waiting values from the device in one go, and make records of them."""
        waiting, self._waiting = self._waiting, []
        numbers = to_host([tensor for step in waiting for tensor in step.tensors()])
        self._records += [step.record(numbers) for step in waiting]

    def _hand_on(self, trainer: TrainerView) -> None:
        self._transfer()
        records, self._records = self._records, []
        if records:
            trainer.fire("on_log_steps", records)


@dataclass(frozen=True)
class _Taken:
    """The values of one step, still on the device."""

    step: int
    epoch: int
    rates: Mapping[str, Tensor | float]
    values: Sequence[Recorded]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors to transfer, in the order in which `record` reads their numbers."""
        for _, value, weight, _ in self.values:
            yield value
            if isinstance(weight, Tensor):
                yield weight
        yield from (rate for rate in self.rates.values() if isinstance(rate, Tensor))

    def record(self, numbers: Iterator[float]) -> StepRecord:
        """The step's record, from the numbers of its tensors."""
        found: dict[str, tuple[str, list[float], list[float]]] = {}
        for name, _, weight, reduce in self.values:
            _, values, weights = found.setdefault(name, (reduce, [], []))
            values.append(next(numbers))
            weights.append(next(numbers) if isinstance(weight, Tensor) else weight)
        reduced = {name: _reduced(*item) for name, item in found.items()}
        rates = {
            name: next(numbers) if isinstance(rate, Tensor) else float(rate) for name, rate in self.rates.items()
        }
        return StepRecord(self.step, self.epoch, reduced | rates)


def _rate(optimizer: Optimizer) -> Tensor | float | None:
    """The present learning rate of the first group; a tensor is copied."""
    rate = first_rate(optimizer)
    return rate.clone() if isinstance(rate, Tensor) else rate


def _reduced(reduce: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """One number from those of a step's batches; a mean is NaN if all weights are 0."""
    if reduce == "max":
        return float(torch.tensor(values, dtype=torch.float64).max())  # unlike Python's max, NaN if any is
    if reduce == "sum":
        return sum(values)
    if len(values) == 1 and weights[0]:
        return values[0]
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total = sum(weight for _, weight in counted)
    return sum(value * weight for value, weight in counted) / total if total else float("nan")


def to_host(tensors: Sequence[Tensor]) -> Iterator[float]:
    """The numbers of tensors of one element each, in order, read in one transfer."""
    if not tensors:
        return iter(())
    device = tensors[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPU has no float64
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.device), []).append(place)
    stacked = [torch.stack([tensors[place].reshape(()) for place in places]) for places in alike.values()]
    numbers = torch.cat([part.to(device, dtype) for part in stacked]).tolist()
    places = [place for group in alike.values() for place in group]
    return iter([number for _, number in sorted(zip(places, numbers, strict=True), key=lambda item: item[0])])
