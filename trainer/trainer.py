"""Trainer: the loop. It fires events, keeps the state, and leaves everything else to callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.callback import Callback
from trainer.data import Batches, BatchOptions, batch_length, make_batches
from trainer.fused import use_fused
from trainer.metrics import EpochMetrics
from trainer.runner import CallbackRunner
from trainer.seeding import derive_seed, rng_state, seed_all, set_rng_state
from trainer.state import ERROR, INTERRUPTED, TrainState
from trainer.step import Metric, Step, SupervisedStep, split_output

logger = logging.getLogger(__name__)

Interval = Literal["epoch", "step"]

CHECKPOINT_VERSION = 1


class Trainer:
    """Trains a model, epoch by epoch, with callbacks.

    Args:
        model: The model; moved to ``device``.
        optimizer: Its optimizer, built over the model's parameters; used in its fused form where torch has one and
            ``fused`` or ``foreach`` were not given.
        loss: Takes (outputs, targets), returns the mean loss over the batch. Or None with ``step``.
        step: Takes (model, batch), returns the loss or a mapping (see `trainer.step`). Replaces ``loss``.
        metrics: By name, functions of (outputs, targets) that return the mean over the batch; recorded as
            ``train_<name>``, ``val_<name>``, ``test_<name>``.
        scheduler: Learning-rate scheduler over the optimizer.
        scheduler_interval: Whether the scheduler steps per ``"epoch"`` or per optimizer ``"step"``.
        scheduler_monitor: The metric that a ReduceLROnPlateau follows.
        callbacks: The user's callbacks.
        core_callbacks: Callbacks of whoever builds the trainer; before the user's at equal priority.
        max_epochs: Epochs to train in all.
        batching: How data sets are batched.
        seed: Seed of data order and of every random number drawn while training.
        device: Where to train; None: the first CUDA device where there is one, else the CPU.

    Raises:
        ValueError: Neither or both of ``loss`` and ``step`` are given, or ``max_epochs`` < 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        step: Step | None = None,
        metrics: Mapping[str, Metric] | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_interval: Interval = "epoch",
        scheduler_monitor: str = "val_loss",
        callbacks: Iterable[Callback] = (),
        core_callbacks: Iterable[Callback] = (),
        max_epochs: int = 10,
        batching: BatchOptions | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if max_epochs < 0:
            raise ValueError(f"max_epochs is {max_epochs}: give 0 or more")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model.to(self.device)
        self.optimizer = optimizer
        use_fused(optimizer)
        self.step = _choose_step(loss, step)
        self.metrics = dict(metrics or {})
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.scheduler_monitor = scheduler_monitor
        self.batching = batching or BatchOptions()
        self.seed = seed
        self.state = TrainState(max_epochs=max_epochs)
        self.recorder = EpochMetrics(self.device)
        self.callbacks = CallbackRunner(callbacks, core=core_callbacks)
        self._hooks = self.callbacks.resolve()
        # RNG state where a run was stopped inside an epoch, put back when that epoch goes on.
        self._epoch_rng: dict[str, Any] | None = None

    # ---- the three things it does

    def fit(self, train: Any, val: Any = None) -> TrainState:
        """Train until ``max_epochs`` or a stop request; goes on from a loaded state.

        Args:
            train: Training data, see `trainer.data.make_batches`.
            val: Validation data; without it no ``val_…`` metric is recorded.

        Returns:
            The state, with the history of all epochs and the reason of the end.

        Raises:
            Exception: Whatever training or a callback raised, type unchanged.
        """
        train_batches = make_batches(train, self.batching, self.device, train=True, seed=self.seed)
        val_batches = None if val is None else self._eval_batches(val)
        if self.state.stop_reason in {INTERRUPTED, ERROR}:
            self.state.stop_reason = None
        self.state.stop_now = False
        self._hooks = self.callbacks.resolve()
        self._guarded(lambda: self._run_epochs(train_batches, val_batches), training=True)
        return self.state

    def validate(self, data: Any) -> dict[str, float]:
        """Evaluate without training: ``val_…`` metrics of ``data``."""
        return self._evaluate_alone(data, "val", "validation")

    def test(self, data: Any) -> dict[str, float]:
        """Evaluate the test set: ``test_…`` metrics of ``data``."""
        return self._evaluate_alone(data, "test", "test")

    def fire(self, event: str, *args: Any) -> None:
        """Call the hooks of ``event`` in order, each with this trainer and ``args``."""
        for hook in self._hooks[event]:
            hook(self, *args)

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs, in tensors and plain values."""
        return {
            "version": CHECKPOINT_VERSION,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "state": self.state.state_dict(),
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            "rng": self._epoch_rng or rng_state(),
            "recorder": self.recorder.state_dict(),
            "callbacks": self.callbacks.state_dict(),
        }

    def load_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: It was written by another version of this format.
        """
        if checkpoint.get("version") != CHECKPOINT_VERSION:
            raise ValueError(f"checkpoint version {checkpoint.get('version')!r}, expected {CHECKPOINT_VERSION}")
        self._hooks = self.callbacks.resolve()
        self.fire("on_before_load_checkpoint", checkpoint)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.scheduler is not None and checkpoint["scheduler"] is not None:
            self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.state.load_state_dict(checkpoint["state"])
        self.seed = checkpoint["seed"]
        self._epoch_rng = checkpoint["rng"] if self.state.batch_index else None
        # torch's own mark, without which a scheduler warns: those steps were taken before the checkpoint.
        self.optimizer._opt_called = self.state.step > 0  # type: ignore[attr-defined]  # noqa: SLF001
        self.recorder.load_state_dict(checkpoint["recorder"])
        self.callbacks.load_state_dict(checkpoint["callbacks"])
        self.fire("on_load_checkpoint", checkpoint)

    # ---- the loop

    def _guarded(self, work: Callable[[], None], *, training: bool) -> None:
        """Run ``work`` after setup; on_fit_end and teardown always follow; errors keep their type."""
        error: BaseException | None = None
        try:
            self.fire("setup")
            if training:
                self.fire("on_fit_start")
            work()
        except BaseException as raised:  # noqa: BLE001 - raised again below, after the hooks that always run
            error = raised
        others = self._end_training(error) if training else []
        others += self.callbacks.fire_isolated("teardown", self)
        for other in others[0 if error else 1 :]:
            logger.error("a callback failed at the end of the run", exc_info=other)
        if error or others:
            raise error or others[0]

    def _end_training(self, error: BaseException | None) -> list[BaseException]:
        errors: list[BaseException] = []
        if error is not None:
            self.state.stop_reason = self.state.stop_reason or ERROR
            errors += self.callbacks.fire_isolated("on_exception", self, error)
        return errors + self.callbacks.fire_isolated("on_fit_end", self)

    def _run_epochs(self, train: Batches, val: Batches | None) -> None:
        state = self.state
        while state.epoch < state.max_epochs and state.stop_reason is None:
            self._train_epoch(train)
            if state.stop_now:
                break
            if val is not None:
                self._evaluate(val, "val", "validation")
            self._end_epoch()

    def _train_epoch(self, train: Batches) -> None:
        state = self.state
        # Each epoch has its own random stream, so that going on inside one can first repeat its data order.
        seed_all(derive_seed(self.seed, state.epoch))
        self.model.train()
        batches = train.epoch(state.epoch, skip=state.batch_index)
        if state.batch_index == 0:
            self.recorder.reset()
            self.fire("on_train_epoch_start")
        elif self._epoch_rng is not None:
            set_rng_state(self._epoch_rng)
            self._epoch_rng = None
        train_batch, done = self._train_batch, False
        for batch in batches:
            train_batch(batch)
            if state.stop_now:
                self._epoch_rng = rng_state()
                return
            done = True
        if not done and state.batch_index == 0:
            raise ValueError("the training data gave no batch")
        self.fire("on_train_epoch_end")

    def _train_batch(self, batch: Any) -> None:
        state, fire = self.state, self.fire
        state.batch = batch
        fire("on_train_batch_start")
        fire("on_before_zero_grad")
        self._clear_gradients()
        fire("on_after_zero_grad")
        fire("on_before_forward")
        extra = self._forward()
        fire("on_after_forward")
        self._record("train", extra)
        fire("on_before_backward")
        assert state.loss is not None
        state.loss.backward()  # type: ignore[no-untyped-call]
        fire("on_after_backward")
        fire("on_before_optimizer_step")
        self.optimizer.step()
        fire("on_after_optimizer_step")
        if self.scheduler is not None and self.scheduler_interval == "step":
            self._step_scheduler()
        state.step += 1
        state.batch_index += 1
        fire("on_train_batch_end")

    def _clear_gradients(self) -> None:
        """``optimizer.zero_grad()`` without its profiler's mark, which costs a small model a tenth of its step."""
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _forward(self) -> Mapping[str, Any]:
        state = self.state
        state.loss, state.outputs, extra = split_output(self.step(self.model, state.batch))
        return extra

    def _record(self, prefix: str, extra: Mapping[str, Any]) -> None:
        state, record = self.state, self.recorder.record
        assert state.loss is not None
        samples = float(batch_length(state.batch))
        record(f"{prefix}_loss", state.loss, samples)
        for name, value in extra.items():
            record(f"{prefix}_{name}", value, samples)
        if self.metrics:
            with torch.no_grad():
                for name, metric in self.metrics.items():
                    record(f"{prefix}_{name}", metric(state.outputs, state.batch[-1]), samples)

    def _evaluate(self, batches: Batches, prefix: str, scope: str) -> None:
        self.model.eval()
        with torch.no_grad():
            self.fire(f"on_{scope}_start")
            done = False
            for batch in batches.epoch(0):
                done = True
                self.state.batch = batch
                self.fire(f"on_{scope}_batch_start")
                self._record(prefix, self._forward())
                self.fire(f"on_{scope}_batch_end")
            if not done:
                raise ValueError(f"the {scope} data gave no batch")
            self.fire(f"on_{scope}_end")

    def _end_epoch(self) -> None:
        state = self.state
        state.epoch += 1
        state.batch_index = 0
        state.metrics = self.recorder.compute()
        self.recorder.reset()
        state.metrics["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if self.scheduler is not None and self.scheduler_interval == "epoch":
            self._step_scheduler()
        # The same object: what callbacks add to the metrics is in the history that the checkpoint holds.
        state.history.append(state.metrics)
        self.fire("on_epoch_end")

    def _step_scheduler(self) -> None:
        assert self.scheduler is not None
        self.fire("on_before_scheduler_step")
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self.state.metrics[self.scheduler_monitor])
        else:
            self.scheduler.step()
        self.fire("on_after_scheduler_step")

    def _evaluate_alone(self, data: Any, prefix: str, scope: str) -> dict[str, float]:
        batches = self._eval_batches(data)
        kept, self.recorder = self.recorder, EpochMetrics(self.device)
        self._hooks = self.callbacks.resolve()
        try:
            self._guarded(lambda: self._evaluate(batches, prefix, scope), training=False)
            return self.recorder.compute()
        finally:
            self.recorder = kept

    def _eval_batches(self, data: Any) -> Batches:
        return make_batches(data, self.batching, self.device, train=False, seed=self.seed)


def _choose_step(loss: Callable[[Any, Any], Tensor] | None, step: Step | None) -> Step:
    if step is not None and loss is None:
        return step
    if loss is not None and step is None:
        return SupervisedStep(loss)
    raise ValueError("give either loss or step")
