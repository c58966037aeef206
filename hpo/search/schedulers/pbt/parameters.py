"""Finds the parameters that a fork may change: those that still fit its parent's checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hpo.config.paths import PathError, join_path, split_path, suggest_name
from hpo.config.schema_space import CategoricalParam
from hpo.config.several import lr_schedulers
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET

_PATH: Final = "study.scheduler.perturb"
_BATCH_SIZE: Final = "loader.batch_size"
#: Sections whose parameters a fork changes unless the study file names others.
_USUAL: Final = ("optimizer", "loss", "step")
#: Sections whose parameters a fork never changes, with the reason.
_FIXED: Final = {
    "data": "a fork trains on the data of its parent",
    "trainer": "a fork is as long as its parent",
    "lr_scheduler": "the place in the schedule is the parent's",
    "metrics": "a fork is measured as its parent is",
}
#: LBFGS allocates this many past steps once; a larger value would make torch fail in a fork.
_MEMORY: Final = "history_size"
#: Callbacks whose arguments change how many steps an epoch has.
_STEPS: Final = (("callbacks", "gradient_accumulation"), ("callbacks", "batch_size_schedule"))


def perturbed_parameters(spec: StudySpec, given: Any) -> tuple[str, ...]:
    """The parameters of a study that its forks may change, in the order of the search space.

    Args:
        spec: The study file.
        given: The parameters that it names; None: all of the usual sections that can be changed.

    Raises:
        InputError: A named parameter is not searched or can't be changed, or there is none to change.
    """
    if given is None:
        found = [path for path in spec.search_space if _is_usual(path) and _obstacle(spec, path) is None]
        if not found and spec.config.objective is not None:
            raise spec.error(
                "which arguments a fork may change only the function of `objective` knows",
                path="study.scheduler",
                value=", ".join(spec.search_space),
                fix=f"name those that fit its checkpoint: `perturb: [{next(iter(spec.search_space), '…')}]`",
            )
        if not found:
            raise spec.error(
                "nothing that is searched can be changed while a trial trains, so a fork would be a copy",
                path="study.scheduler",
                value=", ".join(spec.search_space),
                fix="search a value of the optimizer such as `optimizer.lr`, or name others that fit a trained "
                "model: `perturb: [model.dropout]`",
            )
        return tuple(found)
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        fix = "write for example `perturb: [optimizer.lr]`, or leave it out"
        raise spec.error("must be a list of parameters", path=_PATH, value=given, fix=fix)
    for path in given:
        _check(spec, path)
    return tuple(path for path in spec.search_space if path in given)


def _check(spec: StudySpec, path: Any) -> None:
    if path not in spec.search_space:
        fix = suggest_name(str(path), list(spec.search_space), what="searched are")
        raise spec.error("is not searched", path=_PATH, value=path, fix=fix)
    if (obstacle := _obstacle(spec, path)) is not None:
        fix = "leave it out: each fork has its parent's value"
        raise spec.error(f"can't be changed while a trial trains: {obstacle}", path=_PATH, value=path, fix=fix)


def _is_usual(path: str) -> bool:
    return path == _BATCH_SIZE or _keys(path)[0] in _USUAL


def _obstacle(spec: StudySpec, path: str) -> str | None:
    """Why a parameter can't be changed between a checkpoint and the next epoch; None where it can."""
    keys, entry = _keys(path), spec.config.search_space[path]
    if keys[0] in _FIXED:
        return _FIXED[keys[0]]
    if keys[-1] == TARGET:
        return "what one class has saved another can't load"
    if keys[0] == "optimizer" and keys[-1] == _MEMORY:
        return "the optimizer has room for as many past steps as its parent's"
    if any(path in other.when for other in spec.search_space.values()):
        return "other parameters exist under a condition on it"
    if keys[0] == "optimizer" and isinstance(entry, CategoricalParam) and not all(map(_is_number, entry.choices)):
        return "a switch of the optimizer changes what it keeps for each weight"
    if path == _BATCH_SIZE or tuple(keys[:2]) in _STEPS:
        return _step_obstacle(spec)
    return "the loader is set up once" if keys[0] == "loader" else None


def _step_obstacle(spec: StudySpec) -> str | None:
    """Why an epoch's number of steps can't be changed; None where it can."""
    config = spec.base_config()
    section = config["trainer"]
    if section["validate_every"] is not None:
        return "with `trainer.validate_every` a trial pauses inside a pass over the data"
    if section["max_steps"] is not None:
        return "`trainer.max_steps` counts steps"
    nodes = lr_schedulers(config)
    searched = any(join_path((*keys, "interval")) in spec.search_space for keys in nodes)
    if searched or any(node["interval"] == "step" for node in nodes.values()):
        return "the learning rate is scheduled by steps"
    return None


def _is_number(choice: Any) -> bool:
    """Whether a choice is a number or a list of numbers, such as Adam's betas."""
    if isinstance(choice, list):
        return all(map(_is_number, choice))
    return isinstance(choice, int | float) and not isinstance(choice, bool)


def _keys(path: str) -> Sequence[str]:
    try:
        return [str(key) for key in split_path(path)]
    except PathError:  # reported where the space is read
        return [path]
