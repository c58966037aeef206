"""Computes how many optimizer steps a training takes, from its data, so that its schedules can be laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hpo.config.lengths import lengths_in, put_lengths
from hpo.config.paths import join_path
from hpo.config.several import lr_schedulers
from hpo.config.spec import StudySpec
from hpo.config.targets import ARGS, TARGET
from hpo.errors import InputError
from trainer import BatchOptions
from trainer.callbacks import BatchSizeSchedule, GradientAccumulation
from trainer.data.batches import known_length
from trainer.data.limits import train_batches
from trainer.data.plan import Plan, UnknownLengthError
from trainer.state import TrainState

#: A configured callback: its class, and the arguments of the study file.
Configured = tuple[Callable[..., Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        data_epochs: Passes over the training data.
        steps: Optimizer steps.
        data_batches: Batches of the unfinished pass.
    """

    data_epochs: int = 0
    steps: int = 0
    data_batches: int = 0


NO_PROGRESS: Final = Progress()


@dataclass(frozen=True)
class RunLength:
    """The length of one training, as its Trainer counts it.

    Attributes:
        total_steps: Optimizer steps in all; None if unknown.
        steps_per_epoch: Optimizer steps of one pass over the training data (``max_epochs`` counts passes); None
            where the data has no length.
        epochs: Epochs in all, which end with a validation.
    """

    total_steps: int | None
    steps_per_epoch: int | None
    epochs: int


def plan_of(config: Mapping[str, Any], after: Progress) -> Plan:
    """The plan of a training, in which the config's length is added to what is trained already."""
    section = config["trainer"]
    return Plan(
        max_epochs=_beyond(after.data_epochs, section["max_epochs"]),
        max_steps=_beyond(after.steps, section["max_steps"]),
        validate_every=section["validate_every"],
    )


def run_length(
    config: Mapping[str, Any],
    train: Any,
    *,
    batches_per_step: int = 1,
    drops_last_step: bool = False,
    after: Progress = NO_PROGRESS,
) -> RunLength:
    """The length of a training.

    Args:
        config: The resolved config; its sections ``loader`` and ``trainer`` count.
        train: The training data.
        batches_per_step: Batches whose gradients make one optimizer step.
        drops_last_step: Whether the batches left over at the end of an epoch make no step.
        after: What is trained already, which does not count.

    Raises:
        TypeError: No batches can be made of the data.
        ValueError: There are no data, or a length is needed that the data does not have.
    """
    # Tensors on the device "meta" have no contents, so nothing is copied. `collate_fn` does not change the length.
    options = BatchOptions(**{**config["loader"], "collate_fn": None})
    batches = train_batches(train, options, torch.device("meta"))
    one_pass = known_length(batches)
    steps = {"batches_per_step": batches_per_step, "drops_last_step": drops_last_step}
    state = _laid_out(plan_of(config, after), one_pass, steps, after)
    whole = Plan(max_epochs=1, validate_every=config["trainer"]["validate_every"])
    return RunLength(
        total_steps=None if state.total_steps is None else state.total_steps - after.steps,
        steps_per_epoch=None if one_pass is None else _laid_out(whole, one_pass, steps).total_steps,
        epochs=state.max_epochs - state.epoch,
    )


def with_numbers(
    spec: StudySpec,
    config: Mapping[str, Any],
    train: Any,
    callbacks: Sequence[Configured],
    after: Progress,
) -> dict[str, Any]:
    """The config with numbers in place of ``${trainer.total_steps}`` and ``${trainer.steps_per_epoch}``.

    Args:
        spec: The study file.
        config: The resolved config.
        train: The training data.
        callbacks: The configured callbacks.
        after: What is trained already, which does not count.

    Raises:
        InputError: A number is needed that the data does not have, or that changes as the training runs; a
            OneCycleLR is over before the training is; or ``validate_every`` cuts data without a length.
        TypeError: As `run_length`, like ValueError.
    """
    places = {name: join_path(keys) for keys, name in lengths_in(config)}
    cycle = any(_is_one_cycle(node) for node in lr_schedulers(config).values())
    if not places and not cycle and config["trainer"]["validate_every"] is None:
        return dict(config)
    changing = any(_is_a(kind, BatchSizeSchedule) for kind, _ in callbacks)
    if places and changing:
        path, fix = next(iter(places.values())), "write the number of steps that the sizes make"
        raise spec.error("is not known where the batch size changes as a trial runs", path=path, fix=fix)
    together, dropped = accumulated(callbacks)
    try:
        length = run_length(config, train, batches_per_step=together, drops_last_step=dropped, after=after)
    except UnknownLengthError as error:
        raise _without_epochs(spec, config) from error
    numbers = {name: getattr(length, name) for name in places}
    for name, path in places.items():
        if numbers[name] is None:
            raise _unknown(spec, name, path)
    laid_out = dict(put_lengths(config, numbers))
    # A user's callback may change the number of steps, as a changing batch size does.
    if cycle and not changing and not any(TARGET in arguments for _, arguments in callbacks):
        for keys, node in lr_schedulers(laid_out).items():
            if _is_one_cycle(node):
                _refuse_shortfall(spec, join_path(keys), node, length)
    return laid_out


def _is_one_cycle(node: Mapping[str, Any]) -> bool:
    return str(node[TARGET]).rpartition(".")[2] == "OneCycleLR"


def _refuse_shortfall(spec: StudySpec, path: str, node: Mapping[str, Any], length: RunLength) -> None:
    short = shortfall(node, length.epochs if node["interval"] == "epoch" else length.total_steps)
    if short is not None:
        raise spec.error(short.problem, path=f"{path}.{short.key}", value=short.span, fix=short.fix)


@dataclass(frozen=True)
class Shortfall:
    """A OneCycleLR that ends before the training does.

    Attributes:
        key: Its argument that gives its length.
        span: The steps that it was laid out for.
        calls: The steps that the training takes of it.
        unit: What a step is: ``"epochs"`` or ``"steps"``.
    """

    key: str
    span: int
    calls: int
    unit: str

    @property
    def problem(self) -> str:
        """What is wrong."""
        return f"OneCycleLR ends after {self.span} {self.unit}, but the training has {self.calls}"

    @property
    def fix(self) -> str:
        """What to write."""
        if self.unit == "epochs":
            return 'write `total_steps: "${trainer.max_epochs}"`'
        return 'write `total_steps: "${trainer.total_steps}"` and leave `epochs` and `steps_per_epoch` out'


def shortfall(node: Mapping[str, Any], calls: int | None) -> Shortfall | None:
    """How much too short a OneCycleLR is (it would raise after its end); None where it is long enough.

    Args:
        node: The section ``lr_scheduler`` of a resolved config.
        calls: Steps of the scheduler that the training takes, its warm-up included; None where that is not known.
    """
    key, span = _span(node)
    warmup = node["warmup"]
    if calls is None or not isinstance(span, int) or not isinstance(warmup, int) or calls - warmup <= span:
        return None
    return Shortfall(key, span, calls - warmup, "epochs" if node["interval"] == "epoch" else "steps")


def _span(node: Mapping[str, Any]) -> tuple[str, Any]:
    """The argument that gives a OneCycleLR's length, and the length if it is a number."""
    if node.get("total_steps") is not None:
        return "total_steps", node["total_steps"]
    epochs, each = node.get("epochs"), node.get("steps_per_epoch")
    return "epochs", epochs * each if isinstance(epochs, int) and isinstance(each, int) else None


def accumulated(callbacks: Sequence[Configured]) -> tuple[int, bool]:
    """Batches whose gradients make one optimizer step, and whether those left over in an epoch make none."""
    for kind, arguments in callbacks:
        if _is_a(kind, GradientAccumulation):
            given = dict(zip(("batches", "drop_last"), arguments.get(ARGS, ()), strict=False)) | dict(arguments)
            return int(given["batches"]), bool(given.get("drop_last", False))
    return 1, False


def _unknown(spec: StudySpec, name: str, path: str) -> InputError:
    problem = f"trainer.{name} is not known: the training data has no length"
    fix = "limit trials by `trainer.max_steps`, with `trainer.validate_every` in steps"
    if name == "steps_per_epoch":
        fix = "write the number, or use `${trainer.total_steps}` with `trainer.max_steps`"
    return spec.error(problem, path=path, value=f"${{trainer.{name}}}", fix=fix)


def _without_epochs(spec: StudySpec, config: Mapping[str, Any]) -> InputError:
    problem = "the training data has no length, so the number of epochs is not known"
    fix = "write it in steps, and `trainer.max_steps`; to `hpo train` give `trainer.max_steps=…`, not --epochs"
    return spec.error(problem, path="trainer.validate_every", value=config["trainer"]["validate_every"], fix=fix)


def _laid_out(
    plan: Plan, one_pass: int | None, steps: Mapping[str, Any], after: Progress = NO_PROGRESS
) -> TrainState:
    state = TrainState(
        max_epochs=0,
        **steps,
        epoch=after.data_epochs,  # where an epoch is a pass; else only what comes after it counts
        step=after.steps,
        data_epoch=after.data_epochs,
        data_batch=after.data_batches,
    )
    plan.lay_out(state, one_pass)
    return state


def _is_a(kind: Callable[..., Any], base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _beyond(done: int, length: int | None) -> int | None:
    return None if length is None else done + length
