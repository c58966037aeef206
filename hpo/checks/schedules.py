"""Warns about learning-rate schedules that do not fit a trial's length."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from hpo.checks.findings import Finding, finding
from hpo.checks.reader import Check, Findings, Reader, below
from hpo.config.paths import join_path, show
from hpo.config.schema_space import values_or_ends
from hpo.config.several import is_several
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET
from hpo.wording import count_of

#: The argument with a scheduler's length in steps, and whether it must end with the training.
_HORIZONS: Final = {
    "CosineAnnealingLR": ("T_max", True),
    "OneCycleLR": ("total_steps", True),
    "PolynomialLR": ("total_iters", False),
    "LinearLR": ("total_iters", False),
    "StepLR": ("step_size", False),
    "CosineAnnealingWarmRestarts": ("T_0", False),
    "CyclicLR": ("step_size_up", False),
    "ReduceLROnPlateau": ("patience", False),
}
#: What a scheduler has not done yet if the training ends too early.
_UNDONE: Final = {
    "PolynomialLR": "the learning rate never gets to its end",
    "LinearLR": "the learning rate never gets to its end",
    "StepLR": "the learning rate never changes",
    "CosineAnnealingWarmRestarts": "the learning rate never restarts",
    "CyclicLR": "the learning rate never gets to max_lr",
    "ReduceLROnPlateau": "the learning rate never changes",
}
#: Schedulers whose lengths are often below the epochs, which is no mistake then.
_SHORT: Final = frozenset({"ReduceLROnPlateau", "CyclicLR"})
#: The searched paths that a trial's length depends on.
_EPOCHS_HANG_ON: Final = ("trainer.max_epochs", "trainer.max_steps")
_STEPS_HANG_ON: Final = (*_EPOCHS_HANG_ON, "loader.batch_size", "callbacks.gradient_accumulation.batches")


def _schedule(reader: Reader) -> Findings:
    name, node = reader.target("lr_scheduler"), reader.config["lr_scheduler"]
    if name not in _HORIZONS:
        return
    key, exact = _HORIZONS[name]
    horizon, warmup = reader.number("lr_scheduler", key), reader.number("lr_scheduler", "warmup")
    by_step = node["interval"] == "step"
    length = reader.spec.trainer.max_steps if by_step else reader.epochs
    unit = "steps" if by_step else "epochs"
    if horizon is None or warmup is None:
        return
    path = join_path(("lr_scheduler", key))
    if length is None:
        yield from _epochs_taken_for_steps(reader, name, path, horizon)
    elif exact and horizon not in {length, length - warmup}:
        problem = f"{name} spans {horizon} {unit}, and a trial has {length}"
        source = "${trainer.max_steps}" if by_step else "${trainer.max_epochs}"
        yield reader.warn(problem, path, horizon, f'write `{key}: "{source}"`, so that the two go together')
    elif not exact and (horizon > length if name in {"PolynomialLR", "LinearLR"} else horizon >= length):
        problem = f"{_UNDONE[name]}: {horizon} {unit} are not over when the trial's {length} are"
        yield reader.warn(problem, path, horizon, below(length, otherwise="leave `lr_scheduler` out"))


def _epochs_taken_for_steps(reader: Reader, name: str, path: str, horizon: float) -> Findings:
    """A warning about a scheduler that steps with the optimizer, but has a length that looks like epochs."""
    if reader.config["lr_scheduler"]["interval"] != "step" or name in _SHORT or not reader.epochs:
        return
    if horizon <= reader.epochs:
        problem = (
            f"with `interval: step` these are {horizon} optimizer steps, over long before {reader.epochs} epochs"
        )
        yield reader.warn(
            problem, path, horizon, "write `interval: epoch`, or the number of steps of a whole trial"
        )


def _one_span_for_all(reader: Reader) -> Findings:
    """A warning about a schedule of fixed length if trials differ in length."""
    name, node = reader.target("lr_scheduler"), reader.config["lr_scheduler"]
    key, exact = _HORIZONS.get(name, ("", False))
    horizon = reader.number("lr_scheduler", key)
    if not exact or horizon is None:
        return
    by_step = node["interval"] == "step"
    unit, source = ("steps", "${trainer.total_steps}") if by_step else ("epochs", "${trainer.max_epochs}")
    hang_on = _STEPS_HANG_ON if by_step and reader.spec.trainer.max_epochs is not None else _EPOCHS_HANG_ON
    for path in hang_on:
        if path in reader.space and not _follows(reader, key, path):
            problem = f"{name} spans {horizon} {unit} in every trial, and their length is searched"
            yield reader.warn(
                f"{problem}: {path}", join_path(("lr_scheduler", key)), horizon, f'write `{key}: "{source}"`'
            )
            return


def _follows(reader: Reader, key: str, path: str) -> bool:
    """Whether an argument of the scheduler depends on a searched value."""
    ends = values_or_ends(reader.space[path])
    first, last = (reader.spec.resolve({path: end})["lr_scheduler"][key] for end in (ends[0], ends[-1]))
    return bool(first != last or ends[0] == ends[-1])


def check_span(spec: StudySpec, config: Mapping[str, Any], total_steps: int | None) -> list[Finding]:
    """Warn about a schedule over optimizer steps that does not end with the training.

    Args:
        spec: The study.
        config: A resolved config, with the numbers of its lengths.
        total_steps: The steps of the training; None if not known.
    """
    node = config["lr_scheduler"]
    name = "" if node is None or is_several(node) else str(node[TARGET]).rpartition(".")[2]
    key, exact = _HORIZONS.get(name, ("", False))
    if not exact or node["interval"] != "step" or total_steps is None:
        return []
    horizon = node.get(key)
    if not isinstance(horizon, int) or horizon in {total_steps, total_steps - node["warmup"]}:
        return []
    problem = f"{name} spans {horizon} steps, and this training has {total_steps}"
    fix = f'write `{key}: "${{trainer.total_steps}}"`'
    return [finding(spec, problem, path=join_path(("lr_scheduler", key)), value=horizon, fix=fix)]


def _milestones(reader: Reader) -> Findings:
    node, epochs = reader.config["lr_scheduler"], reader.epochs
    if reader.target("lr_scheduler") != "MultiStepLR" or node["interval"] != "epoch" or not epochs:
        return
    listed = node.get("milestones")
    late = (
        [item for item in listed if isinstance(item, int) and item >= epochs] if isinstance(listed, list) else []
    )
    if late:
        problem = f"a trial has {count_of(epochs, 'epoch')}, and never gets to {show(late)}"
        fix = f"keep them below {epochs}" if epochs > 1 else "let trials be longer, or leave `lr_scheduler` out"
        yield reader.warn(problem, "lr_scheduler.milestones", listed, fix)


def _warmup(reader: Reader) -> Findings:
    node, epochs = reader.config["lr_scheduler"], reader.epochs
    if not isinstance(node, dict) or is_several(node) or node["interval"] != "epoch" or epochs is None:
        return
    steps = reader.number("lr_scheduler", "warmup")
    if steps is not None and steps >= epochs > 1:
        problem = f"the warm-up takes the whole trial of {epochs} epochs"
        yield reader.warn(problem, "lr_scheduler.warmup", steps, f"write less than {epochs}")


def _plateau(reader: Reader) -> Findings:
    """A warning about a ReduceLROnPlateau that follows the study's metric in the wrong direction."""
    if reader.target("lr_scheduler") != "ReduceLROnPlateau":
        return
    if "lr_scheduler" in reader.space or "lr_scheduler.mode" in reader.space:
        return
    study = reader.spec.study
    mode = reader.config["lr_scheduler"].get("mode", "min")
    if mode in ("min", "max") and mode != study.mode:
        effect = f"the learning rate falls while `{study.metric}` gets better"
        problem = f"{effect}: ReduceLROnPlateau follows it, and the study has `direction: {study.direction}`"
        yield reader.warn(problem, "lr_scheduler.mode", mode, f"write `mode: {study.mode}`")


SCHEDULES: Final[Collection[Check]] = (_schedule, _one_span_for_all, _milestones, _warmup, _plateau)
