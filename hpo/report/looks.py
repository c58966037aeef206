"""The common parts of the report's figures: colours, axes, and the number of trials that they show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import plotly.graph_objects as go
from optuna.trial import FrozenTrial
from plotly.colors import hex_to_rgb

from hpo.report.drawable import drawn_text, drawn_value
from hpo.study.thinning import evenly
from hpo.wording import parameter

# After the palette of Okabe & Ito (2008), safe for people who confuse red and green; the orange is darker
# than theirs, so that each stands out from white paper and from a dark screen alike (contrast of 3 at least).
BLUE, ORANGE, VERMILION, GREEN, GREY = "#0072b2", "#b87a00", "#d55e00", "#009e73", "#8c8c8c"
#: The colour of the best among many.
MAGENTA: Final = "#c43e96"
#: The colours of a few curves that are compared.
COMPARED: Final = (MAGENTA, BLUE, ORANGE, GREEN, VERMILION)
#: From bad to good, or from early to late; as bright at both ends, for the same reason.
SCALE: Final = (GREY, BLUE, VERMILION)
#: A loss is drawn on a logarithmic axis if its values differ by more than this factor.
_WIDE: Final = 100.0
#: Up to this many, each whole number or power of ten gets a tick; plotly's own ticks would be between them.
FEW: Final = 12
#: From this many decades on, a logarithmic axis has ticks only at powers of ten.
_TICKED: Final = 1.5
#: A name on an axis with this many characters is broken into lines of at most as many, a dot at the end aside.
_LONG_NAME: Final = 12


def laid_out(
    drawn: go.Figure, across: str, up: str, *, logarithmic: bool = False, whole: bool = False
) -> go.Figure:
    """The figure with axis titles and small margins; ``whole``: only whole numbers on the horizontal axis."""
    last = max((x for trace in drawn.data for x in trace.x or () if x is not None), default=0) if whole else 0
    drawn.update_layout(
        title=None,
        margin={"l": 60, "r": 12, "t": 20, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
        xaxis={"title": {"text": drawn_text(across)}, "dtick": 1 if whole and last <= FEW else None},
        yaxis={"title": {"text": drawn_text(up)}},
    )
    if logarithmic:
        drawn.update_yaxes(type="log")
    for axis, name in ((drawn.layout.xaxis, "x"), (drawn.layout.yaxis, "y")):
        decades = _decades(value for trace in drawn.data for value in trace[name]) if axis.type == "log" else 0
        if decades > _TICKED:
            axis.dtick = math.ceil(decades / FEW)
    return drawn


def _decades(values: Iterable[Any]) -> float:
    known = [value for value in values if value is not None and 0 < value < math.inf]
    return math.log10(max(known)) - math.log10(min(known)) if known else 0.0


def color_at(place: float) -> str:
    """The colour of `SCALE` at a place from 0 to 1."""
    at = min(1.0, max(0.0, place)) * (len(SCALE) - 1)
    below = min(int(at), len(SCALE) - 2)
    # plotly's own mixing may give parts such as 3e-14, which its colours can't represent.
    ends = zip(hex_to_rgb(SCALE[below]), hex_to_rgb(SCALE[below + 1]), strict=True)
    red, green, blue = (round(low + (high - low) * (at - below)) for low, high in ends)
    return f"rgb({red}, {green}, {blue})"


def is_logarithmic(values: Iterable[float], direction: str) -> bool:
    """Whether values are easier to read on a logarithmic axis: losses over several orders of magnitude."""
    known = [value for value in values if math.isfinite(value)]
    return direction == "minimize" and bool(known) and min(known) > 0 and max(known) > _WIDE * min(known)


def broken(name: str, width: int = _LONG_NAME) -> str:
    """A dotted name as a figure's text, on several lines if it has ``width`` characters or more."""
    return "<br>".join(map(drawn_text, name_lines(name, width)))


def name_lines(name: str, width: int) -> list[str]:
    """Break a dotted name into lines if it has ``width`` characters or more.

    Each part between dots begins a line. A part that is longer than a line is broken after an underscore, or at
    the end of the line.
    """
    if len(name) < width:
        return [name]
    whole = rf"[^.]{{0,{width}}}\.|[^.]{{1,{width}}}\Z"
    return re.findall(rf"(?s:{whole}|[^.]{{0,{width - 1}}}_|.{{{width}}})", name)


def described(trial: FrozenTrial) -> str:
    """A trial's parameters as lines for a figure's text."""
    return "".join(f"<br>{drawn_text(f'{name} = {parameter(value)}')}" for name, value in trial.params.items())


def thinned(trials: Sequence[FrozenTrial], most: int) -> list[FrozenTrial]:
    """At most `most` of the trials, by number.

    One half are the first trials, which should be the best; the other half is an even sample of the rest.
    """
    if len(trials) <= most:
        kept = list(trials)
    else:
        first, rest = trials[: most // 2], trials[most // 2 :]
        kept = [*first, *evenly(rest, most - len(first))]
    return sorted(kept, key=lambda trial: trial.number)


def sampled(kept: Sequence[object], of: Sequence[object], things: str = "trials", done: str = "drawn") -> str:
    """The page's remark on `thinned` trials; empty if it has all."""
    if len(kept) >= len(of):
        return ""
    return f" Of {len(of)} {things} {len(kept)} are {done}: the best, and an even sample of the others."


def rounded(value: Any) -> float | None:
    """A number with six significant digits, more than a figure shows; None for one that is not finite."""
    return float(f"{drawn_value(value):.6g}") if math.isfinite(value) else None
