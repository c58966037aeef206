"""Whether the forks of a study's scheduler can load what their parents have saved, found by building models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpo.config.schema_space import values_or_ends
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import TargetResolver, instantiate
from hpo.search.schedulers.by_name import make_scheduler
from hpo.search.schedulers.pbt.scheduler import Pbt
from trainer.data.random_state import rng_state, set_rng_state


def check_forks(spec: StudySpec) -> None:
    """Refuse a parameter that forks change if the model has other weights with another value of it.

    Raises:
        InputError: There is one; or the scheduler can't be made.
    """
    scheduler = make_scheduler(spec)
    if not isinstance(scheduler, Pbt):
        return
    space = SearchSpace.from_spec(spec)
    for path in scheduler.perturb:
        if not path.startswith("model."):
            continue
        values = values_or_ends(space.params[path])
        one, *others = (_shapes(spec, _point(space, path, value)) for value in dict.fromkeys(values))
        if any(shapes != one for shapes in others):
            raise spec.error(
                "can't be changed while a trial trains: the model has other weights then",
                path="study.scheduler.perturb",
                value=path,
                fix="leave it out: each fork has its parent's value",
            )


def _point(space: SearchSpace, path: str, value: Any) -> Mapping[str, Any]:
    """Parameters with a value of one of them, and the low end of all others."""
    return space.draw(lambda each, _: value if each == path else values_or_ends(space.params[each])[0])


def _shapes(spec: StudySpec, params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kept = rng_state()
    try:
        model: nn.Module = instantiate(TargetResolver(spec.folder), spec.resolve(params)["model"])
    finally:
        set_rng_state(kept)
    return {name: tuple(getattr(part, "shape", ())) for name, part in model.state_dict().items()}
