"""Tables for other programs, and reading without collections."""

import contextlib
import gc

import pytest

from hpo.cli.options import uncollected
from hpo.cli.show import _drawn, aligned, print_table

TABLES = [
    (("trial", "outcome"), [("0", "complete"), ("12345", "")]),
    (("", ""), [("trials", "3 of 4 finished"), ("best", "trial 2")]),
    (("a name", "x", "y"), [("", "two words", "[red]x[/]"), ("1", "-", ":smile:")]),
    (("x",), []),
]


@pytest.mark.parametrize(("header", "rows"), TABLES)
def test_a_plain_table_is_what_rich_draws(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    assert aligned("t", header, rows) == _drawn("t", header, rows, 10_000)


def test_a_title_wider_than_its_table_stays_a_line() -> None:
    assert aligned("a long title", ("x",), [("1",)]) == "a long title\nx\n1\n"


@pytest.mark.parametrize("cell", ["two\nlines", "ä→b", "\x1b[31m"])
def test_what_is_not_plain_is_drawn_by_rich(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ("name", "value"), [("1", cell)], below="end\n")
    assert capsys.readouterr().out == _drawn("t", ("name", "value"), [("1", cell)], 10_000) + "end\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_off_inside_only(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(ValueError), uncollected():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
