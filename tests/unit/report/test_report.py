"""`hpo report`: the page is whole, holds the figures' data, and lets nothing of a study out as markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from hpo.report.data import study_report
from hpo.report.figures import history, learning_curves, predictions_against_outcomes
from hpo.report.looks import broken, laid_out
from hpo.report.page import page, write_report
from hpo.report.trial_table import trials_section
from hpo.storage.attributes import OUTCOME_ATTR, PREDICTION_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import own_trials
from hpo.study.pruning_summary import MIDDLE_80, ComparedPrediction
from hpo.study.trial_entries import study_trials
from tests.support.commands import hpo, hpo_json
from tests.support.reports import report_of, trial_of
from tests.support.studies import Studies, ask
from tests.unit.search.test_pruning import MAXIMIZE, play, play_all

pytestmark = pytest.mark.full


class Page(HTMLParser):
    """A page as a browser takes it apart.

    Attributes:
        text: What people read.
        figures: Data by figure.
        code: The scripts that run.
        addresses: Whatever an attribute would load or link to.
        tags: Every element's name.
        policy: The page's content security policy.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.policy = "", ""
        self.tags: list[str] = []
        self.addresses: list[str | None] = []
        self.figures: dict[str, Any] = {}
        self.code: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.addresses += [found[name] for name in ("src", "href", "action", "data") if name in found]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag not in ("meta", "input"):
            self._open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, attrs = self._open[-1] if self._open else ("", {})
        if tag == "script" and attrs.get("data-figure"):
            name = str(attrs["data-figure"])
            self.figures[name] = json.loads(self.figures.pop(name, "") + data, parse_constant=pytest.fail)
        elif tag == "script":
            self.code.append(data)
        elif tag != "style":
            self.text += data


@pytest.fixture
def small_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages are looked at without the library in them, which takes a parser its time."""
    monkeypatch.setattr("hpo.report.page.get_plotlyjs", lambda: "const Plotly = {};")


def traces(figure: Any) -> dict[str, Any]:
    """The traces of a figure by what the legend says, without the counts; lines by the name of their marks."""
    named = ((each.get("name", f"{each.get('legendgroup')} lines"), each) for each in figure["data"])
    return {name.partition(" (")[0]: each for name, each in named}


def page_of(view: OpenStudy) -> Page:
    return Page(page(study_report(view)))


OVERRIDES = ("study.n_trials=20", "trainer.max_epochs=10")


@pytest.fixture
def finished(studies: Studies, small_plotly: None) -> Iterator[OpenStudy]:
    with studies.open(*OVERRIDES) as (view,):
        play_all(view, 0.5, 1.0, 2.0)
        yield view


def test_the_page_holds_every_curve_by_how_it_ended(finished: OpenStudy) -> None:
    found = traces(page_of(finished).figures["curves"])
    assert found["complete lines"]["x"] == [*range(1, 11), None] * 3
    assert found["complete lines"]["y"][:11] == [2.0] * 9 + [1.0, None]
    assert found["complete lines"]["customdata"][9:13] == [0, None, 1, 1]
    assert found["pruned"]["marker"]["symbol"] == "x"
    assert (found["pruned"]["x"], found["pruned"]["customdata"]) == ([2, 5], [3, 4])
    # A value that is no number is a gap, and the mark stands on the last that is one.
    assert found["diverged lines"]["y"] == [2.0, 2.0, 2.0, None, None]
    assert (found["diverged"]["x"], found["diverged"]["y"]) == ([3], [2.0])
    assert (found["failed"]["x"], found["not ended"]["x"]) == ([3], [2])


def test_the_best_so_far_falls_only_where_a_better_one_came(studies: Studies, small_plotly: None) -> None:
    with studies.open(*OVERRIDES) as (view,):
        for value in (3.0, 4.0, 1.0, 2.0):
            play(view, [value])
        play(view, [math.nan], diverged=True)
        play(view, [math.inf])  # as other tools store one that diverged
        best = traces(page_of(view).figures["history-0"])
    assert best["trial"]["x"] == [0, 1, 2, 3]
    assert best["best so far"]["y"] == [3.0, 3.0, 1.0, 1.0]


def test_the_best_so_far_of_a_maximised_metric_rises(studies: Studies) -> None:
    with studies.open(*OVERRIDES, *MAXIMIZE) as (view,):
        for value in (3.0, 4.0, 1.0):
            play(view, [value])
        report = study_report(view)
        drawn = history(report.escaped, report.complete, report.goals, "val_mae")
    assert list(drawn.data[1].y) == [3.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("values", "direction", "kind"),
    [
        ([100.0, 0.5], "minimize", "log"),
        ([100.0, 50.0], "minimize", None),
        ([100.0, 0.0], "minimize", None),
        ([100.0, 0.5], "maximize", None),
    ],
)
def test_a_loss_over_several_magnitudes_has_a_logarithmic_axis(
    studies: Studies, values: list[float], direction: str, kind: str | None
) -> None:
    with studies.open(*OVERRIDES) as (view,):
        play(view, values)
        assert learning_curves(own_trials(view), "x", direction).layout.yaxis.type == kind


def test_the_tables_hold_the_audits_figures(finished: OpenStudy) -> None:
    text = " ".join(page_of(finished).text.split())
    assert text.startswith("tiny: study report tiny metricval_loss, minimize")
    for said in (
        "7 of 20 finished: 3 complete, 2 pruned, 1 diverged, 1 error",
        "trial 1, 0.5",
        "2 of 7 ended",
        "13 of 57 (23 %)",
        "of them the best of all1",
        "33 %, 95 % interval 6 % to 79 %",
        "alpha in force at the last decision0.04",
        "trial 1kept as an audit run at epoch 3: probability 0.012 to end among the best, alpha is 0.04; ",
        "No trial for which a final loss was predicted has run to its end yet.",
    ):
        assert said in text, said


@pytest.mark.parametrize(("overrides", "best"), [((), ["1", "1.5", "0.5", ""]), (MAXIMIZE, ["3", "2", "4", ""])])
def test_the_table_shows_a_trial_that_is_not_complete_with_its_best_value(
    studies: Studies, overrides: tuple[str, ...], best: list[str]
) -> None:
    with studies.open(*OVERRIDES, *overrides) as (view,):
        play(view, [2.0, float(best[0])])
        play(view, [2.0, 1.5, 1.75], state=TrialState.PRUNED)
        play(view, [4.0, 0.5, math.nan], diverged=True)
        play(view, [math.nan], diverged=True)
        section = trials_section(study_report(view))
        listed = study_trials(view)
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in section.content.split("<tr>")]
    cells = {row[0]: row[2] for row in rows if len(row) > 2}
    assert [cells[str(number)] for number in range(4)] == best
    assert [float(value) if value else None for value in best] == [entry["value"] for entry in listed]


def keep_predictions(view: OpenStudy) -> None:
    """Two trials that ended, one inside its interval, and one that was pruned."""
    for predicted, final in ((1.1, 1.0), (3.0, 2.0), (5.0, None)):
        trial, _ = ask(view)
        trial.report(2.0, 1)
        kept = {"metric": "val_loss", "epoch": 4, "predicted_final_loss": predicted, "std": 0.5}
        kept |= {"final_loss": final}
        trial.set_user_attr(PREDICTION_ATTR, kept)
        state = TrialState.PRUNED if final is None else None
        view.study.tell(trial, final, state)


def test_predictions_stand_against_outcomes(studies: Studies, small_plotly: None) -> None:
    with studies.open(*OVERRIDES) as (view,):
        keep_predictions(view)
        shown = page_of(view)
    drawn = traces(shown.figures["predictions"])
    assert (drawn["trial"]["x"], drawn["trial"]["y"]) == ([1.0, 2.0], [1.1, 3.0])
    assert drawn["trial"]["error_y"]["array"] == [pytest.approx(0.6408, abs=1e-4)] * 2
    assert drawn["trial"]["customdata"] == [[0, 4], [1, 4]]
    assert drawn["as predicted"]["x"] == drawn["as predicted"]["y"] == [1.0, 3.0]
    data = hpo_json("report", studies.folder / "study.yaml", *OVERRIDES)["predictions"]
    assert (data["compared"], data["mean_absolute_error"], data["inside_80"]) == (2, pytest.approx(0.55), 0.5)
    assert "mean absolute error0.55" in re.sub(r"\s*\n\s*", "", shown.text)


EVIL = "<script>alert(1)</script>"
EVIL_LINK = '<a href="https://example.org">&amp;</a>'


def test_what_comes_from_a_study_is_text(studies: Studies, small_plotly: None) -> None:
    space = f"search_space={{data.note: {{type: categorical, choices: ['{EVIL}', '{EVIL_LINK}']}}}}"
    with studies.open(*OVERRIDES, space) as (view,):
        written: set[str] = set()
        while len(written) < 2:
            trial, params = ask(view)
            written.add(params["data.note"])
            trial.report(1.0, 1)
            view.study.tell(trial, 1.0)
        best = own_trials(view)[0].params["data.note"]
        text = page(study_report(view))
    shown = Page(text)
    assert best in shown.text
    assert len(shown.code) == 2  # the library, and what calls it
    assert not [code for code in shown.code if "alert" in code]
    assert all(address and address.startswith("#") for address in shown.addresses)
    assert EVIL not in text
    hover = " ".join(traces(shown.figures["history-0"])["trial"]["text"])  # plotly.js reads some of HTML in it
    assert "&lt;script&gt;alert(1)" in hover
    assert "&lt;a href=" in hover
    assert not re.findall(r"<(?!br>)", hover)


def test_a_study_without_a_complete_trial_has_a_report(studies: Studies, small_plotly: None) -> None:
    with studies.open(*OVERRIDES) as (view,):
        shown = page_of(view)
        assert "No trial has reported an epoch yet." in shown.text
        assert not shown.figures
        assert "No worker has taken a trial yet." in shown.text
        play(view, [2.0, 1.5], state=TrialState.PRUNED)
        trial, _ = ask(view)
        trial.report(math.inf, 1)
        trial.set_user_attr(OUTCOME_ATTR, "diverged")
        view.study.tell(trial, math.inf)
        shown = page_of(view)
    assert list(shown.figures) == ["curves", "timeline"]
    assert traces(shown.figures["curves"])["diverged lines"]["y"] == [None, None]
    assert "no complete trial yet" in shown.text
    assert "No trial is complete yet." in shown.text
    assert "not measured: no audited trial has ended" in shown.text


def test_the_page_opens_without_a_network_and_sends_nothing(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        play(view, [2.0, 1.0])
        path = Path(hpo("report", studies.folder / "study.yaml", *OVERRIDES).stdout.strip())
        assert path == view.spec.output_dir / "report.html"
    text = path.read_text(encoding="utf-8")
    shown = Page(text)
    assert [code.lstrip().startswith("/**\n* plotly.js") for code in shown.code] == [True, False]
    assert all(address and address.startswith("#") for address in shown.addresses)
    assert {"link", "iframe", "img"}.isdisjoint(shown.tags)
    assert shown.policy.startswith("default-src 'none'; script-src 'unsafe-inline'; ")
    assert "showSendToCloud: false" in shown.code[1]
    assert set(shown.figures) == {"curves", "history-0", "parallel-0", "slice-0-0", "slice-0-1", "timeline"}


def test_the_report_as_json_is_what_status_says(finished: OpenStudy, studies: Studies, tmp_path: Path) -> None:
    target = tmp_path / "made" / "for it" / "page.html"
    data = hpo_json("report", studies.folder / "study.yaml", *OVERRIDES, "-o", target)
    status = hpo_json("status", studies.folder / "study.yaml", *OVERRIDES)
    assert data["path"] == str(target)
    assert target.is_file()
    for name in ("study", "outcomes", "best", "pruning"):
        assert data[name] == status[name]
    assert data["predictions"] == {"compared": 0, "mean_absolute_error": None, "inside_80": None, "trials": []}


def test_a_report_that_fails_leaves_the_one_before(
    finished: OpenStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, found = tmp_path / "there" / "report.html", study_report(finished)
    write_report(found, target)
    before = target.read_text()

    def broken(_: Any) -> str:
        raise RuntimeError("a section fails")

    monkeypatch.setattr("hpo.report.page.page", broken)
    with pytest.raises(RuntimeError, match="a section fails"):
        write_report(found, target)
    assert target.read_text() == before
    assert list(target.parent.iterdir()) == [target]


def test_a_place_that_cannot_be_written_to_is_an_error(finished: OpenStudy, studies: Studies) -> None:
    folder = studies.folder / "folder"
    folder.mkdir()
    printed = hpo("report", studies.folder / "study.yaml", *OVERRIDES, "-o", folder, code=2).stderr
    assert printed.startswith("--output: can't be written: ")
    assert f"value: {folder}" in printed
    assert "fix: " in printed
    assert not list(folder.iterdir())


def test_a_study_that_is_not_there_is_the_error_of_status(studies: Studies) -> None:
    studies.spec()
    printed = hpo("report", studies.folder / "study.yaml", code=3)
    assert (printed.stdout, printed.stderr) == ("", hpo("status", studies.folder / "study.yaml", code=3).stderr)
    assert "hpo run" in printed.stderr
    assert not list(studies.folder.rglob("report.html"))


@pytest.mark.parametrize(("actual", "down"), [(0.5, [0.25, 1.0]), (-0.5, [1.0, 1.0])])
def test_no_interval_is_drawn_below_0_where_no_value_is(actual: float, down: list[float]) -> None:
    compared = [ComparedPrediction(n, 3, at, 1.0 / MIDDLE_80, actual) for n, at in enumerate((0.25, 2.0))]
    bars = predictions_against_outcomes(compared).data[1].error_y
    assert list(bars.array) == [1.0, 1.0]
    assert list(bars.arrayminus) == down


@pytest.mark.parametrize(("greatest", "ticks"), [(0.3, None), (1e6, 1), (1e30, 3), (1e300, 50)])
def test_a_logarithmic_axis_has_a_tick_at_twelve_powers_of_ten_at_most(greatest: float, ticks: int | None) -> None:
    least = {0.3: 0.1, 1e300: 1e-300}.get(greatest, 1.0)
    drawn = laid_out(go.Figure(go.Scatter(x=[1, 2], y=[least, greatest])), "epoch", "loss", logarithmic=True)
    assert drawn.layout.yaxis.dtick == ticks


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("batch_size", ["batch_size"]),
        ("optimizer.lr", ["optimizer.", "lr"]),
        ("optimizer.weight_decay", ["optimizer.", "weight_decay"]),
        ("lr_scheduler.num_warmup_epochs", ["lr_scheduler.", "num_warmup_", "epochs"]),
        ("model.averyverylongname.x", ["model.", "averyverylon", "gname.", "x"]),
        ("a<b_with_long_name", ["a&lt;b_with_", "long_name"]),
    ],
)
def test_a_long_name_is_broken_at_dots_and_underscores(name: str, lines: list[str]) -> None:
    assert broken(name) == "<br>".join(lines)


def test_a_slice_and_the_bars_have_room_for_long_names(small_plotly: None) -> None:
    name, uniform = "number_of_hidden_units_in_the_first_layer", FloatDistribution(0, 1)
    trials = [
        trial_of(number, {name: number / 40, "b": number % 7 / 7}, dict.fromkeys((name, "b"), uniform), number)
        for number in range(40)
    ]
    figures = Page(page(report_of(trials))).figures
    titles = {figures[f"slice-0-{place}"]["layout"]["xaxis"]["title"]["text"] for place in range(2)}
    assert titles == {"number_of_hidden_units_<br>in_the_first_layer", "b"}
    assert {"number_of_<br>hidden_<br>units_in_<br>the_first_<br>layer", "b"} == {
        *figures["importance"]["data"][0]["y"]
    }
