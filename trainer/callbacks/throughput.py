"""Throughput: records training speed, time spent waiting for data, and the estimated time to the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal
from warnings import catch_warnings, filterwarnings

import torch

from trainer.callback import Callback, TrainerView
from trainer.data.lengths import batch_length
from trainer.data.moving import tensors_in
from trainer.distributed.ranks import world_size
from trainer.step.uncompiled import uncompiled
from trainer.step_log import StepRecord

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

logger = logging.getLogger(__name__)

#: Warm-up batches of a fit that counts FLOPs: the first one runs uncompiled, and the next one compiles.
_COUNTED = 2


class Throughput(Callback):
    """Records the training speed of each epoch, and the estimated time to the end of the run.

    - ``samples_per_second`` and ``batches_per_second``: of training alone, without what is validated inside the
      epoch, of all processes together. With another ``unit``, ``<unit>_per_second`` too.
    - ``data_seconds_share``: the share, 0 to 1, of that time that went by between batches: waiting for the data,
      plus the hooks that run after this callback's at a batch's end and before it at the next one's start.
    - ``eta_seconds``: time to the end of the run at the pace of this fit's epochs, validation and all callbacks
      included. The first epoch of a fit is the estimate only until there is another.
    - ``flops_per_second`` and ``flops_utilisation``: with ``flops_per_sample`` and ``peak_flops``. The second is
      the model FLOPs utilisation (MFU) of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    The first batch of a fit counts in no rate: it compiles, chooses kernels and fills the memory pool. An epoch
    that has no other batch records no rate, and one that a fit resumes inside records no ``eta_seconds``. On a
    CUDA device the clock is read once its queue is empty, after that first batch, at the end of each epoch and
    before a validation inside one. With `StepMetrics`, the last of the steps that come over together has the rates
    since the ones before it, of several processes as if each had as large a part as rank 0.

    Example::

        Trainer(model, optimizer, loss, callbacks=[Throughput()])
        Throughput(flops_per_sample=6 * 125e6 * 1024, peak_flops=989e12)  # 125M parameters, 1,024 tokens, an H100

        callbacks: {throughput: {unit: tokens, flops_per_sample: measure}}

    Args:
        flops_per_sample: Floating-point operations of forward and backward for one sample; for a transformer
            about 6 times parameters times tokens (Kaplan et al. 2020, arXiv:2001.08361). ``"measure"`` counts
            those of the fit's first batch by ``torch.utils.flop_counter``: matrix products, convolutions and
            attention, which is what takes time. A compiled model runs uncompiled in that batch and is compiled in
            the next one, so the second batch counts in no rate either. It can't count what is recorded as a CUDA
            graph.
        peak_flops: Peak operations per second of the device, in the precision that is used.
        unit: What to count besides samples, such as ``"tokens"``.
        count: Takes a batch, returns how many units it has, without reading from the device. None: the elements
            of its first tensor, which for a batch of token ids are its tokens, padding included. In a study file
            it is ``{_target_: parts.count, _partial_: true}``, and the callback ``trainer.callbacks.Throughput``.

    Raises:
        ValueError: A number is not above 0 and finite, ``peak_flops`` comes without ``flops_per_sample``, or
            ``count`` without a ``unit``.
    """

    priority = 60
    writes: tuple[str, ...] = (
        "samples_per_second",
        "batches_per_second",
        "data_seconds_share",
        "eta_seconds",
        "flops_per_second",
        "flops_utilisation",
    )
    transient = (
        *("_cold", "_started", "_last", "_seconds", "_counts", "_logged", "_waited", "_epochs", "_since"),
        *("_flops", "_counter", "_until_counted", "_processes", "_evaluating_since", "_of_all"),
    )

    def __init__(
        self,
        flops_per_sample: float | Literal["measure"] | None = None,
        peak_flops: float | None = None,
        unit: str = "samples",
        count: Callable[[Any], float] | None = None,
    ) -> None:
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_flops", peak_flops)):
            measured = name == "flops_per_sample" and value == "measure"
            if value is not None and not measured and (isinstance(value, str) or not 0 < value < math.inf):
                raise ValueError(f"{name} is {value}: give a finite number above 0, or leave it out")
        if count is not None and unit == "samples":
            raise ValueError("count is given, but not what it counts: give a unit, such as tokens")
        if count is not None and not callable(count):
            raise ValueError(f"count is {count!r}, no function: give one, or leave it out")
        if peak_flops is not None and flops_per_sample is None:
            raise ValueError(f"peak_flops is {peak_flops}, but flops_per_sample is missing: give both")
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self.unit = unit
        self.count = count or _elements
        self.writes = (*self.writes, f"{unit}_per_second")
        self._flops = None if flops_per_sample == "measure" else flops_per_sample
        self._counter: FlopCounterMode | None = None
        self._until_counted = ExitStack()  # contexts to close when counting stops
        if flops_per_sample == "measure":  # else no hook runs in a step
            self.__dict__["on_before_forward"] = self._start_counting
            self.__dict__["on_after_forward"] = self._stop_after_own_updates
            self.__dict__["on_after_backward"] = self._stop_after_backward
        self._cold = 1  # remaining warm-up batches of the fit
        self._resumed_inside = False
        self._processes = 1
        self._epochs = 0
        self._since = 0.0
        self._started = 0.0
        self._last = 0.0
        self._evaluating_since = 0.0
        self._seconds = 0.0
        self._waited = 0.0
        self._counts = _Counts()
        self._logged = _Counts()
        self._of_all = _Counts()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Forget an earlier fit."""
        self._processes = world_size()
        self._cold = 1
        if self.flops_per_sample == "measure":
            self._flops, self._cold = None, _COUNTED
        self._resumed_inside = trainer.state.batch_index > 0
        self._epochs = 0
        self._begin()
        self._since = self._started

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Start the epoch's clock."""
        self._begin()

    def on_train_batch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Count the time since the previous batch as waiting."""
        self._waited += perf_counter() - self._last

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Count the batch, unless it warms up the fit."""
        if self._cold:
            self._cold -= 1
            self._stop_counting(trainer)  # if the batch's backward pass was skipped
            _finish_work(trainer.device)
            self._begin()
            return
        batch, counts = trainer.state.batch, self._counts
        counts.batches += 1
        if not trainer.state.absent:  # else the samples are another process's
            counts.samples += batch_length(batch)
            counts.units += 0 if self.unit == "samples" else self.count(batch)
        self._last = perf_counter()

    def on_validation_start(self, trainer: TrainerView) -> None:
        """Pause the clock, which still runs in a validation inside an epoch."""
        if not self._seconds:  # at the end of an epoch, the device's work is already finished
            _finish_work(trainer.device)
        self._evaluating_since = perf_counter()

    def on_validation_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Continue the clock without the time of the validation."""
        passed = perf_counter() - self._evaluating_since
        self._started += passed
        self._last += passed

    def on_log_steps(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:  # noqa: ARG002
        """Add the rates of the latest steps to the last of them; the device has just been waited for."""
        counts = replace(self._counts, seconds=perf_counter() - self._started)
        since, self._logged = counts.since(self._logged), counts
        if since.batches and since.seconds > 0:
            # An estimate without communication: the other processes have parts of about the same size.
            samples, units = since.samples * self._processes, since.units * self._processes
            records[-1].values.update(self._rates(replace(since, samples=samples, units=units)))

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Stop the epoch's clock, and sum the samples and units of all processes."""
        _finish_work(trainer.device)
        self._seconds = perf_counter() - self._started
        parts = trainer.group.gather((self._counts.samples, self._counts.units))
        samples, units = map(sum, zip(*parts, strict=True))
        self._of_all = replace(self._counts, samples=samples, units=units, seconds=self._seconds)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Add the rates to the epoch's metrics."""
        if self._of_all.batches and self._seconds > 0:
            rates = self._rates(self._of_all)
            trainer.state.metrics.update(rates, data_seconds_share=self._waited / self._seconds)
        self._estimate(trainer)

    def _begin(self) -> None:
        self._started = self._last = perf_counter()
        self._seconds = self._waited = 0.0
        self._counts, self._logged, self._of_all = _Counts(), _Counts(), _Counts()

    def _rates(self, counts: _Counts) -> dict[str, float]:
        samples_per_second = counts.samples / counts.seconds
        rates = {
            "samples_per_second": samples_per_second,
            "batches_per_second": counts.batches / counts.seconds,
        }
        if self.unit != "samples":
            rates[f"{self.unit}_per_second"] = counts.units / counts.seconds
        if self._flops is not None:
            rates["flops_per_second"] = samples_per_second * self._flops
            if self.peak_flops is not None:
                rates["flops_utilisation"] = rates["flops_per_second"] / self.peak_flops
        return rates

    def _start_counting(self, trainer: TrainerView) -> None:  # noqa: ARG002
        if self._cold == _COUNTED and self._flops is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            with ExitStack() as until_counted:
                until_counted.enter_context(catch_warnings())
                filterwarnings(
                    "ignore", "Using `torch.compile.* global hooks"
                )  # the counter's, which are harmless
                until_counted.enter_context(self._counter)
                until_counted.enter_context(uncompiled())
                self._until_counted = until_counted.pop_all()

    def _stop_after_own_updates(self, trainer: TrainerView) -> None:
        """Stop after the forward events of a step that makes its own updates: they enclose all its passes."""
        if trainer.state.manual:
            self._stop_counting(trainer)

    def _stop_after_backward(self, trainer: TrainerView) -> None:
        if not trainer.state.manual:
            self._stop_counting(trainer)

    def _stop_counting(self, trainer: TrainerView) -> None:
        counter = self._left_counter()
        if counter is None:
            return
        self._flops = counter.get_total_flops() / batch_length(trainer.state.batch) or None
        if self._flops is None:
            logger.warning("no FLOPs are recorded: none were counted in the fit's first batch")

    def _left_counter(self) -> FlopCounterMode | None:
        """Stop the running counter, if there is one, and return it."""
        counter, self._counter = self._counter, None
        if counter is not None:
            self._until_counted.close()
        return counter

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Stop counting, and drop the incomplete count of the batch."""
        self._left_counter()

    def _estimate(self, trainer: TrainerView) -> None:
        state, now = trainer.state, perf_counter()
        self._epochs += 1
        first = self._epochs == 1
        if not (first and self._resumed_inside):
            per_epoch = (now - self._since) / max(1, self._epochs - 1)
            left = 0 if state.stop_reason else max(0, state.max_epochs - state.epoch)
            state.metrics["eta_seconds"] = left * per_epoch
        if first:  # its warm-up makes it unlike the later epochs
            self._since = now


@dataclass
class _Counts:
    """Amounts of training data, and the time that training on them took."""

    batches: int = 0
    samples: float = 0
    units: float = 0
    seconds: float = 0.0

    def since(self, before: _Counts) -> _Counts:
        return _Counts(
            self.batches - before.batches,
            self.samples - before.samples,
            self.units - before.units,
            self.seconds - before.seconds,
        )


def _elements(batch: Any) -> float:
    """The number of elements of a batch's first tensor."""
    return next((tensor.numel() for tensor in tensors_in(batch)), 0)


def _finish_work(device: torch.device) -> None:
    """Wait until the device has finished its work; on the CPU it always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
