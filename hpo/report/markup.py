"""The pieces that the page is made of: macros of templates/pieces.html, which escape the text that they take."""

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
    """A headed section of the page that the contents link to.

    Attributes:
        name: Its id in the page.
        title: Its heading, as text.
        content: What stands in it.
    """

    name: str
    title: str
    content: Markup


def with_code(text: str) -> Markup:
    """Text in which what stands in backticks is shown as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


@cache
def templates() -> Environment:
    """The page's templates; what they are given is escaped, and numbers have six digits."""
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
    """A piece of the page: the macro of this name, with what it takes."""
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
    """A figure's place, and its data.

    Args:
        name: Its id in the page.
        drawn: The figure.
        label: What it shows, for those who don't see it.
        height: In pixels.
        width: The least it takes, in pixels; where the page is narrower, it moves inside its box.
    """
    data = drawn.to_dict()
    data["layout"].pop("template", None)  # the page has its own, for light and for dark
    return piece("figure_at", name, to_json_plotly(data), label, height, width)


def joined(pieces: Iterable[Markup]) -> Markup:
    """Pieces, one after the other."""
    return Markup().join(pieces)


def by_metric(made: Iterable[tuple[str, Markup]]) -> Markup:
    """What is made for each metric, headed by it where there are several."""
    pairs = list(made)
    return joined(subsection(metric, each) if len(pairs) > 1 else each for metric, each in pairs)
