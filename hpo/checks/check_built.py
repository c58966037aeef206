"""Builds torch's optimizers and schedulers before a run, to find arguments that they refuse."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hpo.config.lengths import lengths_in
from hpo.config.paths import join_path, lookup, split_path
from hpo.config.schema_nodes import OPTIMIZER_KEYS, SCHEDULER_KEYS
from hpo.config.schema_space import CategoricalParam, FloatParam, label, values_or_ends
from hpo.config.schema_types import is_import_path
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver, instantiate
from hpo.errors import InputError
from trainer.error_text import error_text

#: How far inside its ends a real range is tried, as a share of its width.
_INSIDE: Final = 1e-6
_SECTIONS: Final = {"optimizer": OPTIMIZER_KEYS, "lr_scheduler": SCHEDULER_KEYS}


class _Refusal(NamedTuple):
    """A part of a config that can't be built.

    Attributes:
        section: The section of the study file.
        target: The class.
        problem: The class's own error text.
    """

    section: str
    target: str
    problem: str


def check_built(spec: StudySpec, *, search: bool) -> None:
    """Refuse an argument with which torch's optimizer or scheduler can't be built, or the schedule can't step.

    Each is built over one weight. It tries both ends of a searched range, and all choices. A searched value is
    refused only if it fails with the base config's other values, and with those at either end of the space.

    Args:
        spec: The study.
        search: Also try what is searched.

    Raises:
        InputError: At the first such argument.
    """
    resolver, config = TargetResolver(spec.folder), spec.resolve()
    if refusal := _refused(resolver, config):
        raise _at_its_argument(spec, resolver, config, refusal)
    if not search:
        return
    space = SearchSpace.from_spec(spec)
    for path, value, tried in _searched(space):
        refusals = (_refused(resolver, spec.resolve(point)) for point in _points(space, path, tried))
        first = next(refusals)
        if first is not None and all(refusals):
            exact = _refused(resolver, spec.resolve(next(_points(space, path, value))))
            ranged = not isinstance(space.params[path], CategoricalParam)
            fix = "narrow the range to values that it takes" if ranged else "leave this choice out"
            problem = f"`{first.target}` fails with this value: {(exact or first).problem}"
            raise spec.error(problem, path=join_path(("search_space", path)), value=value, fix=fix)


def _searched(space: SearchSpace) -> Iterator[tuple[str, Any, Any]]:
    """The searched values of the two sections: the path, the choice or end, and the value to try for it.

    Real ranges are tried just inside their ends: no trial draws an end itself, such as 1.0 for a momentum below
    1. Parameters in `where`, which may exclude their ends, are left out.
    """
    for path, entry in space.params.items():
        if split_path(path)[0] in _SECTIONS and not any(path in condition.names for condition in space.where):
            inside = 0.0 if not isinstance(entry, FloatParam) or entry.step else (entry.high - entry.low) * _INSIDE
            for at, value in enumerate(values_or_ends(entry)):
                yield path, value, value + (-inside if at else inside) if inside else value


def _points(space: SearchSpace, path: str, value: Any) -> Iterator[dict[str, Any]]:
    """Points with this value: the others as in the base config, at their low ends, and at their high ends."""
    forced, pending = {path: label(value)}, [path]
    while pending:
        for other, wanted in space.params[pending.pop()].when.items():
            if other in space.params and other not in forced:
                forced[other] = wanted[0]
                pending.append(other)
    yield forced
    for at in (0, -1):
        ends = {name: values_or_ends(entry)[at] for name, entry in space.params.items()} | forced
        yield space.draw(partial(_value_of, ends))


def _value_of(values: Mapping[str, Any], path: str, _: Any) -> Any:
    return values[path]


def _refused(resolver: TargetResolver, config: Mapping[str, Any]) -> _Refusal | None:
    """The optimizer or scheduler of torch that can't be built from a config; None if both can, or if not known."""
    optimizer_node, scheduler_node = (config[section] for section in _SECTIONS)
    if not _is_plain(optimizer_node, "torch.optim."):
        return None
    section, node = "optimizer", optimizer_node
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # here the schedule steps before its optimizer
            optimizer = instantiate(resolver, _arguments(section, node), [torch.nn.Parameter(torch.zeros(1, 1))])
            if _is_plain(scheduler_node, "torch.optim.lr_scheduler."):
                section, node = "lr_scheduler", scheduler_node
                _step(resolver, _arguments(section, node), optimizer)
    except (ValueError, TypeError, ArithmeticError, IndexError) as error:
        return _Refusal(section, str(node[TARGET]), error_text(error).partition("\n")[0])
    except Exception:  # noqa: BLE001 - such as a device that this one weight is not on
        return None
    return None


def _step(resolver: TargetResolver, arguments: Mapping[str, Any], optimizer: Optimizer) -> None:
    scheduler = instantiate(resolver, arguments, optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(0.0)
    else:
        scheduler.step()


def _arguments(section: str, node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in _SECTIONS[section]}


def _is_plain(node: Mapping[str, Any] | None, package: str) -> bool:
    """Whether a section builds one class of torch, without parameter groups, from values that are known."""
    if node is None or not str(node.get(TARGET, "")).startswith(package) or node.get("groups"):
        return False
    return next(lengths_in(node), None) is None and not any(isinstance(value, dict) for value in node.values())


def _at_its_argument(
    spec: StudySpec, resolver: TargetResolver, config: Mapping[str, Any], refusal: _Refusal
) -> InputError:
    """The error of the base config, located at the argument without which it builds."""
    section, node = refusal.section, config[refusal.section]
    given = [key for key in _arguments(section, node) if key != TARGET]
    without = [key for key in given if _refused(resolver, _config_without(config, section, key)) is None]
    guilty = without or (given if len(given) == 1 else [])
    problem = f"`{refusal.target}` fails with {'this value' if guilty else 'its arguments'}: {refusal.problem}"
    if not guilty:
        path = join_path((section, TARGET))
        return spec.error(problem, path=path, value=refusal.target, fix="correct the arguments beside it")
    takes = inspect.signature(resolver.resolve(refusal.target)).parameters
    default = takes[guilty[0]].default if guilty[0] in takes else inspect.Parameter.empty
    fix = "write a value that it takes"
    value = node[guilty[0]]
    if is_import_path(value) and lookup(config, split_path(value)) is not None:
        fix = f'write `{guilty[0]}: "${{{value}}}"`'  # a dotted path in place of the value there
    elif default is not inspect.Parameter.empty:
        fix += f"; without the key it is {default}"
    return spec.error(problem, path=join_path((section, guilty[0])), value=value, fix=fix)


def _config_without(config: Mapping[str, Any], section: str, key: str) -> dict[str, Any]:
    return {**config, section: {name: value for name, value in config[section].items() if name != key}}
