"""Prints tables for people; no number is broken into two lines, even on a narrow terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hpo.console.output import read_by_others
from hpo.wording import parameter, shown

if TYPE_CHECKING:
    from hpo.config.spec import StudySpec

#: Formats a value for a table.
cell = partial(shown, digits=4)
#: A cell with more characters may be broken into lines.
_WHOLE: Final = 24
#: Spaces between two columns.
_GAP: Final = 2


def print_table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]], *, below: str = "") -> None:
    """Print a table, with a line of text below it; without a header if all its names are empty.

    On a terminal that is too narrow, the columns are printed in blocks, each with the first column again.
    """
    names, cells = list(header), [list(row) for row in rows]
    # In a file or a pipe, a row stays one line.
    piped = not sys.stdout.isatty()
    simple = piped and all(each.isascii() and each.isprintable() for row in (names, *cells) for each in row)
    text = aligned(title, names, cells) if simple else drawn(title, names, cells, 10_000 if piped else None)
    with read_by_others():
        print(text + below, end="")


def aligned(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of printable ASCII, as `rich` would draw it with enough room, but much faster."""
    lines = [header, *rows] if any(header) else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    total = sum(widths) + _GAP * (len(widths) - 1)
    body = [(" " * _GAP).join(map(str.ljust, line, widths)) for line in lines]
    return "".join(f"{line}\n" for line in (title.ljust(total), *body))


def drawn(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """A table as `rich` draws it.

    Args:
        title: The line above it.
        header: The columns' names; empty ones for no header.
        rows: The rows, with a cell for each column.
        width: The characters of a line; None for the terminal's width.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=width)
    names, widths = header, _widths(header, rows)
    if _total(widths) > console.width:
        names = [name.replace(".", ".\n") for name in header]
        widths = _widths(names, rows)
    # The caller prints it: rich's console would end the process if the reader has stopped.
    with console.capture() as printed:
        for block in _blocks(widths, console.width):
            table = Table(title=title, title_justify="left", show_header=any(header), box=None, pad_edge=False)
            for place in block:
                table.add_column(Text(names[place]), overflow="fold", no_wrap=widths[place] < _WHOLE)
            for row in rows:
                table.add_row(*(Text(row[place]) for place in block))
            console.print(table)
    return printed.get()


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The least number of characters of each column."""
    from rich.cells import cell_len

    columns = zip(*(header, *rows), strict=True)
    longest = (
        max(cell_len(line) for each in column for line in (each.splitlines() or [""])) for column in columns
    )
    return [min(each, _WHOLE) for each in longest]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """The positions of columns that fit beside each other; each block begins with the first column."""
    block = [0]
    for place in range(1, len(widths)):
        if len(block) > 1 and _total([widths[each] for each in (*block, place)]) > room:
            yield block
            block = [0]
        block.append(place)
    yield block


def param_names(spec: StudySpec, trials: Iterable[Mapping[str, Any]]) -> list[str]:
    """The parameters for a table of trials: those of the search space, then others that trials have."""
    drawn = (name for trial in trials for name in trial["params"])
    return list(dict.fromkeys((*spec.search_space, *drawn)))


def param_cell(params: Mapping[str, Any], name: str) -> str:
    """The cell of a trial's parameter; a dash if the trial does not have it."""
    return parameter(params[name], digits=4) if name in params else "-"
