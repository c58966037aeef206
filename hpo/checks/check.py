"""Checks a study's import paths and arguments against the code they name, before anything runs."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.checks.argument_fixes import fix_of_argument
from hpo.checks.check_room import check_room
from hpo.checks.findings import Finding, finding
from hpo.config.paths import Keys, join_path, lookup, nearest, split_path, suggest_name
from hpo.config.schema import FREE_SECTIONS
from hpo.config.schema_metrics import METRIC_KEYS
from hpo.config.schema_nodes import OPTIMIZER_KEYS, SCHEDULER_KEYS
from hpo.config.schema_space import CategoricalParam, label
from hpo.config.several import is_several
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import ARGS, HYDRA_KEYS, PARTIAL, RECURSIVE, TARGET, TargetResolver, is_refused
from hpo.errors import InputError, collected, together
from hpo.trial.callbacks import offered_callbacks
from hpo.trial.training_code import SESSION
from trainer.step.groups import PARAMETERS

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

#: The arguments that the trainer itself passes to each section's target.
_SUPPLIED = {"optimizer": ("params",), "lr_scheduler": ("optimizer",)}
#: Keys of sections that hpo reads, and that are not arguments of their targets.
_OURS = {"optimizer": OPTIMIZER_KEYS, "lr_scheduler": SCHEDULER_KEYS}
# A scheduler inside another one is built before that one, without an optimizer.
_OVER_OTHERS = (
    "let a function beside the study file make them all, as `lr_scheduler: {_target_: model.schedule}`: it gets "
    "the optimizer as its first argument; for a warm-up write `warmup: …` beside one scheduler's arguments"
)
#: The argument that a section's target gets by name, if it has a parameter of this name.
_SUPPLIED_BY_NAME = {"objective": SESSION, "step": "update"}
_SUPPLIED_TO_FUNCTIONS = {
    "loader": ("samples",),
    "loss": ("outputs", "targets"),
    "metrics": ("outputs", "targets"),
    "step": ("model", "batch"),
}


def check_spec(spec: StudySpec, *, search: bool = True) -> list[Finding]:
    """Import every target, and check arguments and search paths against the signatures.

    Args:
        spec: The study.
        search: Also check what the search space may set; otherwise the base config must be complete by itself.

    Returns:
        Warnings about what can't be checked before it runs.

    Raises:
        InputError: A target can't be imported, or does not fit its arguments.
    """
    space = SearchSpace.from_spec(spec) if search else None
    checker = _Checker(spec, TargetResolver(spec.folder), space, offered_callbacks())
    checker.check()
    errors = [*once(checker.errors), *(check_room(spec, space) if space else ())]
    if errors:
        raise together(errors)
    return checker.warnings


@dataclass
class _Node:
    """A place with a ``_target_``: its arguments in the base config, and the search-space entries below it."""

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
    errors: list[InputError] = field(default_factory=list)

    def check(self) -> None:
        nodes = self._nodes()
        self._check_callback_names()
        for path in self.space.params if self.space else ():
            with collected(self.errors):
                self._attach(path, nodes)
        for node in nodes.values():
            with collected(self.errors):
                self._check_node(node)
        if self.space:
            self._check_sections()

    def _nodes(self) -> dict[Keys, _Node]:
        config = self.spec.base_config()
        nodes = {
            keys: _Node(keys, base)
            for name in (*FREE_SECTIONS, "loader")
            for keys, base in _targets(config[name], (name,))
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
                path = join_path(("callbacks", name))
                self.errors.append(self.spec.error("unknown callback", path=path, fix=fix))

    def _attach(self, path: str, nodes: dict[Keys, _Node]) -> None:
        """Add a search entry to the nearest node above its path; without one, the config must have the path."""
        keys = split_path(path)
        missing = object()
        for depth in range(len(keys) - 1, 0, -1):
            if keys[:depth] in nodes:
                nodes[keys[:depth]].searched.append(path)
                return
        if lookup(self.spec.base_config(), keys, missing) is not missing:
            return
        fix = f"give `{join_path(keys[:-1])}` a `_target_` that takes `{keys[-1]}`, or correct the path"
        if keys[0] == "callbacks" and len(keys) > 1:
            fix = self._fix_of_callback(str(keys[1]))
        here = join_path(("search_space", path))
        raise self.spec.error("names nothing in the config", path=here, fix=fix)

    def _fix_of_callback(self, name: str) -> str:
        """The fix for an entry that searches a callback which the file does not list."""
        if name in self.callbacks:
            return f"list it, `callbacks: {{{name}: {{}}}}`, so that the base config has it too"
        return suggest_name(name, self.callbacks, what="built in are") + "; or list your own with its `_target_`"

    def _check_node(self, node: _Node) -> None:
        switch = self.space.params.get(node.switch) if self.space else None
        if TARGET in node.base or node.keys[0] == "callbacks":
            # If the target is searched, the base config's own target is checked without the searched arguments.
            changes = switch or any(node.keys[: len(keys)] == keys for keys in self._sections)
            own = _Call(self, node, node.base.get(TARGET), [] if changes else node.searched)
            with collected(self.errors):
                own.check(join_path((*node.keys, TARGET) if TARGET in node.base else node.keys))
        if self.space and isinstance(switch, CategoricalParam):
            for choice in switch.choices:
                entries = [path for path in node.searched if path != node.switch]
                fitting = [path for path in entries if self.space.may_meet(path, node.switch, choice)]
                here = join_path(("search_space", node.switch, "choices", switch.choices.index(choice)))
                with collected(self.errors):
                    _Call(self, node, choice, fitting).check(here)

    @property
    def _sections(self) -> dict[Keys, tuple[Any, ...]]:
        """The choices of entries that have lists or mappings among them, by the entries' keys."""
        entries = self.spec.config.search_space.items() if self.space else ()
        return {
            split_path(path): entry.choices
            for path, entry in entries
            if isinstance(entry, CategoricalParam) and any(isinstance(each, dict | list) for each in entry.choices)
        }

    def _check_sections(self) -> None:
        """Check the targets in lists and mappings among the choices, with the entries that set values in them."""
        assert self.space is not None
        for keys, choices in self._sections.items():
            path = join_path(keys)
            for at, choice in enumerate(choices):
                here = ("search_space", path, "choices", at)
                try:
                    self.spec.resolve({path: choice})
                except InputError as error:
                    raise self.spec.error(
                        error.problem, path=join_path(here), value=choice, fix=error.fix
                    ) from error
                for below, base in _targets(choice, ()):
                    node, value = _Node((*keys, *below), base), label(choice)
                    fitting = [each for each in self._below(node) if self.space.may_meet(each, path, value)]
                    _Call(self, node, base[TARGET], fitting, (*here, *below)).check(join_path((*here, *below)))

    def _below(self, node: _Node) -> Iterator[str]:
        assert self.space is not None
        for path in self.space.params:
            keys = split_path(path)
            if len(keys) == len(node.keys) + 1 and keys[:-1] == node.keys and keys[-1] != TARGET:
                yield path

    def always_holds(self, path: str, switch: str) -> bool:
        """Whether an entry is active in every trial with a target, and not only in some."""
        assert self.space is not None
        when = self.space.params[path].when
        return all(other == switch or other not in self.space.params for other in when)


@dataclass
class _Call:
    """One target with all arguments that it may get; ``written`` is its place, if other than its node's keys."""

    checker: _Checker
    node: _Node
    target: Any
    searched: list[str]
    written: Keys = ()

    def check(self, where: str) -> None:
        function = self._function(where)
        errors = self.checker.errors
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):
            problem = f"the arguments of `{self.label}` can't be checked"
            self.checker.warnings.append(finding(self.checker.spec, problem, path=where))
            return
        parameters = list(signature.parameters.values())
        supplied = self._supplied(function)
        with collected(errors):
            self._check_supplied(parameters, supplied, where)
        taken = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        for name, place in self._given():
            with collected(errors):
                self._check_taken(function, name, place, taken, open_ended=open_ended)
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
        if section in _SUPPLIED:
            return _SUPPLIED[section] if self._is_top else ()
        if len(self.node.keys) > (2 if section in ("loader", "metrics") else 1):
            return ()
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
            if name == self._by_name:
                fix = "remove it: the function is called with one of its own"
                raise self.checker.spec.error(f"is passed to `{self.label}` anyway", path=place, fix=fix)

    @property
    def _by_name(self) -> str | None:
        """The parameter that hpo passes to the target by name; None if there is none."""
        section, *below = self.node.keys
        return None if below else _SUPPLIED_BY_NAME.get(str(section))

    def _given(self) -> Iterator[tuple[str, str]]:
        """Each argument's name and the place where it was written."""
        for name in self.node.base:
            if name not in HYDRA_KEYS and not self._is_ours(name):
                yield name, join_path((*(self.written or self.node.keys), name))
        for path in self.searched:
            name = str(split_path(path)[len(self.node.keys)])
            if name not in HYDRA_KEYS and not self._is_ours(name):
                yield name, join_path(("search_space", path))
        if self.node.keys == ("optimizer",):
            for group, arguments in self.node.base.get("groups", {}).items():
                for name in arguments.keys() - {PARAMETERS}:
                    yield name, join_path(("optimizer", "groups", group, name))
            for path in self.searched:
                match split_path(path):
                    case ("optimizer", "groups", _, str(name)) if name != PARAMETERS:
                        yield name, join_path(("search_space", path))

    @property
    def _is_top(self) -> bool:
        """Whether the node is its section's own: the only one, or one of several by name."""
        section, *below = self.node.keys
        return len(below) == is_several(getattr(self.checker.spec.config, str(section), None))

    def _is_ours(self, name: str) -> bool:
        """Whether hpo reads a key, which is no argument of the target then."""
        section, *below = self.node.keys
        if section in _OURS and self._is_top:
            return name in _OURS[str(section)]
        return section == "metrics" and len(below) == 1 and name in METRIC_KEYS

    def _check_taken(
        self, function: Callable[..., Any], name: str, place: str, taken: list[str], *, open_ended: bool
    ) -> None:
        if name in taken:
            return
        if open_ended:
            problem = f"`{self.label}` takes any argument, so `{name}` can't be checked"
            self.checker.warnings.append(finding(self.checker.spec, problem, path=place))
            return
        fix = fix_of_argument(name, taken, str(self.node.keys[0]), function, self.label)
        if self.checker.space and self.node.switch in self.checker.space.params:
            fix += f"; what only one target takes belongs in search_space, with `when: {{{self.node.switch}: …}}`"
        raise self.checker.spec.error(f"`{self.label}` takes no argument `{name}`", path=place, fix=fix)

    def _check_required(self, parameters: list[inspect.Parameter], supplied: int, where: str) -> None:
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        args = self.node.base.get(ARGS) or []
        here = {*positional[: supplied or len(args)], *self.node.base, self._by_name}
        # A misspelt argument is reported already.
        here |= {nearest(name, [item.name for item in parameters]) for name, _ in self._given()}
        for path in self.searched:
            if self.checker.always_holds(path, self.node.switch):
                here.add(str(split_path(path)[len(self.node.keys)]))
        for parameter in parameters:
            starred = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if parameter.default is inspect.Parameter.empty and not starred and parameter.name not in here:
                place = join_path((*self.node.keys, parameter.name))
                problem = f"`{self.label}` needs the argument `{parameter.name}`"
                nested = self.node.keys[0] == "lr_scheduler" and parameter.name in _SUPPLIED["lr_scheduler"]
                fix = _OVER_OTHERS if nested else f"add `{place}`"
                self.checker.errors.append(self.checker.spec.error(problem, path=where, fix=fix))


def once(errors: Sequence[InputError]) -> Iterator[InputError]:
    """The errors, with only the first of several about the same failed import."""
    said = set()
    for error in errors:
        if not (error.problem.startswith("importing ") and error.problem in said):
            yield error
        said.add(error.problem)


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
