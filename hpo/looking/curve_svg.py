"""A trial's learning curve as a small SVG picture, drawn without a plotting library: workers do this."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Final

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 464, 46, 250
#: Points of a curve at most; the picture has 380 pixels for them.
_POINTS: Final = 200
#: Beyond this a number is as good as infinite, and no axis can be made for it.
_LARGEST: Final = 1e300
#: Positive values that span more than this factor are shown on a logarithmic axis.
_WIDE: Final = 100.0
_TICKS: Final = 4

# Its own background: a picture inside a page can't know whether that page is light or dark.
_STYLE: Final = (
    "svg{background:#fff;color:#333;font:12px system-ui,sans-serif}text{fill:currentColor}"
    "path,polyline{fill:none;stroke-width:1.8}.grid{stroke:#8884;stroke-width:1}"
    ".val{stroke:#1f77b4}circle.val,text.val{fill:#1f77b4;stroke:none}"
    ".train{stroke:#c8600a}circle.train,text.train{fill:#c8600a;stroke:none}"
    "@media(prefers-color-scheme:dark){svg{background:#1b1d21;color:#ddd}"
    ".val{stroke:#6cb6ff}circle.val,text.val{fill:#6cb6ff}"
    ".train{stroke:#f5a35c}circle.train,text.train{fill:#f5a35c}}"
)

_Scale = Callable[[float], float]
_Curve = list[tuple[int, float | None]]


def curve_svg(history: Sequence[Mapping[str, float]], metric: str, title: str = "") -> str:
    """Draw a metric by epoch, and beside ``val_…`` its ``train_…``.

    Epochs without a finite value are gaps in the line.

    Args:
        history: The metrics of each epoch, the first epoch first.
        metric: What to draw, such as ``val_loss``.
        title: Shown above it.

    Returns:
        An SVG document; one that says so where there is nothing to draw.
    """
    found = {name: _curve(history, name) for name in _names(metric)}
    curves = {name: curve for name, curve in found.items() if any(value is not None for _, value in curve)}
    values = [value for curve in curves.values() for _, value in curve if value is not None]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img"><title>{escape(title or metric)}</title><style>{_STYLE}</style>'
        f'<text x="{_LEFT}" y="20" font-weight="600">{escape(title)}</text>'
    )
    if not values:
        return (
            f'{head}<text x="{_LEFT}" y="{_HEIGHT / 2:g}">no finite {escape(metric)} in any epoch</text></svg>\n'
        )
    x, x_axis = _x_axis(len(history))
    y, y_axis = _y_axis(values, metric)
    parts = [head, x_axis, y_axis]
    # The curve that counts is drawn last, over the other.
    for place, name in reversed(list(enumerate(curves))):
        kind = "val" if name == metric else "train"
        label = f'<text class="{kind}" x="{_RIGHT}" y="{20 + 14 * place}" text-anchor="end">{escape(name)}</text>'
        parts += [label, *_lines(curves[name], kind, x, y)]
    return "".join(parts) + "</svg>\n"


def _names(metric: str) -> list[str]:
    of_training = f"train_{metric.removeprefix('val_')}"
    return [metric, of_training] if metric.startswith("val_") else [metric]


def _curve(history: Sequence[Mapping[str, float]], name: str) -> _Curve:
    """Its value by epoch, counted from 1; of a long history every n-th epoch's, and the last one's."""
    every, last = -(-len(history) // _POINTS), len(history)
    epochs = [*range(1, last, every or 1), last] if last else []
    return [(epoch, _drawable(history[epoch - 1].get(name))) for epoch in epochs]


def _drawable(value: float | None) -> float | None:
    return value if value is not None and abs(value) < _LARGEST else None  # which no NaN is


def _x_axis(epochs: int) -> tuple[_Scale, str]:
    span = max(epochs - 1, 1)

    def at(epoch: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (epoch - 1) / span

    ticks = range(1, epochs + 1, -(-span // _TICKS))
    texts = [f'<text x="{at(e):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{e}</text>' for e in ticks]
    middle = (_LEFT + _RIGHT) / 2
    label = f'<text x="{middle:g}" y="{_BOTTOM + 38}" text-anchor="middle">epoch</text>'
    return at, "".join(texts) + label


def _y_axis(values: Sequence[float], metric: str) -> tuple[_Scale, str]:
    low, high = min(values), max(values)
    wide = low > 0 and high / low > _WIDE
    to = math.log10 if wide else float
    bottom, top = to(low), to(high)
    if top == bottom:
        room = abs(bottom) / 2 or 0.5
        bottom, top = bottom - room, top + room

    def at(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (to(value) - bottom) / (top - bottom)

    parts = []
    for step in range(_TICKS + 1):
        tick = bottom + (top - bottom) * step / _TICKS
        place, shown = _BOTTOM - (_BOTTOM - _TOP) * step / _TICKS, 10**tick if wide else tick
        parts.append(
            f'<path class="grid" d="M{_LEFT} {place:.1f}H{_RIGHT}"/>'
            f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{shown:.3g}</text>'
        )
    middle = (_TOP + _BOTTOM) / 2
    label = escape(f"{metric} (log)" if wide else metric)
    turned = f'<text transform="translate(14 {middle:g})rotate(-90)" text-anchor="middle">{label}</text>'
    return at, "".join(parts) + turned


def _lines(curve: _Curve, kind: str, x: _Scale, y: _Scale) -> list[str]:
    """One line for each run of epochs without a gap; a single epoch is a dot."""
    drawn = []
    for there, run in groupby(curve, key=lambda point: point[1] is not None):
        places = [f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in run if value is not None]
        if len(places) == 1:
            across, _, down = places[0].partition(",")
            drawn.append(f'<circle class="{kind}" cx="{across}" cy="{down}" r="3"/>')
        elif there:
            drawn.append(f'<polyline class="{kind}" points="{" ".join(places)}"/>')
    return drawn
