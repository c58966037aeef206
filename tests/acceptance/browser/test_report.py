"""The report in a real browser: every figure is drawn, nothing is loaded; on a phone, in the dark, on paper."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.report.page import write_report
from tests.support.commands import wait_until
from tests.support.reports import report_of, trial_of, work_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

EVIL = "<img src=x onerror=\"document.title='broken in'\">"
COUNT = 48
SPACE = {
    "optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
    f"model.{EVIL}": IntDistribution(1, 9),
    "model.kind": CategoricalDistribution((EVIL, None, True, 2, "plain")),
}


def a_trial(number: int) -> FrozenTrial:
    """A trial of a search whose names are hostile; some are pruned, diverge and fail."""
    kinds = SPACE["model.kind"].choices
    params = {
        "optimizer.lr": 1e-4 * 1.15**number,
        f"model.{EVIL}": 1 + number % 9,
        "model.kind": kinds[number % len(kinds)],
    }
    if number % 4 == 3:
        params.pop(f"model.{EVIL}")  # as if its condition did not hold
    curve = {epoch: 2 / epoch + number / 30 for epoch in range(1, 4 + number % 3)}
    attrs: dict[str, Any] = {}
    state, value = TrialState.COMPLETE, curve[len(curve)]
    if number % 7 == 5:
        state = TrialState.PRUNED
    if number % 11 == 7:
        attrs, value = {"hpo:outcome": "diverged"}, float("inf")
    if number % 13 == 9:
        state, curve = TrialState.FAIL, {}  # before its first epoch
        attrs = {"hpo:reason": f"ValueError: {EVIL}", "hpo:traceback": f"Trace {EVIL}"}
    distributions = {name: SPACE[name] for name in params}
    return trial_of(number, params, distributions, value, curve=curve, state=state, attrs=attrs)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trials = [a_trial(number) for number in range(COUNT)]
    work = [work_of(trial, worker=f"{EVIL}-{trial % 3}") for trial in range(COUNT)]
    predictions = {"metric": "val_loss", "epoch": 1, "predicted_final_loss": 1.0, "std": 0.1, "final_loss": 1.1}
    trials[0].user_attrs["hpo:prediction"] = predictions
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(report_of(trials, work=work, name=EVIL), path)
    return path


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two objectives, with a bound that some trials break."""
    goals = {"val_loss": "minimize", "accuracy": "maximize"}
    trials = [
        create_trial(
            values=[1 + (number * 7 % 10) / 10, number / 20],
            params={"a": number / 20, "b": number % 5},
            distributions={"a": FloatDistribution(0, 1), "b": IntDistribution(0, 4)},
            system_attrs={"constraints:size": float(number % 4 - 2)},
        )
        for number in range(20)
    ]
    for number, trial in enumerate(trials):
        trial.number = number
    path = tmp_path_factory.mktemp("front") / "report.html"
    write_report(report_of(trials, goals=goals, bounds={"size": "<= 2"}), path)
    return path


@pytest.fixture
def requested(page: Page) -> list[str]:
    """Whatever the page has asked for."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url))
    return found


def shown(page: Page, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")


FIGURES = """() => Object.fromEntries([...document.querySelectorAll(".figure")].map((place) => [
    place.id.slice(7), place.querySelectorAll(".main-svg .trace, .main-svg .contourlayer path").length]))"""


def colors(page: Page) -> tuple[str, str]:
    """Of the page, and of a figure's text."""
    return (
        page.evaluate("getComputedStyle(document.body).backgroundColor"),
        page.evaluate("getComputedStyle(document.querySelector('#figure-curves .xtitle')).fill"),
    )


LIGHT, DARK = ("rgb(255, 255, 255)", "rgb(31, 35, 40)"), ("rgb(20, 24, 29)", "rgb(230, 233, 236)")


def test_every_figure_is_drawn_and_nothing_of_the_study_runs(
    page: Page, requested: list[str], report: Path, console_errors: list[str]
) -> None:
    shown(page, report)
    drawn = page.evaluate(FIGURES)
    assert list(drawn) == [
        *("history-0", "curves", "comparison", "importance", "parallel-0", "slice-0-0", "slice-0-1", "slice-0-2"),
        *("contour-0", "predictions", "timeline"),
    ]
    assert all(drawn.values()), drawn
    assert requested == [report.as_uri()]
    assert page.title() == f"{EVIL}: study report"
    assert page.query_selector("img") is None
    assert page.evaluate("document.querySelector('#figure-timeline .ytick').textContent").startswith("<img src=x")
    assert console_errors == []


ROWS = "[...document.querySelectorAll('table.trials tbody tr:not([hidden])')]"


def column(page: Page, place: int) -> list[str]:
    """What the table of trials shows in a column."""
    found: list[str] = page.evaluate(f"{ROWS}.map((row) => row.cells[{place}].textContent)")
    return found


def test_trials_are_sorted_by_the_keyboard_and_what_is_missing_stays_last(
    page: Page, report: Path, console_errors: list[str]
) -> None:
    shown(page, report)
    head = page.locator("table.trials").get_by_role("columnheader", name="val_loss", exact=True)
    values = {}
    for direction in ("ascending", "descending"):
        head.get_by_role("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == direction
        values[direction] = column(page, 3)
    assert page.locator("th[aria-sort=ascending], th[aria-sort=descending]").count() == 1
    up = [float(text) for text in values["ascending"] if text]
    assert up == sorted(up)
    assert [float(text) for text in values["descending"] if text] == up[::-1]
    missing = values["ascending"].count("")
    assert missing > 0
    assert all(each[-missing:] == [""] * missing for each in values.values())
    assert console_errors == []


def test_trials_are_filtered_by_words_and_conditions(page: Page, report: Path, console_errors: list[str]) -> None:
    shown(page, report)
    field, said = page.get_by_label("Filter"), page.locator("#trial-count")
    field.fill("pruned lr>0.001")
    assert set(column(page, 2)) == {"pruned"}
    assert all(float(text) > 0.001 for text in column(page, 4))
    assert said.inner_text() == f"{len(column(page, 2))} of {COUNT} trials"
    field.fill("depth>3")
    assert said.inner_text().startswith("no column depth: trial, outcome, val_loss, ")
    field.fill("")
    assert len(column(page, 1)) == COUNT
    assert console_errors == []


def test_ticked_trials_stand_side_by_side(page: Page, report: Path, console_errors: list[str]) -> None:
    shown(page, report)
    page.get_by_role("button", name="Untick all").click()
    assert not page.locator("#comparison").is_visible()
    for number in (5, 3):  # pruned and complete
        page.get_by_role("checkbox", name=f"compare trial {number}", exact=True).check()
    names = page.evaluate("[...document.querySelectorAll('#comparison thead th')].map((each) => each.textContent)")
    assert sorted(names) == ["", "trial 3", "trial 5"]
    outcome = page.locator("#comparison tbody tr").first
    assert outcome.get_attribute("class") == "differs"
    curves = page.evaluate(
        "document.getElementById('figure-comparison').data.map((each) => [each.name, each.x.length])"
    )
    assert sorted(curves) == [["trial 3, complete", 3], ["trial 5, pruned", 5]]
    assert console_errors == []


def test_a_metric_with_markup_in_its_name_is_text_beside_each_curve(
    page: Page, tmp_path: Path, console_errors: list[str]
) -> None:
    trials = [trial_of(0, {}, {}, 1.0, curve={1: 2.0, 2: 1.0})]
    write_report(report_of(trials, goals={"<b>val</b> loss": "minimize"}), tmp_path / "report.html")
    shown(page, tmp_path / "report.html")
    for name in ("curves", "comparison"):
        assert page.locator(f"#figure-{name} .ytitle").text_content() == "<b>val</b> loss"
    assert console_errors == []


def test_a_thousand_trials_are_sorted_and_compared(page: Page, tmp_path: Path, console_errors: list[str]) -> None:
    space = {"a": FloatDistribution(0, 1)}
    curve = {1: 1.0, 2: 0.5}
    trials = [trial_of(n, {"a": n * 7 % 1000 / 1000}, space, n / 1000, curve=curve) for n in range(1000)]
    write_report(report_of(trials), tmp_path / "report.html")
    shown(page, tmp_path / "report.html")
    drawn = page.evaluate(
        "JSON.parse(document.querySelector('script[data-figure=curves]').textContent).data[0].customdata"
    )
    hidden = next(n for n in range(1000) if n not in drawn)
    page.get_by_label("Filter").fill(f"trial={hidden}")
    page.get_by_role("checkbox", name=f"compare trial {hidden}", exact=True).check()
    curves = page.evaluate("document.getElementById('figure-comparison').data.map((each) => each.y)")
    assert curves == [[1.0, 0.5]] * 3
    page.get_by_label("Filter").fill("")
    page.locator("table.trials").get_by_role("button", name="a", exact=True).click()
    assert [float(text) for text in column(page, 4)] == [n / 1000 for n in range(1000)]
    assert console_errors == []


def test_the_best_curve_stands_out(page: Page, report: Path) -> None:
    shown(page, report)
    last = page.evaluate("document.getElementById('figure-curves').data.at(-1)")
    assert last["name"] == f"the best: trial {column(page, 1)[0]}"
    assert last["line"]["width"] > 3


def test_what_is_larger_than_its_box_says_so(page: Page, report: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    shown(page, report)
    hint = page.locator(".scroll:has(table.trials) + .moves")
    assert hint.is_visible()
    page.get_by_label("Filter").fill("trial=0")
    assert hint.inner_text() == "There is more: scroll, or swipe."
    assert not page.locator(".scroll:has(#figure-history-0) + .moves").is_visible()


def test_a_front_and_trials_outside_bounds_are_drawn(page: Page, front: Path, console_errors: list[str]) -> None:
    shown(page, front)
    drawn = page.evaluate(FIGURES)
    assert {"front-0", "history-0", "history-1", "parallel-1", "slice-1-1", "contour-1"} <= set(drawn)
    assert all(drawn.values()), drawn
    legend = page.evaluate("document.querySelector('#figure-front-0 .legend').textContent")
    assert legend == "outside the boundsother trialsPareto front"
    assert console_errors == []


def test_it_fits_a_phone(page: Page, report: Path, front: Path, console_errors: list[str]) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path in (report, front):
        shown(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        widths = page.evaluate(
            "[...document.querySelectorAll('.figure')].map((each) => [each.id, each.offsetWidth])"
        )
        wide = [name for name, width in widths if width > 358]
        assert all(name.startswith("figure-parallel") for name in wide)  # these move inside their box
    assert console_errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_name_leaves_room_for_the_values_beside_it(page: Page, tmp_path: Path, width: int) -> None:
    name = "model." + "a_name_without_an_end_" * 5
    report = report_of([trial_of(0, {name: 0.5}, {name: FloatDistribution(0.0, 1.0)}, 1.0)])
    path = tmp_path / "report.html"
    write_report(report, path)
    page.set_viewport_size({"width": width, "height": 844})
    shown(page, path)
    cells = page.locator("table.pairs").first.locator("td")
    assert cells.last.evaluate("cell => cell.offsetWidth") >= 160
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_remarks_with_a_long_name_fit_a_phone(page: Page, tmp_path: Path) -> None:
    name = "model." + "a_name_without_an_end_" * 5
    space = {name: FloatDistribution(0.0, 1.0)}
    trials = [trial_of(number, {name: 0.001 * number}, space, number) for number in range(5)]  # at the edge
    trials.append(trial_of(5, {}, {}, 5.0))  # without it
    write_report(report_of(trials), tmp_path / "report.html")
    page.set_viewport_size({"width": 390, "height": 844})
    shown(page, tmp_path / "report.html")
    assert page.locator("main li", has_text=name).count()
    assert page.locator("main p", has_text=name).count()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


#: Short names, and numbers: what is read wrong where it is broken.
WORDS = """[...document.querySelectorAll(".pairs th, #comparison th, #comparison td")].filter(
    (each) => /^[a-z.]{2,12}$|^[-+.e0-9]+$/.test(each.textContent.trim()))"""


def test_short_names_and_compared_numbers_are_whole_on_a_phone(page: Page, report: Path, front: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path, word in ((report, "optimizer.lr"), (front, "objectives")):
        shown(page, path)
        lines = page.evaluate(f"""() => {WORDS}.map((each) => {{
            const text = document.createRange();
            text.selectNodeContents(each);
            return [each.textContent.trim(), text.getClientRects().length];
        }})""")
        assert [word, 1] in lines
        assert [each for each in lines if each[1] != 1] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_best_trial_of_one_epoch_is_seen_and_epochs_are_whole(page: Page, tmp_path: Path) -> None:
    trials = [trial_of(number, {}, {}, 1.0 + number, curve={1: 1.0 + number}) for number in range(3)]
    write_report(report_of(trials), tmp_path / "report.html")
    shown(page, tmp_path / "report.html")
    best = page.evaluate("document.getElementById('figure-curves').data.at(-1)")
    assert best["name"] == "the best: trial 0"
    assert best["mode"] == "lines+markers"
    for name in ("curves", "comparison"):
        ticks = page.locator(f"#figure-{name} .xtick").all_text_contents()
        assert ticks
        assert all(float(tick).is_integer() for tick in ticks), (name, ticks)


def test_it_follows_the_light(page: Page, report: Path, console_errors: list[str]) -> None:
    page.emulate_media(color_scheme="light")
    shown(page, report)
    assert colors(page) == LIGHT
    page.emulate_media(color_scheme="dark")
    wait_until(lambda: colors(page) == DARK)
    shown(page, report)
    assert colors(page) == DARK
    assert console_errors == []


def test_it_is_printed_dark_on_white_and_whole(
    page: Page, report: Path, tmp_path: Path, console_errors: list[str]
) -> None:
    page.emulate_media(color_scheme="dark")
    shown(page, report)
    page.evaluate(PRINTED)
    printed = page.pdf(path=tmp_path / "report.pdf", format="A4", print_background=True)
    assert page.evaluate("printed") == [0, 680]
    inks = set(re.findall(rb"([\d.]+ [\d.]+ [\d.]+) rg", b"".join(streams(printed))))
    assert b".1216 .1373 .1569" in inks  # the text of light pages
    assert not {b".0784 .0941 .1137", b".4902 .7059 1"} & inks  # the background and the links of dark ones
    wait_until(lambda: page.query_selector("details[open]") is None and colors(page) == DARK)
    assert console_errors == []


PRINTED = """addEventListener("beforeprint", () => {
    const widths = [...document.querySelectorAll(".main-svg")].map((each) => Number(each.getAttribute("width")));
    window.printed = [document.querySelectorAll("details:not([open])").length, Math.max(...widths)];
})"""


def streams(pdf: bytes) -> list[bytes]:
    """What is drawn on the pages."""
    found = re.findall(rb"/FlateDecode.*?stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    return [zlib.decompressobj().decompress(each) for each in found]


def test_a_reader_of_the_screen_finds_its_way(page: Page, report: Path) -> None:
    shown(page, report)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    links = page.evaluate(
        "[...document.querySelectorAll('nav a')].map((each) => each.getAttribute('href').slice(1))"
    )
    assert links == page.evaluate("[...document.querySelectorAll('main section')].map((each) => each.id)")
    assert page.evaluate("[...document.querySelectorAll('figure')].every((each) => each.ariaLabel.length > 8)")
    assert page.evaluate("document.documentElement.lang") == "en"
