"""Turns classes, calls and ranges of Python code into the plain data of a study file.

Workers are separate processes that find code by its name, so a class becomes its import path. Nothing is pickled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hpo.config.paths import Keys, join_path, show
from hpo.config.study_modules import holds_module, public_name
from hpo.config.targets import ARGS, PARTIAL, TARGET
from hpo.errors import InputError

#: What to do with an object that is callable, but no function.
CALLED_BY_A_FUNCTION: Final = "give a function that calls it, or name it as `objective` in a study file"
_IN_A_MODULE: Final = (
    "move it to the top level of a module beside the study, such as model.py, and import it from there"
)


class Call:
    """A class or function with arguments, called anew in each trial.

    ```python
    model = hpo.Call(MLP, hidden=64, activation=nn.ReLU)
    lr_scheduler = hpo.Call(CosineAnnealingLR, T_max="${trainer.max_epochs}")
    ```

    Args:
        target: The class or function, or its import path as text.
        *args: Positional arguments; the search space can't reach them.
        **arguments: Keyword arguments: plain values, lists and mappings of them, and further `Call` objects, which
            are called first. A class, a function or a `functools.partial` is passed as it is, without a call.
    """

    def __init__(self, target: Any, /, *args: Any, **arguments: Any) -> None:
        self.target = target
        self.args = args
        self.arguments = arguments

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.arguments.items())]
        return f"Call({', '.join([getattr(self.target, '__name__', repr(self.target)), *given])})"


@dataclass(frozen=True)
class Float:
    """A search-space entry: a real number between ``low`` and ``high``, both included.

    Attributes:
        low: The lowest value, or an expression of other parameters such as ``"optimizer.lr / 10"``.
        high: The highest value, or such an expression.
        log: Search on a logarithmic scale.
        step: Distance between allowed values; None: any value.
        when: Search it only where other parameters have these values: dotted path → value, or list of values.
    """

    low: float | str
    high: float | str
    log: bool = False
    step: float | None = None
    when: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Int:
    """A search-space entry: a whole number between ``low`` and ``high``, both included.

    Attributes:
        low: The lowest value, or an expression of other parameters such as ``"model.heads * 2"``.
        high: The highest value, or such an expression.
        log: Search on a logarithmic scale.
        step: Distance between allowed values; None: 1.
        when: As in `Float`.
    """

    low: int | str
    high: int | str
    log: bool = False
    step: int | None = None
    when: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Categorical:
    """A search-space entry: one of several values.

    Attributes:
        choices: Plain values, lists, mappings, classes, functions and `Call` objects. If the path ends in
            ``_target_``, the chosen class or function is called there; else the choice is an argument, as in
            `Call`.
        when: As in `Float`.
    """

    choices: Sequence[Any]
    when: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PlainWriter:
    """Turns the values of an `hpo.Study` into those of a study file.

    Every method takes the value's place, for errors, and raises InputError for an object that has no import path
    and is not a plain value.

    Attributes:
        folder: The study's folder.
    """

    folder: Path

    def node(self, value: Any, keys: Keys) -> dict[str, Any]:
        """The node of a section: from a class, a function, a call, or a mapping as in a study file."""
        if isinstance(value, Mapping):
            return self._mapping(value, keys)
        if isinstance(value, functools.partial):
            value = Call(value.func, *value.args, **value.keywords)
        if not isinstance(value, Call):
            value = Call(value)
        node = {TARGET: self.import_path(value.target, keys), **self._mapping(value.arguments, keys)}
        return {**node, ARGS: self.plain(value.args, (*keys, ARGS))} if value.args else node

    def plain(self, value: Any, keys: Keys) -> Any:
        """The value of an argument."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)  # an enum's value; `str()` would give its name
        if isinstance(value, Integral | Real):  # also of an enum or of NumPy
            return int(value) if isinstance(value, Integral) else float(value)
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, Mapping):
            return self._mapping(value, keys)
        if isinstance(value, list | tuple):
            return [self.plain(item, (*keys, at)) for at, item in enumerate(value)]
        if isinstance(value, Call):
            return self.node(value, keys)
        if _is_named(value) or isinstance(value, functools.partial):
            return {**self.node(value, keys), PARTIAL: True}
        raise _unfit(value, keys)

    def callback(self, value: Any, keys: Keys) -> Any:
        """A callback: arguments of a built-in one, true, false, or a node that builds one."""
        made = isinstance(value, Call | functools.partial) or _is_named(value)
        return self.node(value, keys) if made else self.plain(value, keys)

    def entry(self, value: Any, keys: Keys) -> Any:
        """An entry of the search space; the choices of a ``_target_`` are import paths."""
        if isinstance(value, Float | Int | Categorical):
            given = {item.name: getattr(value, item.name) for item in fields(value)}
            left = {
                name: setting for name, setting in given.items() if setting is not None and setting is not False
            }
            return {"type": type(value).__name__.lower(), **self.entry(left, keys)}
        if isinstance(value, Mapping):
            return {str(name): self.entry(item, (*keys, str(name))) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.entry(item, (*keys, at)) for at, item in enumerate(value)]
        of = next((key for key in reversed(keys) if isinstance(key, str) and key != "choices"), "")
        is_target = of.rpartition(".")[2] == TARGET
        return self.import_path(value, keys) if is_target and _is_named(value) else self.plain(value, keys)

    def import_path(self, target: Any, keys: Keys) -> str:
        """The shortest import path that leads to a class or function."""
        if isinstance(target, str):
            return target
        if not _is_named(target):
            raise _unfit(target, keys)
        if "<" in target.__qualname__:
            what = "is a lambda" if "<lambda>" in target.__qualname__ else "is made inside a function"
            raise _error(f"{what}, so workers can't import it", keys, target, _IN_A_MODULE)
        module, name = target.__module__, target.__qualname__
        if module == "__main__":
            return f"{self._main_module(target, keys)}.{name}"
        if _found(sys.modules.get(module), name) != target:
            name = target.__name__  # the qualified name of `torch.relu` is that of a method
        if _found(sys.modules.get(module), name) != target:
            fix = "bind it to its own name at the top level of its module, or give its import path as text"
            raise _error(f"is not what `{public_name(module)}.{name}` names", keys, target, fix)
        parts = module.split(".")
        above = (".".join(parts[:end]) for end in range(1, len(parts)))
        shortest = next((each for each in above if _found(sys.modules.get(each), name) is target), module)
        self._refuse_namesake(parts[0], target, keys)
        return f"{public_name(shortest)}.{name}"

    def _mapping(self, value: Mapping[Any, Any], keys: Keys) -> dict[str, Any]:
        for name in value:
            if not isinstance(name, str):
                raise _error(f"the key {name!r} is not text", keys, value, "use plain words as keys")
        return {name: self.plain(item, (*keys, name)) for name, item in value.items()}

    def _main_module(self, target: Any, keys: Keys) -> str:
        """The name from `main_module`; refuses a script that workers can't import."""
        name, main = main_module(), sys.modules["__main__"]
        if name is None:
            problem = "is defined in a notebook or an interactive session, so workers can't import it"
            fix = "write it into a file beside it, as `%%writefile model.py` does, and import it from there"
            raise _error(problem, keys, target, fix)
        script = Path(str(main.__file__)).resolve()
        importable = script.parent == self.folder.resolve() and script.suffix == ".py" and name.isidentifier()
        if main.__spec__ is None and not importable:
            problem = f"is defined in {script.name}, which is not a module of the study's folder {self.folder}"
            raise _error(problem, keys, target, _IN_A_MODULE)
        return name

    def _refuse_namesake(self, top: str, target: Any, keys: Keys) -> None:
        """Refuse a module if the study's folder has another one of the same name, which workers would import."""
        file = getattr(sys.modules.get(top), "__file__", None)
        if file is None or not holds_module(self.folder, top):
            return
        if not Path(file).resolve().is_relative_to(self.folder.resolve()):
            problem = f"is defined in {file}, and the study's folder {self.folder} has a `{top}` of its own"
            raise _error(problem, keys, target, "rename one of the two, or give the study another `folder=`")


def main_module() -> str | None:
    """The name by which a worker would import the running script; None if it is not a file."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    return None if file is None else Path(file).stem


def _is_named(value: Any) -> bool:
    """Whether a value is a class or function with the name from its definition."""
    return callable(value) and all(
        isinstance(getattr(value, name, None), str) for name in ("__module__", "__qualname__")
    )


def _found(module: ModuleType | None, name: str) -> Any:
    """The object of a dotted name in a loaded module, or None."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _unfit(value: Any, keys: Keys) -> InputError:
    kind = type(value).__name__
    problem = f"is an object of {kind}, which can't be written into a study's file"
    fix = f"give plain values, or what makes the object in each trial: `hpo.Call({kind}, …)`"
    if keys[:1] == ("search_space",):
        fix = "give `hpo.Float(…)`, `hpo.Int(…)` or `hpo.Categorical(…)`"
    elif keys == ("objective",) and callable(value):
        fix = CALLED_BY_A_FUNCTION
    elif keys in (("study", "sampler"), ("study", "pruner")):
        example = {"sampler": '{"name": "tpe", "seed": 1}', "pruner": '{"name": "median"}'}[str(keys[1])]
        fix = f"write `{keys[1]}={example}`, with its arguments beside its name"
    return _error(problem, keys, value, fix)


def _error(problem: str, keys: Keys, value: Any, fix: str) -> InputError:
    return InputError(problem, path=join_path(keys), value=show(repr(value)), fix=fix)
