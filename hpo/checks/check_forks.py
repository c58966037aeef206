"""Builds models to check that a scheduler's forks can load the weights of their parents."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import nn

from hpo.config.schema_space import values_or_ends
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import TargetResolver, instantiate
from hpo.search.schedulers.by_name import make_scheduler
from hpo.search.schedulers.pbt.scheduler import Pbt
from hpo.search.valid_points import ValidPoints
from trainer.data.random_state import rng_state, set_rng_state

#: With `where`, how many points are drawn to find one where a parameter can have two of its values.
_TRIES: Final = 100


def check_forks(spec: StudySpec) -> None:
    """Refuse a parameter that forks change if the shapes of the model's weights depend on it.

    Raises:
        InputError: There is such a parameter, or the scheduler can't be built.
    """
    scheduler = make_scheduler(spec)
    if not isinstance(scheduler, Pbt):
        return
    space = SearchSpace.from_spec(spec)
    for path in scheduler.perturb:
        if not path.startswith("model."):
            continue
        one, *others = (_shapes(spec, point) for point in _points(space, path))
        if any(shapes != one for shapes in others):
            raise spec.error(
                "can't be changed while a trial trains: the model has other weights then",
                path="study.scheduler.perturb",
                value=path,
                fix="leave it out: each fork has its parent's value",
            )


def _points(space: SearchSpace, path: str) -> Sequence[Mapping[str, Any]]:
    """A point for each choice or end of one parameter, with the same values for all others."""
    values = list(dict.fromkeys(values_or_ends(space.params[path])))
    lowest = space.draw(lambda each, _: values_or_ends(space.params[each])[0])
    drawn = ValidPoints(space, random.Random(0))
    for base in (lowest, *(drawn.any() for _ in range(_TRIES if space.where else 0))):
        allowed = [point for value in values if space.violated(point := {**base, path: value}) is None]
        if len(allowed) > 1 or not space.where:
            break
    return allowed or [base]


def _shapes(spec: StudySpec, params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kept = rng_state()
    try:
        model: nn.Module = instantiate(TargetResolver(spec.folder), spec.resolve(params)["model"])
    finally:
        set_rng_state(kept)
    return {name: tuple(getattr(part, "shape", ())) for name, part in model.state_dict().items()}
