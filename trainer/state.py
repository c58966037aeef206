"""TrainState: the progress of a run, which checkpoints store and through which callbacks talk to the Trainer."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from torch import Tensor
from torch.optim import Optimizer

from trainer.recorded import Metrics
from trainer.step.norms import norms_of, total_norm
from trainer.step_log import StepLog

Mode = Literal["min", "max"]

DIVERGED = "diverged"
EARLY_STOPPED = "early_stopping"
ERROR = "error"
INTERRUPTED = "interrupted"
PAUSED = "paused"
#: The stop reason of a run that only tries a few batches.
PREFLIGHT = "preflight"
PRUNED = "pruned"

BACKWARD = "backward"
BATCH = "batch"
EPOCH = "epoch"
OPTIMIZER_STEP = "optimizer_step"
SCHEDULER_STEP = "scheduler_step"
VALIDATION = "validation"
ZERO_GRAD = "zero_grad"
#: Stop reasons of a run that can resume from its checkpoint as if it had not been stopped.
CONTINUED: Final = frozenset({INTERRUPTED, PAUSED})
#: Actions that a hook may skip.
SKIPPABLE: Final = frozenset({BACKWARD, BATCH, EPOCH, OPTIMIZER_STEP, SCHEDULER_STEP, VALIDATION, ZERO_GRAD})
#: Fields of the state that a checkpoint stores unchanged.
_SAVED_AS_IT_IS: Final = (
    "epoch",
    "step",
    "batch_index",
    "epoch_start_step",
    "data_epoch",
    "data_batch",
    "cut_batches",
    "cut_samples",
    "batch_size",
    "pass_batch_size",
    "inherited",
)


@dataclass
class TrainState:
    """Progress of one run.

    An *epoch* is what lies between two validations: one pass over the training data, unless the trainer's
    ``validate_every`` says otherwise.

    Attributes:
        max_epochs: Epochs that the run has in all, resumed ones included; an estimate where it is bounded by
            something else.
        total_steps: Optimizer steps expected in all; None if the data has no length.
        batches_per_epoch: Batches of an epoch; None if unknown.
        batches_per_step: Batches per optimizer step; a callback that accumulates gradients sets it in ``setup``.
        drops_last_step: Whether the last, incomplete group of batches of an epoch makes no optimizer step; set in
            the same way.
        epoch: Finished epochs; inside the first epoch it is 0.
        step: Optimizer steps taken.
        batch_index: Finished batches of the running epoch; 0 between epochs.
        epoch_start_step: ``step`` when the running epoch began.
        data_epoch: Finished passes over the training data.
        data_batch: Finished batches of the running pass.
        cut_batches: Batches of the running pass that were trained when its batch size changed; 0 if it did not.
        cut_samples: Their samples.
        batch_size: The batch size last given to `set_batch_size`; None: the trainer's ``batching`` applies.
        pass_batch_size: The batch size of the running pass, since it last changed; 0 between passes.
        history: The metrics of each finished epoch, the latest last (the same object as ``metrics``).
        inherited: Of a fork: the number of epochs at the beginning of the history that its parent trained; else 0.
        user_state: Plain values that callbacks share; checkpointed.
        config: The config of the run, if a `ConfigSaver` has it; for callbacks that show it.
        stop_reason: Why the run is to end; None while it continues.
        stop_now: Whether the run is to end without a validation: after the running batch, or at once before the
            first batch of an epoch.
        failed: Whether an error or Ctrl-C ended the fit, in ``on_fit_end`` too.
        epoch_stopped: Whether the epoch is to end after the running batch.
        validation_skipped: Whether this epoch's validation was left out because a hook asked for that.
        own_times: Prefixes of metrics that an `Evaluator` measures during training and not at the end of each
            epoch, so that an epoch may lack them.
        checkpoint_requests: How many checkpoints hooks have asked for, and how many of them permanent.
        checkpoint_blocks: Names of the callbacks that block checkpoints, see `block_checkpoints`.
        skips: What hooks asked to leave out of the running batch, or of the end of this epoch.
        batch: The running batch; hooks may replace it. After ``on_fit_end`` it, its outputs and its loss are None.
        outputs: What the step returned as outputs for that batch; hooks may replace it.
        loss: Its loss, a scalar tensor on the device; hooks may replace it.
        evaluating: The prefix of the metrics of the running or latest evaluation: ``"val"``, ``"test"``, and for
            the second and further data sets ``"val_<name>"``.
        evaluated: The metrics of the latest evaluation, from ``on_validation_end`` and ``on_test_end`` on.
        weight: The number that the loss was divided by, or a tensor of it on the device: samples, elements,
            tokens, or the summed class weights of the targets. None if the loss is a sum over the batch.
        step_weight: As ``weight``, for an optimizer step of several batches; a callback that accumulates gradients
            sets it in ``on_before_optimizer_step``.
        loss_of_all: With several processes: whether the loss, a sum, is the sum over all of them in each.
        absent: With several processes: whether this one has no sample of the batch, so that its loss does not
            count.
        gradient_share: The factor of the batch's gradients as they are added to accumulated ones: 1 for each new
            batch; a callback that accumulates gradients sets it in ``on_before_backward``.
        scalars: What the step returned besides loss, outputs and weight, by name: tensors on the device, or
            numbers.
        skipped_step: In ``on_train_batch_end``: whether the batch did not change the weights, because a hook
            skipped the optimizer step (`GradientAccumulation` does until its group is full) or the gradients
            overflowed in fp16.
        manual: Whether the step makes its own optimizer updates, see `trainer.Update`.
        optimizer_name: The name of the optimizer that makes an update; empty if all step together.
        evaluation: How often the optimizer has evaluated its closure again in the running step; 0 unless it is an
            optimizer such as LBFGS.
        norms: The norms of the batch's gradients by optimizer, once `gradient_norms` was called.
        step_log: The file of single steps, during a fit with `trainer.callbacks.StepMetrics`; else None.
    """

    max_epochs: int
    total_steps: int | None = None
    batches_per_epoch: int | None = None
    batches_per_step: int = 1
    drops_last_step: bool = False
    epoch: int = 0
    step: int = 0
    batch_index: int = 0
    epoch_start_step: int = 0
    data_epoch: int = 0
    data_batch: int = 0
    cut_batches: int = 0
    cut_samples: int = 0
    batch_size: int | None = None
    pass_batch_size: int = 0
    history: list[Metrics] = field(default_factory=list)
    inherited: int = 0
    user_state: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None
    stop_now: bool = False
    failed: bool = False
    epoch_stopped: bool = False
    validation_skipped: bool = False
    own_times: set[str] = field(default_factory=set)
    checkpoint_requests: tuple[int, int] = (0, 0)
    checkpoint_blocks: set[str] = field(default_factory=set)
    skips: set[str] = field(default_factory=set)
    batch: Any = None
    outputs: Any = None
    loss: Tensor | None = None
    weight: Tensor | float | None = 0.0
    step_weight: Tensor | float | None = None
    loss_of_all: bool = False
    absent: bool = False
    gradient_share: Tensor | float = 1.0
    scalars: Mapping[str, Any] = field(default_factory=dict)
    skipped_step: bool = False
    manual: bool = False
    optimizer_name: str = ""
    evaluation: int = 0
    norms: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    step_log: StepLog | None = None
    evaluating: str = ""
    evaluated: Metrics = field(default_factory=Metrics)
    _metrics: Metrics = field(default_factory=Metrics)

    @property
    def metrics(self) -> Metrics:
        """The latest epoch's metrics by name; callbacks add theirs in ``on_epoch_end``.

        A value that is added becomes a float; one that is not a real number raises `trainer.recorded.MetricError`.
        """
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Mapping[str, Any]) -> None:
        before, self._metrics = self._metrics, metrics if isinstance(metrics, Metrics) else Metrics(metrics)
        if self.history and self.history[-1] is before:
            self.history[-1] = self._metrics

    @property
    def is_new(self) -> bool:
        """Whether the run is at its very beginning: nothing was trained, and nothing was resumed."""
        return not self.epoch and not self.batch_index

    @property
    def has_trained(self) -> bool:
        """Whether this run itself has trained; a new run and a fork at its beginning have not."""
        return self.epoch > self.inherited or self.batch_index > 0

    @property
    def grad_norm(self) -> Tensor | None:
        """L2 norm of all gradients of the batch's latest optimizer step before clipping, as a tensor.

        None if no callback measures it. `GradientMonitor`, `StabilityMonitor` and `GradientClipping` do; a
        callback of your own does by calling `gradient_norms`.
        """
        return next(reversed(self.grad_norms.values()), None)

    @property
    def grad_norms(self) -> dict[str, Tensor]:
        """`grad_norm` by the name to log it under: ``grad_norm``; of several optimizers ``grad_norm_<name>``."""
        return {
            f"grad_norm_{name}" if name else "grad_norm": total_norm(norms)
            for name, norms in self.norms.items()
            if norms
        }

    def gradient_norms(self, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """The L2 norm of each gradient of ``trainer.optimizer``; measured only once a step.

        With an optimizer that takes a closure, each evaluation of the closure has its own norms; after the step
        they are those of the first evaluation.

        Call it in ``on_before_optimizer_step``, with a priority between `GradientAccumulation` (2), which turns
        the sum of the gradients into their mean, and `GradientClipping` (20).
        """
        norms = self.norms.get(self.optimizer_name)
        if norms is None:
            norms = self.norms[self.optimizer_name] = norms_of(optimizer)
        return norms

    def steps_of(self, batches: int) -> int:
        """The number of optimizer steps that a number of batches of one epoch make."""
        whole, rest = divmod(batches, self.batches_per_step)
        return whole + (rest > 0 and not self.drops_last_step)

    def stop(self, reason: str, *, now: bool = False) -> None:
        """Ask the run to end: after this epoch, or with ``now`` after this batch.

        Asked with ``now`` in ``on_train_epoch_start``, the run ends before the first batch.

        Of several reasons the first one stays. But ``"diverged"`` outranks every other, and every other outranks
        ``"interrupted"`` and ``"paused"``: a run that would have ended in this epoch anyway is not to resume. If
        ``now`` ended the run inside an epoch, ``"interrupted"`` stays.
        """
        cut = self.stop_now and self.batch_index > 0
        self.stop_reason = prevailing((self.stop_reason, reason), cut=cut)
        self.stop_now = self.stop_now or now

    def stop_epoch(self) -> None:
        """Ask the epoch to end after this batch; validation and ``on_epoch_end`` follow as usual."""
        self.epoch_stopped = True

    def skip(self, action: str) -> None:
        """Ask the trainer to leave out an action.

        ``backward``, ``optimizer_step``, ``scheduler_step`` and ``zero_grad`` are actions of the running batch,
        ``validation`` is one of this epoch. ``batch``, asked in ``on_train_batch_start``, leaves out the whole
        batch: nothing is computed or recorded, and the batch counts as trained. ``epoch``, asked in
        ``on_train_epoch_start``, leaves out this pass over the data and its validation; the epoch counts, its
        scheduler steps and ``on_epoch_end`` fires.

        If a hook asks before the action's ``on_before_…`` event, none of the action's events fires. If it asks in
        that event, the other callbacks still get the event. No callback can take back a skip that another one
        asked for, so the order in which callbacks ask does not matter.

        Raises:
            ValueError: There is no such action.
        """
        if action not in SKIPPABLE:
            close = difflib.get_close_matches(action, SKIPPABLE, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(sorted(SKIPPABLE))}"
            raise ValueError(f"{action!r} can't be skipped: {hint}")
        self.skips |= {action, VALIDATION} if action == EPOCH else {action}

    def request_checkpoint(self, *, permanent: bool = False) -> None:
        """Ask a `Checkpoint` to save after this batch or epoch, regardless of its intervals and of blocks.

        Args:
            permanent: Whether the file is never removed.
        """
        asked, kept = self.checkpoint_requests
        self.checkpoint_requests = (asked + 1, kept + permanent)

    def block_checkpoints(self, name: str) -> None:
        """Block ordinary checkpoints until `unblock_checkpoints` was called for each name, or until the fit ends.

        Permanent and requested checkpoints are still written, and so is the one at the end of training. Blocks are
        not saved: a callback that needs one in a resumed run calls this in ``on_fit_start``.
        """
        self.checkpoint_blocks.add(name)

    def unblock_checkpoints(self, name: str) -> None:
        """Remove the block of that name, if there is one."""
        self.checkpoint_blocks.discard(name)

    def metric(self, name: str) -> float | None:
        """This epoch's value of a metric.

        None if validation was skipped, or if an `Evaluator` did not measure the metric in this epoch.

        Raises:
            KeyError: No part of the training records it.
        """
        if self.is_unknown(name):
            known = dict.fromkeys((*self.metrics, *self._measured_beside(name)))
            raise KeyError(f"no metric is called {name!r}; {recorded_instead(name, known)}")
        return self.metrics.get(name)

    def is_unknown(self, name: str) -> bool:
        """Whether no part of the training records this metric, judged by this epoch."""
        if name in self.metrics or self.validation_skipped:
            return False
        if (prefix := self._own_prefix(name)) is None:
            return True
        measured = self._measured_beside(name)
        return f"{prefix}_loss" in measured and name not in measured  # without a loss nothing was measured yet

    def _own_prefix(self, name: str) -> str | None:
        """The prefix in ``own_times`` with which a metric's name begins; None if there is none."""
        return next((prefix for prefix in self.own_times if name.startswith(f"{prefix}_")), None)

    def _measured_beside(self, name: str) -> dict[str, None]:
        """The names, in any epoch, of the metrics with the same prefix in ``own_times`` as ``name``."""
        prefix = self._own_prefix(name)
        if prefix is None:
            return {}
        return dict.fromkeys(other for epoch in self.history for other in epoch if other.startswith(f"{prefix}_"))

    def forget_batch_skips(self) -> None:
        """Forget the skips of the running batch; a skip of the validation stays until the validation is due."""
        self.skips &= {VALIDATION}

    def state_dict(self) -> dict[str, Any]:
        """Progress as plain values; without a reason to stop that is an interruption or a pause."""
        return {
            **{name: getattr(self, name) for name in _SAVED_AS_IT_IS},
            "history": [dict(metrics) for metrics in self.history],
            "user_state": self.user_state,
            "epoch_stopped": self.epoch_stopped and self.batch_index > 0,
            # Only this skip outlives its batch.
            "skip_validation": VALIDATION in self.skips,
            # Inside an epoch, no request to stop has taken effect yet.
            "stop_reason": None if self.batch_index or self.stop_reason in CONTINUED else self.stop_reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved progress; ``max_epochs`` keeps the value of this run."""
        # Checkpoints up to version 7 have no batch sizes.
        saved = {"batch_size": None, "pass_batch_size": 0, **state}
        for name in _SAVED_AS_IT_IS:
            setattr(self, name, saved[name])
        self.history = [Metrics(metrics) for metrics in state["history"]]
        self.metrics = self.history[-1] if self.history else Metrics()
        self.user_state = dict(state["user_state"])
        self.stop_reason = state["stop_reason"]
        self.stop_now = False
        self.epoch_stopped = state["epoch_stopped"]
        self.skips = {VALIDATION} if state["skip_validation"] else set()


def prevailing(reasons: Iterable[str | None], *, cut: bool) -> str | None:
    """The stop reason that counts, of several in the order in which they were given; see `TrainState.stop`.

    Args:
        reasons: The reasons; None entries are ignored.
        cut: Whether the run ends inside an epoch; then an interrupted run must stay one that resumes.
    """

    def place(reason: str) -> int:
        if reason in {DIVERGED, PAUSED}:
            return 0 if reason == DIVERGED else 3
        return 2 if reason == INTERRUPTED and not cut else 1

    return min((reason for reason in reasons if reason is not None), key=place, default=None)


def recorded_instead(name: str, recorded: Iterable[str]) -> str:
    """The part of an error text about a metric that nothing records: which ones are recorded, and what to do."""
    names = tuple(recorded)
    validates = any(each.startswith("val_") for each in names)
    fix = "" if validates or not name.startswith("val_") else ": give fit validation data, or name one of these"
    return f"recorded are {', '.join(names)}{fix}"


def is_better(value: float, best: float, mode: Mode) -> bool:
    """Whether ``value`` beats ``best``; a non-finite value beats nothing."""
    if not math.isfinite(value):
        return False
    return value < best if mode == "min" else value > best


def best_epoch(history: Sequence[Mapping[str, float]], metric: str, mode: Mode, *, after: int = 0) -> int | None:
    """Number (from 1) of the epoch with the best finite value, the earliest of equals; None if there is none.

    Args:
        history: The metrics of each epoch.
        metric: The name of the metric.
        mode: Whether lower or higher values are better.
        after: How many epochs at the beginning do not count: those that a fork has from its parent.
    """
    found: int | None = None
    best = math.inf if mode == "min" else -math.inf
    for number, metrics in enumerate(history[after:], start=after + 1):
        if is_better(metrics.get(metric, math.nan), best, mode):
            found, best = number, metrics[metric]
    return found
