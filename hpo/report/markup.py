"""The pieces that the page is made of; each takes text and gives HTML in which that text is only text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

#: Height of a figure, in pixels.
HEIGHT: Final = 420


def section(name: str, title: str, content: str) -> str:
    """A headed part of the page that the contents link to."""
    headed = f'<h2 id="{name}-title">{escaped(title)}</h2>\n{content}'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{headed}\n</section>\n'


def part(title: str, content: str) -> str:
    """A headed part of a section."""
    return f"<h3>{escaped(title)}</h3>\n{content}"


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values, both as text."""
    lines = "\n".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>' for name, value in rows
    )
    return f'<table class="pairs">\n{lines}\n</table>\n'


def grid(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a header; where it is wider than the page, it moves inside its box.

    Args:
        title: What it shows, for those who don't see it.
        header: Names of the columns.
        rows: Values as text; those that are numbers stand to the right.
    """
    names = "".join(f'<th scope="col">{escaped(name)}</th>' for name in header)
    lines = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escaped(title)}">\n'
        f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table>\n</div>\n"
    )


def _cell(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=number' if is_number else ''}>{escaped(value)}</td>"


def note(text: str) -> str:
    """A line of explanation; what stands in backticks is shown as code."""
    return f'<p class="note">{_with_code(text)}</p>\n'


def points(texts: Iterable[str]) -> str:
    """A list; what stands in backticks is shown as code."""
    return "<ul>\n" + "\n".join(f"<li>{_with_code(text)}</li>" for text in texts) + "\n</ul>\n"


def _with_code(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escaped(text))


_CODE: Final = re.compile("`([^`]+)`")


def folded(title: str, text: str) -> str:
    """A long text that opens on a click."""
    return f'<details>\n<summary>{escaped(title)}</summary>\n<pre tabindex="0">{escaped(text)}</pre>\n</details>\n'


def figure(name: str, drawn: go.Figure, label: str, *, height: int = HEIGHT, width: int = 0) -> str:
    """A figure's place, and its data; ``<``, ``>`` and ``/`` in them are written as plotly's JSON escapes.

    Args:
        name: Its id in the page.
        drawn: The figure.
        label: What it shows, for those who don't see it.
        height: In pixels.
        width: The least it takes, in pixels; where the page is narrower, it moves inside its box.
    """
    data = drawn.to_dict()
    data["layout"].pop("template", None)  # the page has its own, for light and for dark
    least = f"; min-width: {width}px" if width else ""
    return (
        f'<figure class="scroll" aria-label="{escaped(label)}">'
        f'<div class="figure" id="figure-{name}" style="height: {height}px{least}"></div></figure>\n'
        f'<script type="application/json" data-figure="{name}">{to_json_plotly(data)}</script>\n'
    )


def tiles(figures: Mapping[str, str]) -> str:
    """Small figures side by side, as many as there is room for."""
    inside = "\n".join(f"<div>{each}</div>" for each in figures.values())
    return f'<div class="tiles">\n{inside}\n</div>\n'


def escaped(value: Any) -> str:
    """A value as text of the page."""
    return html.escape(str(value) if not isinstance(value, float) else shown(value))


def shown(value: float) -> str:
    """A number with six digits."""
    return f"{value:.6g}"


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """A length of time as people say it."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{seconds / 60:.3g} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def count_of(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def numbers(found: Sequence[int], most: int = 12) -> str:
    """Trial numbers, cut off where they are many."""
    listed = ", ".join(map(str, found[:most]))
    return listed if len(found) <= most else f"{listed} and {len(found) - most} more"
