"""Builds samplers by name, so that parallel workers never draw the same point and a study can be repeated."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from optuna import Study, samplers
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from hpo.config.paths import suggest_name
from hpo.config.schema_study import AUTO
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.search.as_predicted import as_predicted
from hpo.search.auto_sampler import chosen_sampler
from hpo.search.by_name import arguments_of, check_arguments, construct, find_class, known_class
from hpo.search.curve_sampler import CurveGPSampler
from hpo.search.distinct import WholePointSampler, point_key
from hpo.search.per_trial import NumberedQMCSampler, PerTrialSampler
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.proposals import nearest_valid
from hpo.storage.attributes import BASELINE_ATTR, IMPORTED_ATTR
from hpo.storage.optuna_private import FIXED_PARAMS_ATTR, all_trials, fixed_params

SAMPLERS: Final[Mapping[str, type[samplers.BaseSampler]]] = MappingProxyType(
    {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "curve_gp": CurveGPSampler,
        "gp": samplers.GPSampler,
        "cmaes": samplers.CmaEsSampler,
        "nsgaii": samplers.NSGAIISampler,
        "nsgaiii": samplers.NSGAIIISampler,
        "qmc": samplers.QMCSampler,
        "grid": samplers.GridSampler,
        "brute_force": samplers.BruteForceSampler,
        "partial_fixed": samplers.PartialFixedSampler,
    }
)

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
_EXHAUSTIVE: Final = (samplers.GridSampler, samplers.BruteForceSampler)
#: Samplers that use no predicted values: they read the curves themselves, which say more, or no trial at all.
_NO_VALUES: Final = (CurveGPSampler, samplers.RandomSampler, samplers.QMCSampler)
#: Samplers without preferences: every point is as good as another.
_NO_OPINION: Final = (samplers.RandomSampler, samplers.QMCSampler)
#: Draws for one trial, where there are too many points to list.
_DRAWS: Final = 20
#: Draws for one trial with a sampler that is slow and would draw nearly the same point again.
_FEW_DRAWS: Final = 2
#: Arguments that hpo sets itself; for every other sampler, only the seed.
TAKEN: Final[Mapping[type, tuple[str, ...]]] = MappingProxyType(
    {
        CurveGPSampler: ("seed", "space", "conditions", "where", "independent_sampler"),
        **dict.fromkeys(_EXHAUSTIVE, ("seed", "search_space", "avoid_premature_stop")),
    }
)
#: Arguments of TPE where trials may have different parameters: without them, TPE would draw a parameter that only
#: some trials have on its own, without regard to the others.
_VARYING: Final = MappingProxyType({"multivariate": True, "group": True})


class ExhaustiveSampler(samplers.BaseSampler):
    """Every point of a finite space once, in an order shuffled by the seed: ``grid`` and ``brute_force``.

    A trial's point follows from its rank among the trials that were not enqueued or imported, so two workers never
    take the same point; the baseline's point is left out. (Optuna's own samplers choose among the points that are
    unvisited so far: two trials that ask at the same time may get the same point, and ``tell`` raises at the end
    of the last one.)

    Args:
        points: All points, each parameter name → value.
        seed: Seed of the order.
        space: Distributions of the parameters, used to recognise a point.
    """

    def __init__(
        self, points: Sequence[Mapping[str, Any]], seed: int, space: Mapping[str, BaseDistribution]
    ) -> None:
        self._points = list(points)
        random.Random(seed).shuffle(self._points)
        self._space = space
        self._baseline: int | None = None
        self._point: Mapping[str, Any] = {}

    def __len__(self) -> int:
        return len(self._points)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Find the trial's point."""
        trials = all_trials(study)
        earlier = [other for other in trials if other.number < trial.number]
        rank = sum(not has_own_point(other) for other in earlier)
        rank += rank >= self._baseline_at(trials)
        self._point = self._points[rank] if rank < len(self._points) and not has_own_point(trial) else {}

    def left(self, trials: Sequence[FrozenTrial]) -> int:
        """How many points trials can draw: all but the baseline's."""
        return len(self._points) - (self._baseline_at(trials) < len(self._points))

    def _baseline_at(self, trials: Sequence[FrozenTrial]) -> int:
        """The baseline's index in the order, or the end where there is none.

        The result can be kept: the baseline is in the queue before any trial is drawn.
        """
        if self._baseline is None:
            base = next((trial for trial in trials if BASELINE_ATTR in trial.user_attrs), None)
            if base is None:
                return len(self._points)
            key = point_key(fixed_params(base), self._space)
            places = (at for at, point in enumerate(self._points) if point_key(point, self._space) == key)
            self._baseline = next(places, len(self._points))
        return self._baseline

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """Nothing is sampled jointly."""
        return {}

    def sample_relative(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        """Nothing is sampled jointly."""
        return {}

    def sample_independent(
        self,
        study: Study,  # noqa: ARG002
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,  # noqa: ARG002
    ) -> Any:
        """The parameter's value at the trial's point.

        Raises:
            StudyError: The point has no such parameter: an enqueued trial left it open.
        """
        if param_name not in self._point:
            raise StudyError(f"trial {trial.number}: its point of the grid has no value for {param_name}")
        return self._point[param_name]


def has_own_point(trial: FrozenTrial) -> bool:
    """Whether a trial was enqueued or imported, so that it takes no point of a grid."""
    return FIXED_PARAMS_ATTR in trial.system_attrs or IMPORTED_ATTR in trial.system_attrs


def make_sampler(spec: StudySpec, space: SearchSpace) -> samplers.BaseSampler:
    """The sampler of ``study.sampler``; for ``auto`` see `hpo.search.auto_sampler`.

    Raises:
        InputError: The name or an argument does not fit, a grid lies over a continuous range, or CMA-ES is
            asked for without ``allow_pickle``.
    """
    section = spec.study.sampler
    if section.name == AUTO and section.kwargs:
        fix = "leave it out, or name the sampler that it is for"
        raise spec.error("auto takes no arguments", path="study.sampler", value=section.kwargs, fix=fix)
    node = {"name": chosen_sampler(spec).name, **section.kwargs}
    if _checked(spec, "study.sampler", node) in _EXHAUSTIVE:
        return ExhaustiveSampler(space.grid(), section.seed, space.distributions)

    def make(seed: int) -> samplers.BaseSampler:
        return _make(spec, space, "study.sampler", node, seed)

    if spec.defines_by_run:  # the space is not known before a trial draws from it
        return PerTrialSampler(make, section.seed, _as_it_is)
    *around, (kind, _, _) = _layers(spec, "study.sampler", node)
    fixed: dict[str, Any] = {}
    for _, path, outer in reversed(around):
        fixed |= _fixed(spec, space, path, outer)
    encoding = Encoding(space.distributions, space.conditions, space.where)
    shown = _as_it_is if kind in _NO_VALUES else partial(as_predicted, encoding=encoding)
    # A paused trial has no result to reuse, so with a scheduler a duplicate would train the same thing again.
    draws_others = {"resample"} if spec.study.scheduler is None else {"resample", "reuse"}
    # Two draws from a real range are never equal, so there are no duplicates to look for.
    distinct = spec.study.duplicates in draws_others and not space.is_continuous
    if not distinct and not space.where:
        return PerTrialSampler(make, section.seed, shown)
    within = Encoding(_space_with(space, fixed), space.conditions, space.where)
    return WholePointSampler(
        make,
        section.seed,
        shown,
        space,
        distinct=distinct,
        fixed=fixed,
        nearest=None if kind in _NO_OPINION else partial(nearest_valid, within),
        draws=_FEW_DRAWS if kind is samplers.GPSampler else _DRAWS,
    )


def drawing_sampler(spec: StudySpec) -> tuple[str, str]:
    """Path and name of the sampler that draws a study's points; for ``partial_fixed``, the one inside it."""
    node: Mapping[str, Any] = spec.study.sampler.kwargs
    path, name = "study.sampler", chosen_sampler(spec).name
    while known_class(name, SAMPLERS) is samplers.PartialFixedSampler:
        inner = node.get("base_sampler")
        node = inner if isinstance(inner, Mapping) else {"name": inner}
        path, name = f"{path}.base_sampler", str(node.get("name"))
    return path, name


def import_models(spec: StudySpec) -> None:
    """Import the modules that the study's sampler draws with, so that each trial's process need not do so."""
    section, kind = spec.study, known_class(drawing_sampler(spec)[1], SAMPLERS)
    if kind is CurveGPSampler:
        import hpo.search.curve_proposal
    stops = section.scheduler is not None or section.pruner.prunes
    shown = section.objectives is None and not spec.defines_by_run
    if stops and shown and kind not in (*_NO_VALUES, *_EXHAUSTIVE):
        import hpo.search.predicted_ends  # noqa: F401


def _as_it_is(study: Study) -> Study:
    return study


def _layers(
    spec: StudySpec, path: str, node: Mapping[str, Any]
) -> Iterator[tuple[type[samplers.BaseSampler], str, Mapping[str, Any]]]:
    """Class, path and node of a sampler, and of those inside ``partial_fixed``; the last one draws."""
    kind = _checked(spec, path, node)
    yield kind, path, node
    if kind is samplers.PartialFixedSampler:
        path = f"{path}.base_sampler"
        yield from _layers(spec, path, _named(spec, path, node["base_sampler"]))


def _checked(spec: StudySpec, path: str, node: Mapping[str, Any]) -> type[samplers.BaseSampler]:
    kind = find_class(spec, path, node, SAMPLERS, samplers.BaseSampler, (AUTO,))
    beside = ("seed",) if path == "study.sampler" else ()  # an inner sampler has the outer one's seed
    check_arguments(spec, path, kind, arguments_of(node), TAKEN.get(kind, ("seed",)), beside)
    if kind is CurveGPSampler and spec.study.objectives is not None:
        fix = "name one for several objectives, such as nsgaii or tpe"
        raise spec.error("can't be used with several objectives", path=f"{path}.name", value=node["name"], fix=fix)
    if kind is samplers.CmaEsSampler and not spec.study.sampler.allow_pickle:
        raise spec.error(
            "CMA-ES unpickles its state from the database, so anyone who can write there can run code here",
            path=f"{path}.name",
            value=node["name"],
            fix="if you trust the database, add `allow_pickle: true`; or use another sampler, such as tpe",
        )
    return kind


def _make(
    spec: StudySpec,
    space: SearchSpace,
    path: str,
    node: Mapping[str, Any],
    seed: int,
    fixed: Mapping[str, Any] = _NOTHING,
) -> samplers.BaseSampler:
    """Build a sampler; ``fixed`` are the values that the samplers around it give each point."""
    kind = _checked(spec, path, node)
    if kind in _EXHAUSTIVE:
        fix = "name it as the study's sampler, or take another one here"
        raise spec.error("can't stand inside another sampler", path=f"{path}.name", value=node["name"], fix=fix)
    arguments = arguments_of(node)
    if kind is samplers.PartialFixedSampler:
        arguments["fixed_params"] = fixed = {**_fixed(spec, space, path, node), **fixed}
    if kind is samplers.TPESampler:
        known = _VARYING if spec.defines_by_run else tpe_arguments(space.distributions, space.conditions)
        arguments = {**known, **arguments}
    for name in ("base_sampler", "independent_sampler"):
        if name in arguments:
            inner = _named(spec, f"{path}.{name}", arguments[name])
            arguments[name] = _make(spec, space, f"{path}.{name}", inner, seed, fixed)
    if kind is samplers.QMCSampler:
        # All workers share one sequence, so one seed; independent draws still need a seed for each trial.
        arguments.setdefault("independent_sampler", samplers.RandomSampler(seed=seed))
        seed, kind = spec.study.sampler.seed, NumberedQMCSampler
    if kind is CurveGPSampler:  # it mixes in the trial's number itself, except in independent draws
        arguments |= {"conditions": space.conditions, "where": space.where}
        arguments["space"] = _space_with(space, fixed)
        arguments["independent_sampler"] = samplers.RandomSampler(seed=seed)
        seed = spec.study.sampler.seed
    if issubclass(kind, samplers.QMCSampler | samplers.CmaEsSampler):  # they would warn at each independent draw
        arguments.setdefault("warn_independent_sampling", False)
    if "seed" in inspect.signature(kind).parameters:
        arguments["seed"] = seed
    sampler: samplers.BaseSampler = construct(spec, path, kind, arguments, node)
    return sampler


def tpe_arguments(space: Mapping[str, BaseDistribution], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Default arguments of TPE, chosen by the measurements in docs/search.md; a study file overrides them."""
    if conditions:
        return dict(_VARYING)
    if any(isinstance(each, CategoricalDistribution) for each in space.values()):
        return {}  # only Optuna's multivariate default finds choices that depend on each other
    return {"multivariate": False, "constant_liar": False}


def _fixed(spec: StudySpec, space: SearchSpace, path: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """The values that ``partial_fixed`` gives each point, as stored; refused here, as Optuna checks no value."""
    path, given = f"{path}.fixed_params", node["fixed_params"]
    if not isinstance(given, Mapping):
        fix = "write for example `{optimizer.lr: 1e-3}`"
        raise spec.error("must be a mapping of searched parameters to values", path=path, value=given, fix=fix)
    if spec.defines_by_run:
        return dict(given)
    for name, value in given.items():
        if name not in space.params:
            fix = suggest_name(str(name), list(space.params), what="searched are")
            raise spec.error("is not searched", path=path, value=name, fix=fix)
        if (instead := space.problem(name, value)) is not None:
            raise spec.error(f"`{name}` is not in the search space", path=path, value=value, fix=instead)
    return {name: space.as_stored(name, value) for name, value in given.items()}


def _space_with(space: SearchSpace, fixed: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """The distributions with each fixed parameter reduced to its value, so that a model sees the others alone."""
    return {
        name: _single(each, fixed[name]) if name in fixed else each for name, each in space.distributions.items()
    }


def _single(distribution: BaseDistribution, value: Any) -> BaseDistribution:
    if isinstance(distribution, CategoricalDistribution):
        return CategoricalDistribution([value])
    kind = IntDistribution if isinstance(distribution, IntDistribution) else FloatDistribution
    return kind(value, value)


def _named(spec: StudySpec, path: str, node: Any) -> Mapping[str, Any]:
    named = {"name": node} if isinstance(node, str) else node
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        raise spec.error("must be a sampler", path=path, value=node, fix="write for example `{name: random}`")
    return named
