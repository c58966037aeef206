"""Builds the page's pieces with the macros of templates/pieces.html, which escape the texts they get."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, Final, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io.json import to_json_plotly

from hpo.wording import shown

#: Height of a figure, in pixels.
HEIGHT: Final = 420
_CODE: Final = re.compile("`([^`]+)`")


class Section(NamedTuple):
    """A section of the page with a heading, to which the table of contents links.

    Attributes:
        name: Its id in the page.
        title: Its heading, as text.
        content: Its content.
    """

    name: str
    title: str
    content: Markup


def with_code(text: str) -> Markup:
    """A text as HTML, with the parts in backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


@cache
def templates() -> Environment:
    """The page's templates; they escape their arguments, and show numbers with six digits."""
    made = Environment(
        loader=PackageLoader("hpo.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: shown(value) if isinstance(value, float) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["with_code"] = with_code
    return made


def piece(name: str, *given: Any) -> Markup:
    """A piece of the page: the macro of this name with these arguments."""
    made: Markup = getattr(templates().get_template("pieces.html").module, name)(*given)
    return made


subsection, table, grid, note, points, steps, worth_a_look, folded, unfolding, tiles, trial_table, comparison = (
    partial(piece, name)
    for name in (
        "subsection",
        "table",
        "grid",
        "note",
        "points",
        "steps",
        "worth_a_look",
        "folded",
        "unfolding",
        "tiles",
        "trial_table",
        "comparison",
    )
)


def figure(name: str, drawn: go.Figure, label: str, *, height: int = HEIGHT, width: int = 0) -> Markup:
    """A figure: its place in the page, and its data.

    Args:
        name: Its id in the page.
        drawn: The figure.
        label: A description for people who can't see it.
        height: Its height in pixels.
        width: Its least width in pixels; on a narrower page it scrolls inside its box.
    """
    data = drawn.to_dict()
    data["layout"].pop("template", None)  # the page has its own, for light and dark
    return piece("figure_at", name, to_json_plotly(data), label, height, width)


def joined(pieces: Iterable[Markup]) -> Markup:
    """The pieces in sequence."""
    return Markup().join(pieces)


def by_metric(made: Iterable[tuple[str, Markup]]) -> Markup:
    """The pieces of all metrics, with the metric as a heading if there are several."""
    pairs = list(made)
    return joined(subsection(metric, each) if len(pairs) > 1 else each for metric, each in pairs)
