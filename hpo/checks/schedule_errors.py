"""Refuses schedules that can't do what the study file says, before a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from hpo.config.lengths import lengths_in
from hpo.config.paths import Keys, join_path, same, split_path
from hpo.config.schema import TrainerSection
from hpo.config.schema_space import CategoricalParam, ParamSpec, label, values_or_ends
from hpo.config.several import is_several
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import ARGS, TARGET, TargetResolver
from hpo.errors import InputError
from hpo.trial.optimizer import unmatched
from hpo.trial.run_length import shortfall

_SECTION: Final = "lr_scheduler"
_SWITCH: Final = "lr_scheduler._target_"
_INTERVAL: Final = "lr_scheduler.interval"
#: Schedulers that set the optimizer's learning rate, with the arguments that they take it from.
_SETS: Final[Mapping[type, tuple[str, ...]]] = {OneCycleLR: ("max_lr",), CyclicLR: ("base_lr", "max_lr")}
_MOMENTUM: Final = ("base_momentum", "max_momentum")
#: The limits of a trial's epochs or steps, which may be searched.
_LIMITS: Final = ("trainer.max_epochs", "trainer.max_steps")


def check_schedule(spec: StudySpec, *, search: bool = True) -> None:
    """Refuse a schedule that steps without its metric, overwrites a searched value, or ends before a trial does.

    With several optimizers, each schedule must be of one of them.

    Args:
        spec: The study.
        search: Also look at what the search space may set.

    Raises:
        InputError: A schedule does one of these in some trial.
    """
    space = SearchSpace.from_spec(spec) if search else None
    for forced in _variants(spec.search_space if search else {}):
        variant = _Variant(spec, space, forced)
        config = variant.config()
        node = config["lr_scheduler"]
        if node is None:
            continue
        if is_several(config["optimizer"]):
            variant.check_match(node, config["optimizer"])
        if not is_several(node):  # several schedulers are only checked by building them
            variant.check()


def _variants(entries: Mapping[str, ParamSpec]) -> Iterator[dict[str, Any]]:
    """The parameters of every combination of scheduler and interval that may be drawn."""
    axes = {path: entries[path] for path in (_SECTION, _SWITCH, _INTERVAL) if path in entries}
    choices = [entry.choices for entry in axes.values() if isinstance(entry, CategoricalParam)]
    for values in itertools.product(*choices):
        yield dict(zip(axes, values, strict=True))


@dataclass(frozen=True)
class _Variant:
    """A study with one choice of scheduler and interval."""

    spec: StudySpec
    space: SearchSpace | None
    forced: Mapping[str, Any]

    def point(self, **values: Any) -> dict[str, Any]:
        """The parameters of a trial: these values if they are searched, and the low ends of all others."""
        if self.space is None:
            return {}
        chosen, entries = {**self.forced, **values}, self.space.params
        return self.space.draw(lambda path, _: chosen.get(path, values_or_ends(entries[path])[0]))

    def config(self, **values: Any) -> dict[str, Any]:
        """The config of the trial with the parameters of `point`."""
        return self.spec.resolve(self.point(**values))

    def check_match(self, node: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
        """Refuse a scheduler that is of none of several optimizers."""
        found = unmatched(node, optimizers)
        if found is not None:
            raise self._error(found.problem, found.path, fix=found.fix)

    def check(self) -> None:
        """Refuse what this scheduler can't do."""
        node = self.config()["lr_scheduler"]
        kind = TargetResolver(self.spec.folder).resolve(node[TARGET])
        if not isinstance(kind, type):
            return
        if issubclass(kind, ReduceLROnPlateau) and node["interval"] == "step":
            problem = f"{kind.__name__} follows a metric of a whole epoch, which no step has"
            raise self._error(problem, _INTERVAL, value="step", fix="write `interval: epoch`")
        if issubclass(kind, LRScheduler) and kind.__module__ == LRScheduler.__module__:
            self._check_unit(node)
        if _SECTION not in self.forced:  # if the section is one choice, searched values may be for the others
            self._check_searched(kind, node)
        if issubclass(kind, OneCycleLR):
            self._check_end()

    def _check_unit(self, node: Mapping[str, Any]) -> None:
        """Refuse a length in steps for a scheduler that steps once an epoch."""
        for keys, name in lengths_in(node):
            if node["interval"] == "epoch":
                path = join_path(("lr_scheduler", *keys))
                problem = "counts optimizer steps, but the scheduler steps once an epoch"
                value = f"${{trainer.{name}}}"
                raise self._error(problem, path, value=value, fix="add `interval: step` to the scheduler")

    def _check_searched(self, kind: type, node: Mapping[str, Any]) -> None:
        """Refuse a searched value of the optimizer that the scheduler overwrites."""
        rates = next((names for each, names in _SETS.items() if issubclass(kind, each)), None)
        if rates is None or self.space is None:
            return
        replaced = {"optimizer.lr": rates}
        groups = self.config()["optimizer"].get("groups", {})
        replaced |= {join_path(("optimizer", "groups", name, "lr")): rates for name in groups}
        if node.get("cycle_momentum", True):
            replaced |= {"optimizer.momentum": _MOMENTUM, "optimizer.betas[0]": _MOMENTUM}
        for path, names in replaced.items():
            if path in self.point() and not self._follows(path, names):
                listed = " and ".join(f"`{name}`" for name in names)
                problem = f"searched without effect: {kind.__name__} sets it from {listed}"
                fix = f'write `{names[-1]}: "${{{path}}}"` in `lr_scheduler`'
                raise self._error(problem, join_path(("search_space", path)), fix=fix)

    def _follows(self, path: str, names: tuple[str, ...]) -> bool:
        """Whether one of these arguments depends on a searched value, or the search has only one value."""
        assert self.space is not None
        ends = values_or_ends(self.space.params[path])
        first, last = (self.config(**{path: end})["lr_scheduler"] for end in (ends[0], ends[-1]))
        return ends[0] == ends[-1] or any(first.get(name) != last.get(name) for name in (*names, ARGS))

    def _check_end(self) -> None:
        """Refuse a OneCycleLR that ends before the trial does: its next step would raise."""
        entries = {} if self.space is None else self.space.params
        ends = {path: values_or_ends(entries[path]) for path in _LIMITS if path in entries}
        for at in (0, -1):
            config = self.config(**{path: values[at] for path, values in ends.items()})
            short = shortfall(config["lr_scheduler"], _calls(config))
            if short is not None:
                raise self._error(short.problem, f"lr_scheduler.{short.key}", value=short.span, fix=short.fix)

    def _error(self, problem: str, path: str, *, value: Any = "", fix: str) -> InputError:
        if path in self.spec.search_space:
            path = join_path(("search_space", path))
        elif _SECTION in self.forced and path.startswith(_SECTION):
            path = self._place(split_path(path))
        elif self.forced and path.startswith("lr_scheduler"):
            problem += f" ({', '.join(f'with {name} {choice}' for name, choice in self.forced.items())})"
        return self.spec.error(problem, path=path, value=value, fix=fix)

    def _place(self, keys: Keys) -> str:
        """The path of a scheduler's key, which may be among the choices of the whole section."""
        entry, chosen = self.spec.config.search_space[_SECTION], self.forced[_SECTION]
        choices = entry.choices if isinstance(entry, CategoricalParam) else ()
        at = next(at for at, choice in enumerate(choices) if same(label(choice), chosen))
        return join_path(("search_space", _SECTION, "choices", at, *keys[1:]))


def _calls(config: Mapping[str, Any]) -> int | None:
    """How often a trial steps its scheduler; None if that depends on the data."""
    section = TrainerSection.model_validate(config["trainer"])
    if config["lr_scheduler"]["interval"] == "epoch":
        return section.known_epochs
    return section.max_steps if section.max_epochs is None else None
