"""Finds state of callbacks and steps that a resumed run would lose, in the source of hooks and after an epoch."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer.callback import Callback
from trainer.events import EVENTS
from trainer.step.supervised import SupervisedStep

logger = logging.getLogger(__name__)

#: Events in which a hook may set attributes: a resumed run sets them again, or does not need them.
_ELSEWHERE: Final = frozenset(
    {"setup", "on_before_load_checkpoint", "on_load_checkpoint", "on_fit_start"}
    | {"on_test_start", "on_test_batch_start", "on_test_batch_end", "on_test_end"}
    | {"on_predict_start", "on_predict_batch_start", "on_predict_batch_end", "on_predict_end"}
    | {"on_exception", "on_fit_end", "teardown"}
)
#: Methods that change one of Python's own containers.
_CHANGES: Final = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "update"}
)
#: The source of the shipped callbacks is not read: a test checks that they declare their attributes.
_SHIPPED: Final = "trainer."

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Same:
    """Compares by identity, and keeps its object alive, as an address alone may be reused."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class _Sets(NamedTuple):
    """The attributes of its object that a method sets or changes by a container's method, and methods it calls."""

    assigned: frozenset[str]
    changed: frozenset[str]
    called: frozenset[str]


def check_hooks(callbacks: Iterable[Callback]) -> None:
    """Refuse hooks that set attributes which a resumed run would lose, as far as their source shows it.

    Nothing is checked unless one of the callbacks writes checkpoints, from which a run could resume.

    Raises:
        ValueError: A hook sets, between the start of a fit and its end, an attribute that its callback neither
            saves nor declares as ``transient``.
    """
    for callback in _to_check(callbacks):
        for event, hook in _hooks_of(type(callback)):
            if found := _set_by(callback, hook) - {*callback.transient}:
                raise ValueError(_refusal(callback, sorted(found), f"sets {{}} in {event}"))


def read_hooks(kinds: Iterable[type[Callback]]) -> None:
    """Read, and cache, the source that `check_hooks` needs, so that processes forked later need not read it."""
    for kind in kinds:
        for _, hook in _hooks_of(kind):
            for _ in _reached(kind, hook):
                pass


def _hooks_of(kind: type[Callback]) -> Iterator[tuple[str, Any]]:
    for event in EVENTS:
        hook = getattr(kind, event)
        if event not in _ELSEWHERE and hook is not getattr(Callback, event):
            yield event, hook


def _to_check(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks without ``state_dict``, if any callback writes checkpoints; else none."""
    everyone = tuple(callbacks)
    resumable = any(callback.saves for callback in everyone)
    return [item for item in everyone if resumable and type(item).state_dict is Callback.state_dict]


def _refusal(callback: Callback, names: list[str], does: str) -> str:
    does = does.format(", ".join(f"`{name}`" for name in names))
    return (
        f"callback {callback.name} {does}, and a run that resumes from a checkpoint would forget it: give it "
        f"`state_dict` and `load_state_dict`, or, if it does no harm, `transient = {tuple(names)!r}`"
    )


def _set_by(callback: Callback, hook: Callable[..., Any]) -> set[str]:
    """The attributes that a hook sets, by itself or through other methods of the callback."""
    kind, found = type(callback), set[str]()
    for sets in _reached(kind, hook):
        found |= {name for name in sets.assigned if not isinstance(getattr(kind, name, None), property)}
        found |= {name for name in sets.changed if isinstance(vars(callback).get(name), list | dict | set | deque)}
    return found


def _reached(kind: type[Callback], hook: Callable[..., Any]) -> Iterator[_Sets]:
    """The `_Sets` of a hook and of each method that it calls."""
    waiting: list[Any] = [hook]
    seen = set[Any]()
    while waiting:
        method = waiting.pop()
        if method in seen or not inspect.isfunction(method) or f"{method.__module__}".startswith(_SHIPPED):
            continue
        seen.add(method)
        sets = _sets(method)
        waiting += [getattr(kind, name, None) for name in sets.called]
        yield sets


@cache
def _sets(method: Callable[..., Any]) -> _Sets:
    """The `_Sets` of a method by its source; empty if there is no source, as for code made by ``exec``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError):
        return _Sets(frozenset(), frozenset(), frozenset())
    own = next(iter(inspect.signature(method).parameters), "")
    assigned, changed, called = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            assigned |= set(_attribute(node, own))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if _is_name(node.func.value, own):
                called.add(node.func.attr)
            elif node.func.attr in _CHANGES:
                changed |= set(_attribute(node.func.value, own))
    return _Sets(frozenset(assigned), frozenset(changed), frozenset(called))


def _attribute(node: ast.expr, own: str) -> Iterator[str]:
    """``value`` for ``self.value`` and ``self.value[…]``; nothing for attributes of other objects."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute) and _is_name(node.value, own):
        yield node.attr


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def warn_of_workers(data: Any, callbacks: Iterable[Callback]) -> None:
    """Warn of a ready DataLoader with persistent workers if a run could resume from a checkpoint."""
    persistent = isinstance(data, DataLoader) and data.persistent_workers
    if persistent and any(callback.saves for callback in callbacks):
        logger.warning(
            "the DataLoader's persistent workers continue their random numbers from pass to pass, so a run that "
            "resumes trains on other ones if the data draw any: hand over its Dataset, with persistent_workers as "
            "an option of the loader section, or of BatchOptions"
        )


class UndeclaredState:
    """Compares callbacks and a step without ``state_dict`` before and after the first epoch of a fit.

    Nothing is compared unless one of the callbacks writes checkpoints, from which a run could resume.

    Args:
        callbacks: All callbacks of the run, after ``on_fit_start``, whose changes a resumed run repeats.
        step: The run's step; for a `SupervisedStep`, its loss is compared.
    """

    def __init__(self, callbacks: Iterable[Callback], step: object = None) -> None:
        callbacks = tuple(callbacks)
        self._before = [(callback, _attributes(callback)) for callback in _to_check(callbacks)]
        is_loss = isinstance(step, SupervisedStep)
        self._step = step = step.loss if isinstance(step, SupervisedStep) else step
        kept = isinstance(step, nn.Module) or (hasattr(step, "state_dict") and not is_loss)
        kept = kept or not any(callback.saves for callback in callbacks)
        self._step_before = None if kept or not hasattr(step, "__dict__") else _attributes(step)

    def check(self) -> None:
        """Refuse changes of a callback, and warn of changes of a step; only the first call compares.

        Raises:
            ValueError: A callback changed attributes that it neither saves nor declares as ``transient``.
        """
        for callback, before in self._before:
            if changed := _changed(callback, before):
                raise ValueError(_refusal(callback, changed, "changed {} while training"))
        if self._step_before is not None and (changed := _changed(self._step, self._step_before)):
            logger.warning(
                "the step or loss, a %s, changed %s while training, and a run that resumes from a checkpoint "
                "would forget it: give a step `state_dict` and `load_state_dict`, make a loss a torch.nn.Module "
                "with buffers, or, if it does no harm, give it `transient = %r`",
                type(self._step).__name__,
                ", ".join(f"`{name}`" for name in changed),
                tuple(changed),
            )
        self._before, self._step_before = [], None


def _changed(item: object, before: dict[str, Any]) -> list[str]:
    after = _attributes(item)
    return sorted(name for name in after if name not in before or before[name] != after[name])


def _attributes(item: object) -> dict[str, Any]:
    transient = getattr(item, "transient", ())
    return {name: _mark(value) for name, value in vars(item).items() if name not in transient}


def _mark(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value that compares unequal after a change; for an object of unknown type, its identity."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        # torch's own count of changes in place; an inference tensor has none
        return _Same(value), 0 if value.is_inference() else value._version  # noqa: SLF001
    if id(value) in above:  # it contains itself
        return _Same(value)
    above = (*above, id(value))
    if isinstance(value, list | tuple | deque):
        return [_mark(item, above) for item in value]
    if isinstance(value, set | frozenset):
        return frozenset(map(repr, value))
    if isinstance(value, dict):
        return [(repr(key), _mark(item, above)) for key, item in value.items()]
    return _Same(value)
