"""UndeclaredState: finds callbacks whose changes a resumed run would forget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trainer.callback import Callback

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class _Same:
    """Equal for one and the same object, which it keeps alive: an address alone may be used again."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class UndeclaredState:
    """Compares callbacks without ``state_dict`` before and after the first epoch of a fit.

    Nothing is compared unless one of them writes checkpoints, from which a run could resume.

    Args:
        callbacks: All callbacks of the run, after ``on_fit_start``: what that sets up, a resumed run does too.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        everyone = tuple(callbacks)
        resumable = any(callback.saves for callback in everyone)
        self._before = [
            (callback, _attributes(callback))
            for callback in everyone
            if resumable and type(callback).state_dict is Callback.state_dict
        ]

    def check(self) -> None:
        """Refuse what changed; looks once.

        Raises:
            ValueError: A callback changed attributes that it neither saves nor declares as ``transient``.
        """
        for callback, before in self._before:
            after = _attributes(callback)
            changed = sorted(name for name in after if name not in before or before[name] != after[name])
            if changed:
                names = ", ".join(f"`{name}`" for name in changed)
                raise ValueError(
                    f"callback {callback.name} changed {names} while training, and a run that resumes from a "
                    "checkpoint would forget it: give it `state_dict` and `load_state_dict`, or, if it does "
                    f"no harm, `transient = {tuple(changed)!r}`"
                )
        self._before = []


def _attributes(callback: Callback) -> dict[str, Any]:
    return {name: _mark(value) for name, value in vars(callback).items() if name not in callback.transient}


def _mark(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Something that compares unequal after a change; of what can't be looked into, which object it is."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        # torch's own count of changes in place; an inference tensor has none
        return _Same(value), 0 if value.is_inference() else value._version  # noqa: SLF001
    if id(value) in above:  # it holds itself
        return _Same(value)
    above = (*above, id(value))
    if isinstance(value, list | tuple | deque):
        return [_mark(item, above) for item in value]
    if isinstance(value, set | frozenset):
        return frozenset(map(repr, value))
    if isinstance(value, dict):
        return [(repr(key), _mark(item, above)) for key, item in value.items()]
    return _Same(value)
