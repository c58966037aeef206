"""Tables for other programs, and reading without collections."""

import contextlib
import gc

import pytest

from hpo.cli.options import uncollected
from hpo.cli.tables import aligned, drawn, print_table

TABLES = [
    (("trial", "outcome"), [("0", "complete"), ("12345", "")]),
    (("", ""), [("trials", "3 of 4 finished"), ("best", "trial 2")]),
    (("a name", "x", "y"), [("", "two words", "[red]x[/]"), ("1", "-", ":smile:")]),
    (("x",), []),
]


@pytest.mark.parametrize(("header", "rows"), TABLES)
def test_a_plain_table_is_what_rich_draws(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    assert aligned("t", header, rows) == drawn("t", header, rows, 10_000)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_no_number_is_cut_and_no_line_is_longer_than_the_terminal(width: int) -> None:
    names = ["trial", "outcome", "val_loss", "optimizer.lr", "optimizer.weight_decay", "model.hidden", "why"]
    why = "its worker died 4 times, the last time: its worker was killed by SIGKILL"
    rows = [[str(number), "complete", "0.1162", "0.08806", "0.009122", "1.024e+04", why] for number in range(3)]
    lines = drawn("digits", names, rows, width).splitlines()
    assert max(map(len, lines)) <= width
    words = [line.split() for line in lines]
    for cell in rows[0][:-1]:
        assert any(cell in line for line in words), f"{cell} is whole"
    assert any("SIGKILL" in line for line in lines)
    # Each part says which trials its lines are about.
    parts = [at for at, line in enumerate(words) if line == ["digits"]]
    assert [sum(line[:1] == ["1"] for line in words[at:]) for at in parts] == list(range(len(parts), 0, -1))
    assert (len(parts) == 1) == (width == 120)


def test_a_title_wider_than_its_table_stays_a_line() -> None:
    assert aligned("a long title", ("x",), [("1",)]) == "a long title\nx\n1\n"


@pytest.mark.parametrize("cell", ["two\nlines", "ä→b", "\x1b[31m"])
def test_what_is_not_plain_is_drawn_by_rich(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ("name", "value"), [("1", cell)], below="end\n")
    assert capsys.readouterr().out == drawn("t", ("name", "value"), [("1", cell)], 10_000) + "end\n"


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
