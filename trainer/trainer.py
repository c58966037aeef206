"""Trainer: the training loop. It fires events, keeps the state, and leaves everything else to callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.callback import Callback, LogDispatch
from trainer.checkpoint.contents import contents, contents_here, rank_share, restore
from trainer.checkpoint.fork import hyperparameters
from trainer.checkpoint.resume import find_start
from trainer.data.options import BatchOptions
from trainer.data.plan import Plan
from trainer.data.random_state import kept_rng, rng_state
from trainer.data.stream import TrainStream
from trainer.declared import UndeclaredState, warn_of_workers
from trainer.deterministic import DeterministicMode
from trainer.distributed.by_strategy import group_of_process
from trainer.distributed.callbacks import callbacks_of
from trainer.distributed.group import Strategy
from trainer.distributed.rank_error import reason_after
from trainer.evaluation import Evaluation
from trainer.foreign import refuse_flags
from trainer.metrics.epoch import EpochMetrics
from trainer.metrics.objects import Metric
from trainer.recorded import MetricError, Metrics
from trainer.runner import CallbackRunner, attempt, fire_isolated, name_of, raise_first
from trainer.state import CONTINUED, EPOCH, ERROR, VALIDATION, TrainState
from trainer.step.choice import compute_class
from trainer.step.fused import leave_fused
from trainer.step.modes import begin_training, enter_training, kept_modes
from trainer.step.optimizers import Interval, as_optimizer, as_scheduler, check_intervals, learning_rates
from trainer.step.parts import Parts, choose_step, module_of_step
from trainer.step.precision import Kind, Precision
from trainer.step.supervised import Step


class Trainer:
    """Trains a model, epoch by epoch, with callbacks.

    Args:
        model: The model; moved to ``device``.
        optimizer: Its optimizer, built over the model's parameters, or several by name (see `trainer.Update`);
            its fused form is used if torch has one and neither ``fused`` nor ``foreach`` was given.
        loss: Takes (outputs, targets), returns the mean loss over the batch; None if ``step`` is given. A loss or
            step that is a module is moved to ``device``.
        step: Takes (model, batch), returns the loss or a mapping (see `trainer.step`); replaces ``loss``. A step
            with a parameter ``update`` makes its own optimizer updates, see `trainer.Update`.
        metrics: By name: a function of (outputs, targets) that returns the mean over the batch, an object with
            ``update``, ``compute`` and ``reset``, or a `trainer.WholeSet`. Recorded as ``train_<name>``,
            ``val_<name>``, ``test_<name>``.
        scheduler: Learning-rate scheduler of the optimizer, or several by name; an optimizer may have two.
        scheduler_interval: When the scheduler steps: after each ``"epoch"`` or optimizer ``"step"``; or by name.
        scheduler_monitor: The metric that a ReduceLROnPlateau follows: a loss, one of ``metrics``, or a metric of
            the step. Metrics of callbacks are not possible: the scheduler steps before they are recorded.
        callbacks: The user's callbacks, or a `trainer.CallbackRunner` of them.
        core_callbacks: Callbacks of the code that builds the trainer; before the user's at equal priority.
        max_epochs: Number of passes over the training data; 10 if ``max_steps`` is not given either. See
            `trainer.data.plan.Plan` for this argument and the next two.
        max_steps: Number of optimizer steps; the run ends at whichever limit comes first.
        validate_every: Validate every so many steps, or after this fraction of a pass; None: after each pass.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``, see `trainer.step.precision.Precision`.
        compile: Whether to run the model through torch.compile; a mapping gives the arguments of torch.compile.
        deterministic: Whether torch may use only deterministic algorithms, see `trainer.deterministic`.
        cuda_graph: Whether to record the step once and replay it for each batch, see `trainer.step.graph`.
        strategy: With several processes, whether each holds the whole model (``"ddp"``) or a part of it
            (``"fsdp"``).
        sync_batchnorm: With several processes, whether batch norm sees the whole batch or each process's part.
        batching: How data sets are batched.
        seed: Seed of data order and of every random number drawn while training.
        device: Where to train. None: the first CUDA device, or the CPU if there is none. With several processes,
            ``"cuda"`` is the CUDA device with the process's number on its machine.

    Raises:
        ValueError: Neither or both of ``loss`` and ``step`` are given; the optimizer belongs to another model; two
            optimizers that step together share a parameter; the name of a metric is taken; a length, interval,
            precision, strategy or device is invalid; or a ReduceLROnPlateau is to step after each optimizer step.
        TypeError: A metric is neither a function nor an object with those methods.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        step: Step | None = None,
        metrics: Mapping[str, Metric] | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler] | None = None,
        scheduler_interval: Interval | Mapping[str, Interval] = "epoch",
        scheduler_monitor: str = "val_loss",
        callbacks: Iterable[Callback] | CallbackRunner = (),
        core_callbacks: Iterable[Callback] = (),
        max_epochs: int | None = None,
        max_steps: int | None = None,
        validate_every: float | None = None,
        precision: Kind = "fp32",
        compile: bool | Mapping[str, Any] = False,  # noqa: A002 - what torch calls it
        cuda_graph: bool = False,
        strategy: Strategy = "ddp",
        sync_batchnorm: bool = True,
        deterministic: bool = False,
        batching: BatchOptions | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if max_epochs is None and max_steps is None:
            max_epochs = 10
        self.plan = Plan(max_epochs=max_epochs, max_steps=max_steps, validate_every=validate_every)
        self.group = group_of_process(strategy)
        self.device = self.group.device(device)
        self._compute_class = partial(compute_class, self.device, cuda_graph=cuda_graph)
        self.model = model
        self.optimizer = as_optimizer(optimizer)
        self.built = hyperparameters(self.optimizer)
        self.step = choose_step(loss, step)
        if (module := module_of_step(self.step)) is not None:
            module.to(self.device)
        self.metrics: Mapping[str, Metric] = dict(metrics or {})
        self.scheduler = as_scheduler(scheduler, scheduler_interval, self.optimizer)
        self.scheduler_interval = scheduler_interval
        self.scheduler_monitor = scheduler_monitor
        self.precision = Precision(precision, self.device)
        self.batching = batching or BatchOptions()
        self.seed = seed
        self.state = TrainState(max_epochs=max_epochs or 0)
        self.recorder = EpochMetrics(self.device, self.metrics, self.group)
        own: list[Callback] = [DeterministicMode()] if deterministic else []
        own += [*callbacks_of(self.group, sync_batchnorm=sync_batchnorm), LogDispatch()]
        self.callbacks = CallbackRunner(callbacks, core=[*own, *core_callbacks])
        self._parts = Parts(None if self.group.strategy == "fsdp" else self.device, compile)
        self.evaluation = Evaluation(self)
        self._hooks = self.callbacks.hooks
        self._ready(training=False)
        self._stream: TrainStream | None = None
        self.running = False
        self._ended_for: str | None = None  # the stop reason of a run whose last events then failed
        # States of the generators where a run stopped inside an epoch; restored when the epoch resumes.
        self.epoch_rng: dict[str, Any] | None = None
        self.epoch_shares: Sequence[Any] = ()

    # ---- the three things it does

    def fit(self, train: Any, val: Any = None, *, ckpt: str | Path | None = None) -> TrainState:
        """Train until the last epoch or step, or until a callback asks to stop; resumes from a loaded state.

        It may be called again after an error; a batch whose loss is recorded is not trained again. At the end it
        restores the global random generators and the modes of all modules, and ends DataLoader workers.

        Args:
            train: Training data, see `trainer.data.batches.make_batches`.
            val: Validation data, or several data sets by name. The metrics of the first, or only, set are called
                ``val_…``, those of each further set ``val_<name>_…``.
            ckpt: The checkpoint to resume from: ``"last"`` or ``"best"`` of the trainer's `Checkpoint` (without
                one yet, training starts anew), or a file or folder, see `trainer.checkpoint.resume`.

        Returns:
            The state, with the history of all epochs and the reason why training ended.

        Raises:
            Exception: Whatever training or a callback raised, type unchanged.
            ValueError: At the end of an epoch, a ReduceLROnPlateau finds no metric ``scheduler_monitor``.
            RuntimeError: It is called from inside a run of this trainer.
            CheckpointError: ``ckpt`` can't be read.
        """
        if self.running:
            raise RuntimeError("this trainer is running: a hook can't start a fit of it")
        with self.group.session(self.device, rank_share(self), partial(contents_here, self)):
            self._fit(train, val, ckpt)
        return self.state

    def validate(self, data: Any) -> dict[str, float]:
        """Evaluate without training, also during a fit; returns the ``val_…`` metrics. ``data`` as in `fit`."""
        return self.evaluation.alone(data, "val", "validation")

    def test(self, data: Any) -> dict[str, float]:
        """Evaluate the test set, as `validate` does; returns the ``test_…`` metrics."""
        return self.evaluation.alone(data, "test", "test")

    def predict(self, data: Any, path: Path | str | None = None) -> Any:
        """Outputs for ``data``, in order, or written to a file: see `trainer.evaluation.Evaluation.predict`."""
        return self.evaluation.predict(data, path)

    @property
    def finished(self) -> bool:
        """Whether all epochs or steps have been trained."""
        return self.plan.reached(self.state)

    # ---- what callbacks use

    def fire(self, event: str, *args: Any) -> None:
        """Call the hooks of ``event`` in order, each with this trainer and ``args``."""
        try:
            for hook in self._hooks[event]:
                if (returned := hook(self, *args)) is not None:
                    refuse_flags(hook, returned)
        except MetricError as error:
            if error.source:
                raise
            raise MetricError(error.message, name_of(hook)) from error

    def step_optimizer(self) -> None:
        """Step the optimizer, with its events, and a scheduler that steps with it."""
        self.compute.step_optimizer()

    def run_alone(self, work: Callable[[], None]) -> None:
        """Call ``work``, which must not train, between the events ``setup`` and ``teardown``."""
        self._hooks = self.callbacks.resolve()
        self._ready(training=False)
        self._guarded(work, training=False)

    def set_batch_size(self, batch_size: int, *, now: bool = False) -> None:
        """Change the batch size of training from the next pass on, or with ``now`` from the next batch on.

        A checkpoint stores it.

        Raises:
            ValueError: The training data is already batched (a DataLoader), or it is called during a pass, or with
                ``now`` during a batch.
        """
        batching = replace(self.batching, batch_size=batch_size)
        if self._stream is not None:
            self._stream.rebatch(batching, now=now)
            self.plan.lay_out(self.state, self._stream.length)
        elif not self.state.data_batch:
            self.state.pass_batch_size = 0
        self.batching, self.state.batch_size = batching, batch_size

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs, in tensors and plain values."""
        return contents(self)

    def load_state_dict(self, checkpoint: dict[str, Any], *, fork: bool = False) -> None:
        """Resume from a checkpoint.

        Args:
            checkpoint: What `state_dict` of this run returned; with ``fork`` that of another run, after an epoch.
            fork: Begin a new run from there, with this trainer's hyperparameters and seed; see
                `trainer.checkpoint.fork.forked`. The epochs so far then belong to the other run
                (``state.inherited``), and are never among this run's best.

        Raises:
            ValueError: The checkpoint has an unknown version, or other names of optimizers or schedulers, or can't
                be forked.
        """
        self._hooks = self.callbacks.resolve()
        self._ended_for = None
        restore(self, checkpoint, fork=fork)

    # ---- the loop

    def _fit(self, train: Any, val: Any, ckpt: str | Path | None) -> None:
        if ckpt is not None:
            self._load(ckpt)
        if self.state.batch_size is not None:
            self.batching = replace(self.batching, batch_size=self.state.batch_size)
        shard = self.group.shard(self.state)
        stream = self._stream = TrainStream(train, self.batching, self.device, self.state, self.seed, shard)
        self.evaluation.take(stream.validated(val))
        self.plan.lay_out(self.state, stream.length)
        ended_for, self._ended_for = self._ended_for, None
        if self.state.stop_reason in CONTINUED | {ERROR}:
            self.state.stop_reason = ended_for
        self.state.stop_now = self.state.failed = False
        self._hooks = self.callbacks.resolve()
        warn_of_workers(train, self.callbacks.callbacks)
        self._ready(training=True)
        errors: list[BaseException] = []
        attempt(errors, self._train, stream)
        for close in (stream.close, self.evaluation.close):
            attempt(errors, close)
        if not self.state.data_batch:  # else the next fit continues the pass
            self._stream = None
        raise_first(errors)

    def _train(self, stream: TrainStream) -> None:
        with kept_rng(), kept_modes(self.model):
            self._guarded(lambda: self._run_epochs(stream), training=True)

    def _load(self, ckpt: str | Path) -> None:
        """Resume from a checkpoint; a separate function, so that its tensors are freed before training."""
        device = self.device if self.group.size == 1 else torch.device("cpu")  # it is sent to the other processes
        found = self.group.from_first(lambda: find_start(ckpt, self.callbacks.callbacks, device))
        if found is not None:
            self.load_state_dict(found)

    def _guarded(self, work: Callable[[], None], *, training: bool) -> None:
        """Run ``work`` after ``setup``; ``on_fit_end`` (of a fit) and ``teardown`` always follow."""
        errors: list[BaseException] = []
        try:
            attempt(errors, self._work, work, training)
            if training:
                attempt(errors, self._end_training, errors)
            fire_isolated(errors, self._hooks["teardown"], self)
        finally:
            self.running = False
        raise_first(errors)

    def _work(self, work: Callable[[], None], training: bool) -> None:
        self.running = True
        self.state.batches_per_step, self.state.drops_last_step = 1, False
        self.fire("setup")
        if training and self._stream is not None:
            self.plan.lay_out(self.state, self._stream.length)
            enter_training(self.model)
            self.fire("on_fit_start")
        self._ready(training=training)  # a hook may have replaced model, optimizer or scheduler
        if training:
            begin_training(self.model)
        work()

    def _end_training(self, errors: list[BaseException]) -> None:
        if errors:
            self._note_failure(errors[0])
            self.state.forget_batch_skips()
            # If the device is lost, these may fail too.
            attempt(errors, self._keep_generators)
            attempt(errors, self.precision.forget_step)
            fire_isolated(errors, self._hooks["on_exception"], self, errors[0])
        fire_isolated(errors, self._hooks["on_fit_end"], self)
        attempt(errors, self.group.leave, *((errors[0], self._reason_after(errors[0])) if errors else ()))
        if errors and not self.state.failed:  # `teardown` hooks must see that the fit is not complete
            reason = self.state.stop_reason
            self._ended_for = None if reason in CONTINUED else reason
            self._note_failure(errors[0])
        # Free their memory for what the process does next, such as another try after it ran out of memory.
        self.state.batch = self.state.outputs = self.state.loss = None
        self.state.scalars = {}

    def _note_failure(self, error: BaseException) -> None:
        self.state.failed = True
        self.state.stop_reason = self._reason_after(error)

    def _reason_after(self, error: BaseException) -> str:
        return reason_after(error, self.state.stop_reason)

    def _keep_generators(self) -> None:
        if self.state.batch_index and self.epoch_rng is None:
            self.epoch_rng = rng_state()

    def _run_epochs(self, stream: TrainStream) -> None:
        undeclared = UndeclaredState(self.callbacks.callbacks, self.step)
        while self._next_epoch(stream):
            self._train_epoch(stream)
            if self.state.stop_now:
                self.epoch_rng = rng_state() if self.state.batch_index else None
                if self.group.size > 1 and self.epoch_rng is not None:
                    self.epoch_shares = self.group.gather(rank_share(self)())[1:]
                break
            self.fire("on_train_epoch_end")
            self._settle()
            self.state.validation_skipped = VALIDATION in self.state.skips
            if not self.state.validation_skipped:
                self.evaluation.validate()
            self._end_epoch()
            undeclared.check()

    def _next_epoch(self, stream: TrainStream) -> bool:
        """Prepare the next epoch, or the rest of a resumed one; returns whether there is one."""
        inside = self.state.batch_index > 0
        if self.state.stop_reason is not None or (self.finished and not inside):
            return False
        self._settle()
        stream.start_epoch(self.epoch_rng)
        self.epoch_rng, self.epoch_shares = None, ()
        self.plan.lay_out(self.state, stream.length)  # the batch size may have changed
        return inside or not self.finished

    def _train_epoch(self, stream: TrainStream) -> None:
        state = self.state
        if state.batch_index == 0:
            state.epoch_start_step = state.step
            state.epoch_stopped = False
            self.recorder.reset()
            self.fire("on_train_epoch_start")
            if state.stop_now:  # a resumed run starts this epoch again
                return
            if EPOCH in state.skips:
                stream.skip_pass(self.plan)
                return
        while not self._train_pass(stream):
            stream.start_pass()
            self.plan.lay_out(state, stream.length)  # the batch size may have changed

    def _train_pass(self, stream: TrainStream) -> bool:
        """Train to the end of the pass or of the epoch; returns whether the epoch has ended."""
        state, plan, train = self.state, self.plan, self.compute.train
        # A run that stopped at or after the last batch of an epoch resumes after that batch.
        passed = not state.data_batch and (plan.validate_every is None or self.finished)
        if not (state.batch_index and (passed or plan.ends_epoch(state))):
            for batch in stream.rest_of_pass():
                train(batch)
                if plan.ends_epoch(state):
                    break
            else:
                stream.end_pass()
                return plan.validate_every is None or self.finished
        whole_pass = plan.validate_every is None and state.epoch_stopped
        if state.data_batch and not state.stop_now and (whole_pass or state.data_batch == stream.length):
            stream.end_pass()
        return True

    def _end_epoch(self) -> None:
        state = self.state
        metrics = Metrics(self.recorder.compute())
        metrics.update(learning_rates(self.optimizer))
        state.epoch += 1
        state.batch_index = 0
        self.recorder.reset()
        # The same object, so that metrics which callbacks add are in the history and in checkpoints.
        state.history.append(metrics)
        state.metrics = metrics
        try:
            self.compute.step_schedulers("epoch")
            state.skips.clear()
            self.fire("on_epoch_end")
        finally:
            state.skips.clear()  # the rest came too late to skip anything

    def _settle(self) -> None:
        """Take over a model, optimizer or scheduler that a hook has replaced since the last `_ready`."""
        if self._parts.differ(self.model, self.optimizer, self.scheduler):
            self._ready(training=True)

    def _ready(self, *, training: bool) -> None:
        """Build the `Compute` for the present model, optimizer and scheduler."""
        self.group.take(self.model, self.optimizer, self.device)
        self._parts.take(self.model, self.optimizer, self.scheduler)
        leave_fused(self.optimizer)
        check_intervals(self.scheduler, self.scheduler_interval)
        self.compute = self._compute_class(self.optimizer, self.step)(
            self,
            self._parts.called,
            self.step,
            self.precision,
            scheduler_interval=self.scheduler_interval,
            scheduler_monitor=self.scheduler_monitor,
        )
        if training:
            self.compute.prepare(self.callbacks.callbacks)
