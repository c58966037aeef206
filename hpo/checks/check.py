"""Checks a study's import paths, arguments and metric against the code they name, before anything runs."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hpo.checks.findings import Finding, finding
from hpo.config.paths import Keys, join_path, lookup, same, split_path, suggest_name
from hpo.config.schema import FREE_SECTIONS, SCHEDULER_KEYS
from hpo.config.schema_metrics import METRIC_KEYS
from hpo.config.schema_space import CategoricalParam
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import ARGS, HYDRA_KEYS, PARTIAL, RECURSIVE, TARGET, TargetResolver, is_refused
from hpo.errors import InputError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

#: What the trainer itself hands to each section's target: always, or to plain functions only.
_SUPPLIED = {"optimizer": ("params",), "lr_scheduler": ("optimizer",)}
_SUPPLIED_TO_FUNCTIONS = {
    "loss": ("outputs", "targets"),
    "metrics": ("outputs", "targets"),
    "step": ("model", "batch"),
}


def check_spec(
    spec: StudySpec, *, callbacks: Mapping[str, Callable[..., Any]] | None = None, search: bool = True
) -> list[Finding]:
    """Import every target, and check arguments and search paths against the signatures.

    Args:
        spec: The study.
        callbacks: The callbacks that go by a short name; without it their arguments stay unchecked.
        search: Also check what the search space may set; otherwise the base config must be complete alone.

    Returns:
        Warnings: what can't be checked before it runs.

    Raises:
        InputError: A target can't be imported, or does not fit its arguments.
    """
    space = SearchSpace.from_spec(spec) if search else None
    checker = _Checker(spec, TargetResolver(spec.folder), space, dict(callbacks or {}))
    checker.check(known_callbacks=callbacks is not None)
    return checker.warnings


def recorded_metrics(spec: StudySpec, extra: Collection[str] = ()) -> list[str]:
    """The metrics that every epoch records: losses, lr, those of `metrics`, `step`, callbacks, and `extra`."""
    resolver = TargetResolver(spec.folder)
    named = list(spec.config.metrics)
    if spec.config.step is not None:
        named += getattr(resolver.resolve(spec.config.step[TARGET]), "records", ())
    known = ["train_loss", "val_loss", "lr"]
    known += [f"{phase}_{name}" for name in named for phase in ("train", "val")]
    for node in spec.config.callbacks.values():
        if isinstance(node, dict) and TARGET in node:
            known += getattr(resolver.resolve(node[TARGET]), "writes", ())
    return list(dict.fromkeys((*known, *sorted(extra))))


def check_metric(
    spec: StudySpec, extra: Collection[str] = (), metric: str | None = None, path: str = "study.metric"
) -> list[Finding]:
    """Refuse a metric that nothing records: the study's, or the one that `path` names.

    What a step of one's own records beside its loss is not known before it runs, unless it says so in an attribute
    ``records``: a warning.

    Args:
        spec: The study.
        extra: What further callbacks write.
        metric: The metric; None: the study's.
        path: Where it is written.

    Raises:
        InputError: Nothing records it.
    """
    wanted, known = metric or spec.study.metric, recorded_metrics(spec, extra)
    if any(fnmatchcase(wanted, name) for name in known):
        return []
    fix = suggest_name(wanted, known, what="recorded are")
    if _may_come_from_the_step(spec, wanted):
        problem = "only the step could record this metric, which is not known before it runs"
        fix = f"name it in an attribute `records` of the step if it does; else {fix}"
        return [finding(spec, problem, path=path, value=wanted, fix=fix)]
    raise spec.error("nothing records this metric", path=path, value=wanted, fix=fix)


def _may_come_from_the_step(spec: StudySpec, metric: str) -> bool:
    if spec.config.step is None or not metric.startswith(("train_", "val_")):
        return False
    return not hasattr(TargetResolver(spec.folder).resolve(spec.config.step[TARGET]), "records")


@dataclass
class _Node:
    """A place with a ``_target_``: the base config's arguments there, and the entries that search below it."""

    keys: Keys
    base: dict[str, Any]
    searched: list[str] = field(default_factory=list)

    @property
    def switch(self) -> str:
        return join_path((*self.keys, TARGET))


@dataclass
class _Checker:
    spec: StudySpec
    resolver: TargetResolver
    space: SearchSpace | None
    callbacks: dict[str, Callable[..., Any]]
    warnings: list[Finding] = field(default_factory=list)

    def check(self, *, known_callbacks: bool) -> None:
        nodes = self._nodes()
        if known_callbacks:
            self._check_callback_names()
        for path in self.space.params if self.space else ():
            self._attach(path, nodes, known_callbacks=known_callbacks)
        for node in nodes.values():
            self._check_node(node)

    def _nodes(self) -> dict[Keys, _Node]:
        config = self.spec.base_config()
        nodes = {
            keys: _Node(keys, base) for name in FREE_SECTIONS for keys, base in _targets(config[name], (name,))
        }
        for name, base in config["callbacks"].items():
            if name in self.callbacks and base is not False:
                keys: Keys = ("callbacks", name)
                nodes.setdefault(keys, _Node(keys, base if isinstance(base, dict) else {}))
        for path in self.space.params if self.space else ():
            *above, last = split_path(path)
            if last == TARGET:
                nodes.setdefault(tuple(above), _Node(tuple(above), {}))
        return nodes

    def _check_callback_names(self) -> None:
        for name, node in self.spec.config.callbacks.items():
            if name not in self.callbacks and not (isinstance(node, dict) and TARGET in node):
                fix = suggest_name(name, self.callbacks, what="built in are") + "; or give it a `_target_`"
                raise self.spec.error("unknown callback", path=join_path(("callbacks", name)), fix=fix)

    def _attach(self, path: str, nodes: dict[Keys, _Node], *, known_callbacks: bool) -> None:
        """Give a search entry to the nearest node above its path; it must exist elsewhere otherwise."""
        keys = split_path(path)
        missing = object()
        for depth in range(len(keys) - 1, 0, -1):
            if keys[:depth] in nodes:
                nodes[keys[:depth]].searched.append(path)
                return
        exists = lookup(self.spec.base_config(), keys, missing) is not missing
        if exists or (keys[0] == "callbacks" and not known_callbacks):
            return
        fix = f"give `{join_path(keys[:-1])}` a `_target_` that takes `{keys[-1]}`, or correct the path"
        here = join_path(("search_space", path))
        raise self.spec.error("names nothing in the config", path=here, fix=fix)

    def _check_node(self, node: _Node) -> None:
        switch = self.space.params.get(node.switch) if self.space else None
        if TARGET in node.base or node.keys[0] == "callbacks":
            # Where the target is searched, the base config must still be a run of its own.
            own = _Call(self, node, node.base.get(TARGET), [] if switch else node.searched)
            own.check(join_path((*node.keys, TARGET) if TARGET in node.base else node.keys))
        if isinstance(switch, CategoricalParam):
            for choice in switch.choices:
                entries = [path for path in node.searched if path != node.switch]
                fitting = [path for path in entries if self._may_hold(path, node.switch, choice)]
                here = join_path(("search_space", node.switch, "choices", switch.choices.index(choice)))
                _Call(self, node, choice, fitting).check(here)

    def _may_hold(self, path: str, switch: str, choice: object) -> bool:
        """Whether an entry can be active when another one has a value."""
        assert self.space is not None
        for other, wanted in self.space.params[path].when.items():
            if other == switch and not any(same(choice, item) for item in wanted):
                return False
            if other in self.space.params and not self._may_hold(other, switch, choice):
                return False
        return True

    def always_holds(self, path: str, switch: str) -> bool:
        """Whether an entry that may be active with a target always is active with it."""
        assert self.space is not None
        when = self.space.params[path].when
        return all(other == switch or other not in self.space.params for other in when)


@dataclass
class _Call:
    """One target with all that may be given to it."""

    checker: _Checker
    node: _Node
    target: Any
    searched: list[str]

    def check(self, where: str) -> None:
        function = self._function(where)
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):
            problem = f"the arguments of `{self.label}` can't be checked"
            self.checker.warnings.append(finding(self.checker.spec, problem, path=where))
            return
        parameters = list(signature.parameters.values())
        supplied = self._supplied(function)
        self._check_supplied(parameters, supplied, where)
        taken = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        for name, place in self._given():
            self._check_taken(name, place, taken, open_ended=open_ended)
        if not self.node.base.get(PARTIAL):
            self._check_required(parameters, len(supplied), where)

    @property
    def label(self) -> str:
        return str(self.target if self.target is not None else self.node.keys[-1])

    def _function(self, where: str) -> Callable[..., Any]:
        if self.target is None:
            return self.checker.callbacks[str(self.node.keys[-1])]
        if not isinstance(self.target, str):
            raise self.checker.spec.error("is not an import path", path=where, value=self.target, fix="quote it")
        spec = self.checker.spec
        try:
            function = self.checker.resolver.resolve(self.target)
        except InputError as error:
            located = spec.error(error.problem, path=where, value=self.target, fix=error.fix)
            raise located from error.__cause__
        if is_refused(function):
            problem = "Hydra refuses to call this from a config: it can run code or change the system"
            fix = "call it in a function of your own, and name that function"
            raise spec.error(problem, path=where, value=self.target, fix=fix)
        return function

    def _supplied(self, function: Callable[..., Any]) -> tuple[str, ...]:
        section = str(self.node.keys[0])
        if len(self.node.keys) > (2 if section == "metrics" else 1):
            return ()
        if section in _SUPPLIED:
            return _SUPPLIED[section]
        return () if inspect.isclass(function) else _SUPPLIED_TO_FUNCTIONS.get(section, ())

    def _check_supplied(self, parameters: list[inspect.Parameter], supplied: tuple[str, ...], where: str) -> None:
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        starred = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
        if len(positional) < len(supplied) and not starred:
            problem = f"`{self.label}` can't be called with ({', '.join(supplied)})"
            fix = f"let it take {len(supplied)} positional arguments"
            raise self.checker.spec.error(problem, path=where, value=self.label, fix=fix)
        for name, place in self._given():
            if name in positional[: len(supplied)]:
                fix = f"remove it; the trainer passes ({', '.join(supplied)})"
                raise self.checker.spec.error(
                    f"the trainer itself passes `{name}` to `{self.label}`", path=place, fix=fix
                )

    def _given(self) -> Iterator[tuple[str, str]]:
        """Each argument's name and the place where it was written."""
        for name in self.node.base:
            if name not in HYDRA_KEYS and not self._is_ours(name):
                yield name, join_path((*self.node.keys, name))
        for path in self.searched:
            name = str(split_path(path)[len(self.node.keys)])
            if name not in HYDRA_KEYS and not self._is_ours(name):
                yield name, join_path(("search_space", path))

    def _is_ours(self, name: str) -> bool:
        """Whether a key is for the service, and no argument of the target."""
        if self.node.keys == ("lr_scheduler",):
            return name in SCHEDULER_KEYS
        section, *below = self.node.keys
        return section == "metrics" and len(below) == 1 and name in METRIC_KEYS

    def _check_taken(self, name: str, place: str, taken: list[str], *, open_ended: bool) -> None:
        if name in taken:
            return
        if open_ended:
            problem = f"`{self.label}` takes any argument, so `{name}` can't be checked"
            self.checker.warnings.append(finding(self.checker.spec, problem, path=place))
            return
        fix = suggest_name(name, taken, what="it takes")
        if self.checker.space and self.node.switch in self.checker.space.params:
            fix += f"; what only one target takes belongs in search_space, with `when: {{{self.node.switch}: …}}`"
        raise self.checker.spec.error(f"`{self.label}` takes no argument `{name}`", path=place, fix=fix)

    def _check_required(self, parameters: list[inspect.Parameter], supplied: int, where: str) -> None:
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        args = self.node.base.get(ARGS) or []
        here = set(positional[: supplied or len(args)]) | set(self.node.base)
        for path in self.searched:
            if self.checker.always_holds(path, self.node.switch):
                here.add(str(split_path(path)[len(self.node.keys)]))
        for parameter in parameters:
            starred = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if parameter.default is inspect.Parameter.empty and not starred and parameter.name not in here:
                place = join_path((*self.node.keys, parameter.name))
                problem = f"`{self.label}` needs the argument `{parameter.name}`"
                raise self.checker.spec.error(problem, path=where, fix=f"add `{place}`")


def _targets(node: Any, keys: Keys) -> Iterator[tuple[Keys, dict[str, Any]]]:
    if isinstance(node, dict):
        if TARGET in node:
            yield keys, node
        if node.get(RECURSIVE) is not False:
            for key, value in node.items():
                yield from _targets(value, (*keys, key))
    elif isinstance(node, list):
        for at, item in enumerate(node):
            yield from _targets(item, (*keys, at))
