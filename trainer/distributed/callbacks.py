"""Callbacks that the Trainer adds in a run of several processes, for what these do together at its events."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView
from trainer.distributed.agreement import agreed, wishes
from trainer.distributed.batch_norm import StepStart, SyncedBatchNorm
from trainer.distributed.gradients import GradientSum
from trainer.distributed.group import Group
from trainer.distributed.processes import Processes
from trainer.distributed.tensor_shards import is_sharded
from trainer.step.optimizers import each_of, needs_closure
from trainer.step.parts import bare_model, module_of_step, refuse_lazy

_FIRST, _LAST = -(10**6), 10**6


class GroupStart(Callback):
    """Runs before all other callbacks: makes the weights equal, and tells the other processes of an error.

    Args:
        group: The processes.
    """

    priority = _FIRST
    transient = ("_reduces",)

    def __init__(self, group: Processes) -> None:
        self._group = group
        self._reduces = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Give all processes the weights of rank 0.

        Raises:
            ValueError: The strategy can't train this model, step or callbacks: `check_alone`, `check_parts`.
            RuntimeError: The processes are at different batches.
        """
        check_places(trainer, self._group)
        if self._group.strategy == "fsdp":
            check_parts(trainer)
        else:
            check_alone(trainer)
        closures = any(needs_closure(each) for each in each_of(trainer.optimizer).values())
        self._reduces = closures or any(each.reads_batches for each in trainer.callbacks.callbacks)
        share_weights(trainer, self._group)
        self._group.will_meet = True

    def on_after_forward(self, trainer: TrainerView) -> None:
        """If something reads batch losses, make the loss that of the whole batch; its gradient stays as it was."""
        state = trainer.state
        if not self._reduces or state.loss is None:
            return
        loss = state.loss.detach()
        if state.weight is None:
            whole = loss.clone()
            self._group.wait([self._group.sum(whole)])
            state.loss_of_all = True
        else:
            weight = torch.as_tensor(state.weight, dtype=loss.dtype, device=loss.device)
            sums = torch.stack([torch.where(weight == 0, 0.0, loss * weight), weight])
            self._group.wait([self._group.sum(sums)])
            whole = sums[0] / sums[1]
        # The same bits in all processes, as a line search branches by the loss.
        state.loss = _OfAll.apply(state.loss, whole)  # type: ignore[no-untyped-call]

    def on_train_batch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """From here on, rank 0 may ask the others for their share of a checkpoint."""
        self._group.at_boundary = self._group.will_meet = True

    def on_epoch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """As at the end of a batch, but without shares, whose content differs by rank only inside an epoch."""
        self._group.will_meet = True

    def on_fit_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """As at the end of an epoch."""
        self._group.will_meet = True

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Tell the other processes of the error."""
        self._group.fail(error, trainer.state.stop_reason)


class _OfAll(torch.autograd.Function):
    """The loss of the whole batch with the gradient of this process's part, whose own loss may be NaN."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:  # noqa: ARG004
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        return gradients[0], None


class GroupEnd(Callback):
    """Runs after all other callbacks: makes all processes agree on what hooks have asked for.

    Args:
        group: The processes.
    """

    priority = _LAST
    transient = ("_before",)

    def __init__(self, group: Processes) -> None:
        self._group = group
        self._before: Any = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Agree on what was asked for before the first epoch."""
        self._before = None
        self._agree(trainer)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Agree on whether to train on the first batch."""
        self._agree(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Agree on what was asked for in this batch."""
        self._agree(trainer)
        self._group.at_boundary = False

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Agree on whether to validate; give all processes rank 0's buffers, such as running statistics."""
        self._agree(trainer)
        buffers = {id(tensor): tensor for module in _modules(trainer).values() for tensor in module.buffers()}
        self._group.broadcast([*buffers.values()])

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Agree on what was asked for at the end of this epoch."""
        self._agree(trainer)

    def _agree(self, trainer: TrainerView) -> None:
        """Take over what any process has asked for since the previous call."""
        mine = wishes(trainer.state)
        all_of_them = self._group.decide(mine if mine != self._before else None)
        self._group.will_meet = False
        if all_of_them:
            agreed(trainer.state, all_of_them, mine)
        self._before = wishes(trainer.state)


def share_weights(trainer: TrainerView, group: Group) -> None:
    """Give all processes the weights of rank 0, except those that are split over the processes.

    Raises:
        ValueError: A lazy parameter has no shape yet; each process would draw its own values.
    """
    modules = _modules(trainer)
    if group.size > 1:
        for called, module in modules.items():
            refuse_lazy(module, "several processes train or evaluate it", called)
    # Also the weights of a loss, trained or not.
    found = [weight for each in trainer.optimizer.param_groups for weight in each["params"]]
    for module in modules.values():
        found += [*module.parameters(), *module.buffers()]
    tensors = {id(tensor): tensor for tensor in found}
    group.broadcast([tensor for tensor in tensors.values() if not is_sharded(tensor)])


def _modules(trainer: TrainerView) -> dict[str, nn.Module]:
    """The model, and the loss or the step if it is a module, by what error texts call them."""
    modules, step = {"model": bare_model(trainer.model)}, module_of_step(trainer.step)
    if step is not None:
        modules["step" if step is trainer.step else "loss"] = step
    return modules


def check_places(trainer: TrainerView, group: Processes) -> None:
    """Refuse to continue if an error has left the processes at different batches.

    Raises:
        RuntimeError: They are at different batches.
    """
    state = trainer.state
    places = group.gather((state.epoch, state.batch_index, state.step))
    if len(set(places)) > 1:
        where = ", ".join(
            f"rank {number} after epoch {epoch}, batch {batch}, step {step}"
            for number, (epoch, batch, step) in enumerate(places)
        )
        raise RuntimeError(f"an error has left the processes at different batches ({where}): resume a checkpoint")


def check_alone(trainer: TrainerView) -> None:
    """Check that each process has a whole model whose gradients only the Trainer sums (strategy ``"ddp"``).

    Raises:
        ValueError: The model is wrapped for several processes or split over them; or a step that makes its own
            updates has an optimizer with a closure, which would see another loss in each process.
    """
    wrapped = isinstance(trainer.model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    if wrapped:
        raise ValueError(
            f"the model is wrapped in {type(trainer.model).__name__}, and the Trainer adds up the gradients of "
            "all processes itself: hand over the model that is in it"
        )
    if any(map(is_sharded, trainer.model.parameters())):
        raise ValueError(
            "the model's parameters are spread over the processes (DTensor, as by fully_shard): give "
            "strategy='fsdp', or hand over the whole model"
        )
    if trainer.state.manual and any(needs_closure(each) for each in each_of(trainer.optimizer).values()):
        raise ValueError(
            "an optimizer that takes a closure, in a step that makes its own updates, would see another loss in "
            "each process: use another optimizer, or one process"
        )


def check_parts(trainer: TrainerView) -> None:
    """Refuse a step or callbacks that need the whole model (strategy ``"fsdp"``).

    Raises:
        ValueError: The step makes its own updates, or a callback needs the whole model.
    """
    if trainer.state.manual:
        raise ValueError(
            "a step that makes its own updates takes gradients of chosen parameters, which strategy 'fsdp' has "
            "in parts: use strategy 'ddp'"
        )
    for callback in trainer.callbacks.callbacks:
        if reason := callback.needs_whole_model:
            raise ValueError(
                f"{callback.name} {reason}, and with strategy 'fsdp' each process has a part of the model: leave "
                "it out, or use strategy 'ddp'"
            )


def callbacks_of(group: Group, *, sync_batchnorm: bool) -> list[Callback]:
    """The callbacks that a run needs because of its group."""
    if not isinstance(group, Processes):
        return []
    norm: list[Callback] = []
    if sync_batchnorm:
        norm = [norms := SyncedBatchNorm(group), StepStart(norms)]
    gradients: Callback = GradientSum(group)
    if group.strategy == "fsdp":
        from trainer.distributed.shard_gradients import ShardGradients  # imports half of torch.distributed

        gradients = ShardGradients(group)
    return [GroupStart(group), *norm, gradients, GroupEnd(group)]
