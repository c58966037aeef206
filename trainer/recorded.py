"""Metrics: the numbers that a run records, by name, each checked when it is added."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

import numpy as np
from torch import Tensor


class MetricError(TypeError):
    """A recorded value is not a real number.

    Args:
        message: The name of the metric, what the value is, and what to record instead.
        source: The name of the callback that recorded it; empty if no callback did.
    """

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(f"{source}: {message}" if source else message)
        self.message = message
        self.source = source

    @classmethod
    def of(cls, name: str, value: Any) -> MetricError:
        """The error for ``value`` under ``name``."""
        kind = type(value).__name__
        what = f"{kind} of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else f"{kind} "
        shown = "" if isinstance(value, Tensor | np.ndarray) else f"({_short(value)})"
        return cls(
            f"metric {name!r} is a {what}{shown}: record a real number (of Python or NumPy, "
            "or a tensor without dimensions)"
        )


def number(name: str, value: Any) -> float:
    """The value of a metric as a float, finite or not.

    Args:
        name: The name of the metric, for the error.
        value: A real number of Python or NumPy (also a bool or int), or a real tensor or array without dimensions.

    Raises:
        MetricError: The value is anything else, or an integer too large for a float.
    """
    if type(value) is float:
        return value
    real = isinstance(value, numbers.Real | np.bool_)
    if isinstance(value, Tensor):
        value, real = value.detach(), not value.dim() and not value.is_complex()
    elif isinstance(value, np.ndarray):
        real = not value.ndim and value.dtype.kind in "biuf"
    if not real:
        raise MetricError.of(name, value)
    try:
        return float(value)
    except OverflowError as error:
        raise MetricError.of(name, value) from error


def names_in(names: Any) -> tuple[str, ...]:
    """Names of metrics as code declares them; a string, such as ``("kl")`` without its comma, is one name."""
    if isinstance(names, str):
        return (names,)
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, Collection) else ()


class Metrics(dict[str, float]):
    """Metrics by name; each value that is set becomes a float.

    Raises:
        MetricError: A value is not a real number.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **named: Any) -> None:
        super().__init__()
        self.update(values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, number(name, value))

    def setdefault(self, name: str, default: Any = None) -> float:
        """See dict."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), **named: Any) -> None:  # type: ignore[override]
        """See dict; if a value is refused, nothing is changed."""
        checked = {name: number(name, value) for name, value in dict(values, **named).items()}
        super().update(checked)

    def __ior__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Self:  # type: ignore[override, misc]
        self.update(values)
        return self


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
