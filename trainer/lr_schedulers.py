"""Learning-rate schedulers that torch lacks, and the scaling of a learning rate under a running scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

# The keys and attributes in which torch's schedulers keep learning rates: in parameter groups (the last two are
# OneCycleLR's), and in the scheduler itself.
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
SCHEDULER_RATES = ("base_lrs", "max_lrs")


class HyperbolicLR(LRScheduler):
    """A learning rate that falls along a hyperbola, whose first part hardly depends on the length of the run.

    With N = ``max_iter``, U = ``upper_bound`` and f(x) = sqrt((N - x) / U · (2 - (N + x) / U)), the learning rate
    after x steps is lr₀ + (lr₀ - infimum_lr) · (f(x) - f(0)), for each group from its own lr₀. It ends at
    ``infimum_lr`` where N = U, above it where N < U, and stays there after N steps. Runs of different N that share
    U follow nearly the same curve at first, so a short run predicts a long one.

    Source: Kim, "HyperbolicLR: Epoch insensitive learning rate scheduler", arXiv:2407.15200.

    Args:
        optimizer: The optimizer; the curve begins at its groups' learning rates.
        upper_bound: U, the length of the longest run to compare, in the same steps as ``max_iter``.
        max_iter: N, the number of scheduler steps in this run (epochs or optimizer steps).
        infimum_lr: The lowest learning rate of the curve with N = U.
        last_epoch: The number of steps already taken, minus one; -1 for a new run.

    Raises:
        ValueError: ``max_iter`` is below 1 or above ``upper_bound``, or ``infimum_lr`` is negative or not below
            every group's learning rate.

    Example::

        scheduler = HyperbolicLR(optimizer, upper_bound=250, max_iter=50, infimum_lr=1e-5)
    """

    _may_reach_zero: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Optimizer,
        upper_bound: int = 1000,
        max_iter: int = 100,
        infimum_lr: float = 1e-6,
        last_epoch: int = -1,
    ) -> None:
        if max_iter < 1:
            raise ValueError(f"max_iter is {max_iter}: give the number of scheduler steps, at least 1")
        if upper_bound < max_iter:
            raise ValueError(f"upper_bound is {upper_bound}: give at least max_iter, which is {max_iter}")
        _check_infimum(optimizer, infimum_lr, zero=self._may_reach_zero)
        self.upper_bound = upper_bound
        self.max_iter = max_iter
        self.infimum_lr = infimum_lr
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group after ``last_epoch`` steps, in closed form."""
        change = self._hyperbola(min(self.last_epoch, self.max_iter)) - self._hyperbola(0)
        return [self._rate(base, change) for base in self.base_lrs]

    def _hyperbola(self, step: int) -> float:
        n, u = self.max_iter, self.upper_bound
        return math.sqrt((n - step) / u * (2 - (n + step) / u))

    def _rate(self, base: float | Tensor, change: float) -> float | Tensor:
        return base + (base - self.infimum_lr) * change


class ExpHyperbolicLR(HyperbolicLR):
    """Like `HyperbolicLR`, but the logarithm of the learning rate follows the hyperbola.

    The learning rate after x steps is lr₀ · (lr₀ / infimum_lr) ^ (f(x) - f(0)).

    Source: Kim, "HyperbolicLR: Epoch insensitive learning rate scheduler", arXiv:2407.15200.

    Args:
        optimizer: See `HyperbolicLR`, also for the other arguments.
        upper_bound: U, the length of the longest run to compare.
        max_iter: N, the number of scheduler steps in this run.
        infimum_lr: The lowest learning rate, above 0.
        last_epoch: The number of steps already taken, minus one; -1 for a new run.

    Raises:
        ValueError: As for `HyperbolicLR`, or ``infimum_lr`` is 0.

    Example::

        scheduler = ExpHyperbolicLR(optimizer, upper_bound=250, max_iter=50, infimum_lr=1e-5)
    """

    _may_reach_zero = False  # 0 has no logarithm

    def _rate(self, base: float | Tensor, change: float) -> float | Tensor:
        return base * (base / self.infimum_lr) ** change


class Warmup(LRScheduler):
    """Linear warm-up before any other scheduler, also before ReduceLROnPlateau.

    The learning rates of all groups rise from ``start_factor`` times the rates with which ``main`` begins to these
    rates, which step number ``steps`` reaches. After that, each step is a step of ``main``, which does not see the
    steps before. If torch's ``SequentialLR([LinearLR, main])`` supports ``main``, the result is the same.

    A Trainer passes a ReduceLROnPlateau its metric after the validation of an epoch: use it, and the warm-up
    before it, with ``scheduler_interval="epoch"``.

    Args:
        optimizer: The optimizer of ``main``.
        main: The scheduler to warm up for; not stepped yet.
        steps: Number of scheduler steps that the warm-up takes (epochs or optimizer steps), at least 1.
        start_factor: The fraction of the learning rate at which the warm-up begins, in [0, 1].

    Attributes:
        main: The scheduler that follows the warm-up.

    Raises:
        ValueError: An argument is out of range, or ``main`` belongs to another optimizer or has been stepped.

    Example::

        scheduler = Warmup(optimizer, CosineAnnealingLR(optimizer, T_max=95), steps=5)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        main: LRScheduler,
        steps: int,
        start_factor: float = 0.1,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}: give at least 1, or use the main scheduler alone")
        if not 0 <= start_factor <= 1:
            raise ValueError(f"start_factor is {start_factor}: give a part of the learning rate, in [0, 1]")
        if main.optimizer is not optimizer:
            raise ValueError("main belongs to another optimizer: build it over the one that is given here")
        taken = getattr(main, "last_epoch", 0)  # a ChainedScheduler does not count its steps
        if taken > 0:
            raise ValueError(f"main has taken {taken} steps: give a new scheduler")
        # No super().__init__: it would take a first step from learning rates that main may have changed.
        self.optimizer = optimizer
        self.main = main
        self.steps = steps
        self.start_factor = start_factor
        self.base_lrs = _rates(optimizer)
        self.last_epoch = 0
        self._warm_up()

    @property
    def is_warming(self) -> bool:
        """Whether the next step belongs to the warm-up, which needs no metric."""
        return self.last_epoch < self.steps

    def step(self, metrics: float | None = None) -> None:
        """Take a step of the warm-up or, after it, a step of ``main``.

        Args:
            metrics: The metric that a ReduceLROnPlateau follows; unused by other schedulers and the warm-up.

        Raises:
            ValueError: ``main`` needs the metric, and it is missing.
        """
        self.last_epoch += 1
        if self.last_epoch <= self.steps:
            self._warm_up()
            return
        if not isinstance(self.main, ReduceLROnPlateau):
            self.main.step()
        elif metrics is None:
            raise ValueError("the main scheduler is a ReduceLROnPlateau: call step with its metric")
        else:
            self.main.step(metrics)
        self._last_lr = _rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """This scheduler's progress, and the state of ``main``."""
        own = {key: value for key, value in vars(self).items() if key not in {"optimizer", "main"}}
        return {**own, "main": self.main.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the saved scheduler."""
        vars(self).update({key: value for key, value in state_dict.items() if key != "main"})
        self.main.load_state_dict(dict(state_dict["main"]))  # a copy, as CyclicLR removes keys

    def _warm_up(self) -> None:
        # Written so that the last factor is exactly 1.
        factor = 1 - (1 - self.start_factor) * (1 - self.last_epoch / self.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            set_rate(group, base * factor)
        self._last_lr = _rates(self.optimizer)


def needs_metric(scheduler: Any) -> bool:
    """Whether a scheduler's step takes the metric that it follows: ReduceLROnPlateau, also inside `Warmup`."""
    return isinstance(getattr(scheduler, "main", scheduler), ReduceLROnPlateau)


def check_interval(scheduler: Any, interval: str) -> None:
    """Refuse an unknown interval, or one that a ReduceLROnPlateau can't have.

    Raises:
        ValueError: It is neither "epoch" nor "step", or a ReduceLROnPlateau would step after each optimizer step.
    """
    if interval not in ("epoch", "step"):
        raise ValueError(f"scheduler_interval is {interval!r}: give 'epoch' or 'step'")
    if interval == "step" and needs_metric(scheduler):
        raise ValueError(
            "scheduler_interval is 'step', but a ReduceLROnPlateau follows a metric of a whole epoch, which no "
            "step has: give 'epoch'"
        )


def set_rate(group: dict[str, Any], rate: float | Tensor, name: str = "lr") -> None:
    """Set a learning rate of a parameter group; one that is a tensor (``capturable``) is filled in place."""
    if isinstance(group[name], Tensor):
        group[name].fill_(rate)
    else:
        group[name] = rate


def scale_rates(optimizer: Optimizer, scheduler: Any, factor: float) -> None:
    """Multiply the learning rates of all groups, the present ones and those that the scheduler computes later.

    Some schedulers compute the next learning rate from the previous one; others from the first one, which they
    keep in themselves, in the groups, or in the schedulers inside them. All of these are multiplied. Absolute
    limits (``eta_min``, ReduceLROnPlateau's ``min_lr``) are not.

    Args:
        optimizer: The optimizer with these groups.
        scheduler: Its scheduler, or None.
        factor: The factor.
    """
    for group in optimizer.param_groups:
        for name in GROUP_RATES:
            if name in group:
                set_rate(group, group[name] * factor, name)
    for each in _nested(scheduler):
        for name in SCHEDULER_RATES:
            if name in vars(each):
                setattr(each, name, [rate * factor for rate in getattr(each, name)])


def _nested(scheduler: Any) -> Iterator[Any]:
    """A scheduler and all schedulers inside it (of SequentialLR, ChainedScheduler or Warmup)."""
    if scheduler is None:
        return
    yield scheduler
    for inner in (*getattr(scheduler, "_schedulers", ()), getattr(scheduler, "main", None)):
        yield from _nested(inner)


def _rates(optimizer: Optimizer) -> list[float | Tensor]:
    """The groups' learning rates; tensors are copied."""
    rates = (group["lr"] for group in optimizer.param_groups)
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _first_rate(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _check_infimum(optimizer: Optimizer, infimum_lr: float, *, zero: bool) -> None:
    lowest = min(_first_rate(group) for group in optimizer.param_groups)
    if not zero and infimum_lr == 0:
        raise ValueError(f"infimum_lr is {infimum_lr}: give a number above 0, its logarithm is needed")
    if not 0 <= infimum_lr < lowest:
        raise ValueError(
            f"infimum_lr is {infimum_lr}: give at least 0 and less than the lowest learning rate of the "
            f"optimizer's groups, which is {lowest}"
        )
