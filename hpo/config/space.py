"""SearchSpace: dotted path → Optuna distribution, with conditions between the entries."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpo.config.conditions import Condition
from hpo.config.overrides import list_problem, path_problem
from hpo.config.paths import PathError, join_path, lookup, same, show, split_path, suggest_name
from hpo.config.schema_space import CategoricalParam, FloatParam, IntParam, ParamSpec, label
from hpo.config.spec import StudySpec

if TYPE_CHECKING:  # optuna takes long to import, and reading a space does not need it
    import optuna
    from optuna.distributions import BaseDistribution

_LARGEST_GRID = 1_000_000
_SEARCHED_ELSEWHERE = ("study", "run", "search_space", "where")


@dataclass(frozen=True)
class SearchSpace:
    """The entries of a study's search space.

    A condition on another entry holds while that entry is itself searched and has one of the values; an
    entry whose conditions do not hold is not suggested, and the base config keeps its value.

    Attributes:
        params: Entries by dotted path, each after those that its conditions name.
    """

    params: Mapping[str, ParamSpec]
    _spec: StudySpec

    @classmethod
    def from_spec(cls, spec: StudySpec) -> "SearchSpace":
        """Create the search space; check its entries against each other and the config.

        Raises:
            InputError: An entry's path or condition names nothing, two name the same, or conditions form a circle.
        """
        config = spec.base_config()
        for path in spec.search_space:
            _check_path(spec, config, path)
        places = _places(spec)
        for path, param in spec.search_space.items():
            for other, values in param.when.items():
                if (searched := places.get(_place(other), other)) != other:
                    here = join_path(("search_space", path, "when", other))
                    raise spec.error(f"is searched as `{searched}`", path=here, fix=f"write `{searched}`")
                _check_condition(spec, config, path, other, values)
        order = _ordered(spec)
        return cls({path: spec.search_space[path] for path in order}, spec)

    @cached_property
    def distributions(self) -> "dict[str, BaseDistribution]":
        """Optuna's distribution of each entry, by dotted path."""
        return {path: _distribution(param) for path, param in self.params.items()}

    @property
    def conditions(self) -> "dict[str, Mapping[str, Sequence[Any]]]":
        """For each conditional entry, the values of other entries under which it is suggested."""
        return {path: param.when for path, param in self.params.items() if param.when}

    @property
    def where(self) -> tuple[Condition, ...]:
        """The conditions that every point satisfies beside its ranges."""
        return self._spec.where

    def violated(self, params: Mapping[str, Any]) -> Condition | None:
        """The first condition of `where` that does not hold for a point; None if all hold."""
        return next((condition for condition in self.where if not condition.holds(params)), None)

    def suggest(self, trial: "optuna.Trial | optuna.trial.BaseTrial") -> dict[str, Any]:
        """Ask a trial for a value of every entry whose conditions hold; names are the dotted paths.

        A trial keeps the values that it has: one that resumes may have drawn them before the space was widened.
        """
        had = trial.params
        return self._walk(lambda path, param: had[path] if path in had else _suggest(trial, path, param))

    def draw(self, value: "Callable[[str, BaseDistribution], Any]") -> dict[str, Any]:
        """A point whose values a function draws, from the path and the distribution of each active entry."""
        return self._walk(lambda path, _: value(path, self.distributions[path]))

    def _walk(self, value: "Callable[[str, ParamSpec], Any]") -> dict[str, Any]:
        values: dict[str, Any] = {}
        for path, param in self.params.items():
            if self._active(param, values):
                values[path] = value(path, param)
        return values

    @property
    def is_continuous(self) -> bool:
        """Whether every point has a value from a real range without steps."""
        return any(
            isinstance(param, FloatParam) and param.step is None and param.low < param.high and not param.when
            for param in self.params.values()
        )

    def grid(self) -> list[dict[str, Any]]:
        """Every point of the space that satisfies `where`, once; without the entries whose conditions do not hold.

        Raises:
            InputError: A real-valued range has no step, or there are too many points to list.
        """
        axes = {path: self._axis(path, param) for path, param in self.params.items()}
        points = list(itertools.islice(self._points(axes, list(self.params), {}), _LARGEST_GRID + 1))
        if len(points) > _LARGEST_GRID:
            fix = "give the ranges larger steps, or use another sampler"
            problem = f"a grid of more than {_LARGEST_GRID:,} points is too large"
            raise self._spec.error(problem, path="search_space", fix=fix)
        return [point for point in points if self.violated(point) is None]

    def contains(self, params: Mapping[str, Any]) -> bool:
        """Whether these are the values of exactly the entries whose conditions hold, each in its range."""
        active = {path for path, param in self.params.items() if self._active(param, params)}
        return set(params) == active and all(_possible(self.params[path], params[path]) for path in active)

    def problem(self, path: str, value: Any) -> str | None:
        """The values that an entry can have, if this is not one of them; None if it is."""
        param = self.params[path]
        return None if _possible(param, self.as_stored(path, value)) else _possible_values(param, label(value))

    def as_stored(self, path: str, value: Any) -> Any:
        """A value in its entry's type: 1e2 becomes 100 for a whole number, 1 becomes 1.0 for a real one.

        A list or mapping becomes its label.
        """
        value = label(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        param = self.params[path]
        if isinstance(param, FloatParam):
            return float(value)
        return int(value) if isinstance(param, IntParam) and float(value).is_integer() else value

    def active(self, values: Mapping[str, Any]) -> list[str]:
        """The entries whose conditions hold for these values, in order."""
        return [path for path, param in self.params.items() if self._active(param, values)]

    def may_meet(self, path: str, other: str, value: Any) -> bool:
        """Whether an entry can be active in a point where the entry `other` has this value."""
        allowed: dict[str, list[Any]] = {other: [value]}
        pending = [path, other]
        while pending:
            for name, wanted in self.params[pending.pop()].when.items():
                known = allowed.get(name, wanted)
                allowed[name] = [each for each in known if any(same(each, item) for item in wanted)]
                if not allowed[name]:
                    return False
                pending += [name] if name in self.params else []
        return True

    def _active(self, param: ParamSpec, values: Mapping[str, Any]) -> bool:
        # A condition on a value that is not searched was checked when the space was built.
        return all(
            path not in self.params or (path in values and any(same(values[path], item) for item in wanted))
            for path, wanted in param.when.items()
        )

    def _axis(self, path: str, param: ParamSpec) -> list[Any] | range:
        if isinstance(param, CategoricalParam):
            return list(param.choices)
        if isinstance(param, IntParam):
            return range(param.low, param.high + 1, param.step)
        if param.low == param.high:
            return [param.low]
        if param.step is None:
            fix = "give it a step, or make it categorical"
            raise self._spec.error(
                "the grid sampler needs a step here", path=join_path(("search_space", path)), fix=fix
            )
        low, step = Decimal(str(param.low)), Decimal(str(param.step))
        count = int((Decimal(str(param.high)) - low) // step) + 1
        if count > _LARGEST_GRID:
            problem = f"a grid of more than {_LARGEST_GRID:,} points is too large"
            raise self._spec.error(problem, path=join_path(("search_space", path)), fix="give it a larger step")
        return [float(low + at * step) for at in range(count)]

    def _points(
        self, axes: Mapping[str, list[Any] | range], left: list[str], point: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if not left:
            yield dict(point)
        elif not self._active(self.params[left[0]], point):
            yield from self._points(axes, left[1:], point)
        else:
            for value in axes[left[0]]:
                yield from self._points(axes, left[1:], {**point, left[0]: value})


def _check_path(spec: StudySpec, config: Mapping[str, Any], path: str) -> None:
    here = join_path(("search_space", path))
    try:
        keys = split_path(path)
    except PathError as error:
        raise spec.error(str(error), path=here, fix="write for example `optimizer.lr`") from error
    if keys[0] in _SEARCHED_ELSEWHERE:
        fix = "search the model, the optimizer or another section of the training"
        raise spec.error(f"`{keys[0]}` can't be searched", path=here, fix=fix)
    searched = any(join_path(keys[:depth]) in spec.search_space for depth in range(1, len(keys)))
    if found := path_problem(config, keys) or (None if searched else list_problem(config, keys)):
        raise spec.error(found[0], path=here, fix=found[1])
    # A callback can be switched on or off as a whole; any other section only be replaced by another mapping.
    if keys == ("callbacks",):
        fix = "search each by its name: `callbacks.ema: {type: categorical, choices: [true, false]}`"
        raise spec.error("callbacks can't be searched all together", path=here, fix=fix)
    if isinstance(lookup(config, keys), dict) and keys[0] != "callbacks" and not _is_of_sections(spec, path):
        fix = "name one of its values, or write `type: categorical` with a mapping for each choice"
        raise spec.error("a whole section can't be searched", path=here, fix=fix)


def _place(path: str) -> tuple[str, ...]:
    """The keys of a path, which are the same for ``betas.0`` and ``betas[0]``; () if the text is not a path."""
    try:
        return tuple(map(str, split_path(path)))
    except PathError:
        return ()


def _places(spec: StudySpec) -> dict[tuple[str, ...], str]:
    """The entries by their keys; refuses two entries for one place."""
    places: dict[tuple[str, ...], str] = {}
    for path in spec.search_space:
        first = places.setdefault(_place(path), path)
        if first != path:
            here = join_path(("search_space", path))
            raise spec.error(f"names the same value as `{first}`", path=here, fix="keep one of the two")
    return places


def _is_of_sections(spec: StudySpec, path: str) -> bool:
    entry = spec.config.search_space[path]
    return isinstance(entry, CategoricalParam) and all(isinstance(each, dict | None) for each in entry.choices)


def _check_condition(
    spec: StudySpec, config: Mapping[str, Any], path: str, other: str, values: tuple[Any, ...]
) -> None:
    here = join_path(("search_space", path, "when", other))
    if other in spec.search_space:
        param = spec.search_space[other]
        for value in values:
            if not _possible(param, value):
                problem = f"`{other}` never is {show(value)}"
                raise spec.error(problem, path=here, value=value, fix=_possible_values(param, value))
        return
    missing = object()
    try:
        base = lookup(config, split_path(other), missing)
    except PathError:
        base = missing
    if base is missing:
        fix = suggest_name(other, [name for name in spec.search_space if name != path], what="searched are")
        raise spec.error("the condition names nothing", path=here, fix=fix)
    base = label(base)
    if not any(same(base, value) for value in values):
        problem = f"never holds: `{other}` is {show(base)} in the config, and is not searched"
        fix = f"add `{other}` to search_space, or write {show(base)} here"
        raise spec.error(problem, path=here, value=show(list(values)), fix=fix)


def _possible_values(param: ParamSpec, value: Any) -> str:
    if isinstance(param, CategoricalParam):
        return suggest_name(value, param.choices, what="its choices are")
    step = f" in steps of {show(param.step)}" if param.step not in (None, 1) else ""
    kind = "whole number" if isinstance(param, IntParam) else "value"
    return f"write a {kind} from {show(param.low)} to {show(param.high)}{step}"


def _possible(param: ParamSpec, value: Any) -> bool:
    if isinstance(param, CategoricalParam):
        return any(same(choice, value) for choice in param.choices)
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not numeric or not param.low <= value <= param.high:
        return False
    if isinstance(param, IntParam) and not isinstance(value, int):
        return False
    return param.step is None or _on_step(value, param.low, param.step)


def _on_step(value: float, low: float, step: float) -> bool:
    count = (value - low) / step
    return math.isclose(count, round(count), rel_tol=0.0, abs_tol=1e-8 * max(1.0, abs(count)))


def _ordered(spec: StudySpec) -> list[str]:
    """The entries in the file's order, but each one after those that its conditions name."""
    order: list[str] = []

    def visit(path: str, chain: tuple[str, ...]) -> None:
        if path in chain:
            circle = " → ".join((*chain[chain.index(path) :], path))
            here = join_path(("search_space", chain[-1], "when", path))
            raise spec.error(
                f"conditions depend on each other: {circle}", path=here, fix="remove one of these conditions"
            )
        if path not in order:
            for other in spec.search_space[path].when:
                if other in spec.search_space:
                    visit(other, (*chain, path))
            order.append(path)

    for path in spec.search_space:
        visit(path, ())
    return order


def _distribution(param: ParamSpec) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(param, FloatParam):
        return FloatDistribution(param.low, param.high, log=param.log, step=param.step)
    if isinstance(param, IntParam):
        return IntDistribution(param.low, param.high, log=param.log, step=param.step)
    return CategoricalDistribution(param.choices)


def _suggest(trial: Any, path: str, param: ParamSpec) -> Any:
    if isinstance(param, FloatParam):
        return trial.suggest_float(path, param.low, param.high, log=param.log, step=param.step)
    if isinstance(param, IntParam):
        return trial.suggest_int(path, param.low, param.high, log=param.log, step=param.step)
    return trial.suggest_categorical(path, param.choices)
