"""A report and its pictures of a study in any state, from a real database."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from matplotlib.figure import Figure
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.visualization.matplotlib import plot_intermediate_values

from hpo.config.yaml_loader import Loader
from hpo.report.data import report_data, study_report
from hpo.report.drawable import snapshot
from hpo.report.internal_sections import config_section
from hpo.report.page import page
from hpo.report.pictures import write_pictures
from hpo.storage.attributes import BEST_ATTR, OUTCOME_ATTR
from hpo.study.open_study import OpenStudy
from tests.support.commands import STUDY, hpo, hpo_json
from tests.support.reports import report_of, trial_of
from tests.support.studies import Studies, ask
from tests.unit.report.test_report import Page, small_plotly
from tests.unit.search.test_pruning import play

pytestmark = pytest.mark.full

__all__ = ["small_plotly"]


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn once and small: cutting off their margins takes a second drawing."""
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: save(figure, path, dpi=20))


N_TRIALS = "study.n_trials=20"


def nothing(view: OpenStudy) -> None:
    """No trial."""


def running(view: OpenStudy) -> None:
    play(view, [2.0], state=TrialState.RUNNING)


def all_pruned(view: OpenStudy) -> None:
    for _ in range(3):
        play(view, [2.0, 1.0], state=TrialState.PRUNED)


def all_failed(view: OpenStudy) -> None:
    for _ in range(3):
        play(view, [], state=TrialState.FAIL)


def all_diverged(view: OpenStudy) -> None:
    for _ in range(3):
        play(view, [2.0, math.nan], diverged=True)


def one(view: OpenStudy) -> None:
    play(view, [2.0, 1.0])


def several(view: OpenStudy) -> None:
    for value in (2.0, 1.0, 3.0, 1.5):
        play(view, [4.0, value])


def imported(view: OpenStudy) -> None:
    """The third trial of the storage is the second one of the study's own."""
    play(view, [2.0])
    view.study.add_trial(create_trial(value=0.0, intermediate_values={1: 0.0}))
    play(view, [1.0])


def beyond(view: OpenStudy) -> None:
    for value, violation in ((2.0, -1.0), (1.0, 1.0), (3.0, -2.0)):
        trial, _ = ask(view)
        trial.set_constraint("parameters", violation)
        trial.report(value, 1)
        view.study.tell(trial, value)


def all_beyond(view: OpenStudy) -> None:
    for value in (2.0, 1.0):
        trial, _ = ask(view)
        trial.set_constraint("parameters", 1.0)
        view.study.tell(trial, value)


def all_paused_beyond(view: OpenStudy) -> None:
    """As the end of a study leaves trials that its scheduler has paused outside of the bounds."""
    for value in (2.0, 1.0):
        trial, _ = ask(view)
        trial.set_constraint("parameters", 1.0)
        trial.report(value, 1)
        trial.set_user_attr(BEST_ATTR, {"epoch": 1, "metrics": {"val_loss": value}})
        view.study.tell(trial, state=TrialState.PRUNED)


ALL = {"history-0", "curves", "parallel-0", "slice-0-0", "slice-0-1", "timeline"}
BOUND = "study.constraints={parameters: '<= 10'}"


@pytest.mark.parametrize(
    ("state", "overrides", "figures", "said"),
    [
        (nothing, (), set(), "No worker has taken a trial yet."),
        (running, (), {"curves"}, "The first trial has only just begun."),
        (all_pruned, (), {"curves", "timeline"}, "3 of 3 ended"),
        (all_failed, (), {"timeline"}, "no reason is stored"),
        (all_diverged, (), {"curves", "timeline"}, "a metric was no finite number any more"),
        (one, (), ALL, "it takes 2 complete trials; there is 1"),
        (several, (), ALL | {"importance"}, "trial 1, 1"),
        (several, ("study.metric=val_mae", "study.direction=maximize"), ALL | {"importance"}, "trial 2, 3"),
        (imported, (), ALL | {"importance"}, "trial 2, 1"),
        (beyond, (BOUND,), ALL | {"importance"}, "Diamonds are trials outside the bounds"),
        (all_beyond, (BOUND,), ALL - {"curves"}, "no complete trial meets the constraints"),
        (all_paused_beyond, (BOUND,), {"curves", "timeline"}, "no trial meets the constraints"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_study_in_any_state_has_a_report(
    studies: Studies,
    tmp_path: Path,
    small_plotly: None,
    small_pictures: None,
    state: Callable[[OpenStudy], None],
    overrides: tuple[str, ...],
    figures: set[str],
    said: str,
) -> None:
    with studies.open(N_TRIALS, *overrides) as (view,):
        state(view)
        report = study_report(view)
    shown = Page(page(report))
    assert set(shown.figures) == figures
    assert said in " ".join(shown.text.split())
    assert report_data(report)["timeline"]["attempts"] == len(report.work)
    pictures = {path.stem for path in write_pictures(report, tmp_path)}
    names = {"history-0": "history", "parallel-0": "parallel", "importance": "importances"}
    slices = {"slices"} if "slice-0-0" in figures else set()
    assert pictures == {names.get(name, name) for name in figures if not name.startswith("slice-")} | slices


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_curves_of_every_end_are_in_the_picture(caplog: pytest.LogCaptureFixture) -> None:
    ends = {
        TrialState.FAIL: {},
        TrialState.WAITING: {},  # a paused one
        TrialState.RUNNING: {},
        TrialState.COMPLETE: {OUTCOME_ATTR: "diverged"},
    }
    trials = [
        trial_of(number, {}, {}, math.inf, curve={1: 2.0, 2: math.nan}, state=state, attrs=attrs)
        for number, (state, attrs) in enumerate(ends.items())
    ]
    drawn = plot_intermediate_values(snapshot(trials, {"val_loss": "minimize"}, curves=True))
    assert len(drawn.get_lines()) == len(ends)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


SPACE = """search_space={
    model._target_: {type: categorical, choices: [parts.Net, parts.Other]},
    model.hidden: {type: int, low: 2, high: 8, when: {model._target_: parts.Net}},
    model.dropout: {type: float, low: 0.1, high: 0.1},
    data.samples: {type: categorical, choices: [null, true, 2, "$x_{^", "[1, 2]"]}}"""


def test_conditions_and_choices_of_any_kind_are_shown(
    studies: Studies, tmp_path: Path, small_plotly: None, small_pictures: None
) -> None:
    with studies.open("study.n_trials=40", SPACE) as (view,):
        for number in range(24):
            trial, params = ask(view)
            trial.report(1.0, 1)
            view.study.tell(trial, 1.0 + params.get("model.hidden", 5) / 10 + number / 100)
        report = study_report(view)
    shown = Page(page(report))
    assert {"importance", "parallel-0"} <= set(shown.figures)
    assert "a surface over" in shown.text
    found = {tuple(figure["layout"]["xaxis"].get("categoryarray", ())) for figure in shown.figures.values()}
    assert ("None", "True", "2", "$x_{^", "[1, 2]") in found
    assert {path.stem for path in write_pictures(report, tmp_path)} >= {"slices", "parallel"}


def test_the_names_of_many_parameters_stand_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of parameters and their choices, in the pictures that have an axis for each."""
    choices = ("torch.nn.LeakyReLU", "torch.nn.Hardswish", "torch.nn.Softplus")
    space: dict[str, BaseDistribution] = {
        f"model.encoder.hidden_width_{at}": FloatDistribution(1e-5, 1, log=True) for at in range(9)
    }
    space |= {f"model.decoder.activation_{at}": CategoricalDistribution(choices) for at in range(3)}
    trials = [
        trial_of(number, {name: choices[number % 3] if "act" in name else 0.1 for name in space}, space, number)
        for number in range(6)
    ]
    overlapping: list[tuple[str, str]] = []

    def look(figure: Figure, path: Path, **_: object) -> None:
        figure.canvas.draw()
        names = [
            label
            for each in figure.axes
            for axis in (each.xaxis, each.yaxis)
            if axis.get_visible()
            for label in (axis.label, *axis.get_ticklabels())
        ]
        shown = [label for label in names if "model." in label.get_text() or "torch." in label.get_text()]
        boxes = [(label.get_text(), label.get_window_extent()) for label in shown]
        for at, (one, box) in enumerate(boxes):
            overlapping.extend((one, other) for other, beside in boxes[:at] if box.overlaps(beside))

    monkeypatch.setattr(Figure, "savefig", look)
    write_pictures(report_of(trials), tmp_path)
    assert not overlapping


GOALS = "{val_loss: minimize, val_mae: maximize, parameters: minimize}"


@pytest.mark.full
def test_several_objectives_have_a_front(
    studies: Studies, tmp_path: Path, small_plotly: None, small_pictures: None
) -> None:
    text = STUDY.replace("  name: tiny", f"  name: tiny\n  objectives: {GOALS}")
    with studies.open(N_TRIALS, text=text) as (view,):
        for number in range(8):
            trial, _ = ask(view)
            view.study.tell(trial, [number % 3, number % 4, number % 5])
        report = study_report(view)
        front = [trial.number for trial in report.best]
    shown = Page(page(report))
    assert {"front-0", "front-1", "front-2", "history-2", "parallel-1"} <= set(shown.figures)
    marked = next(trace for trace in shown.figures["front-1"]["data"] if trace["name"] == "Pareto front")
    assert sorted(marked["customdata"]) == sorted(front)
    assert f"{len(front)} trials on the Pareto front" in shown.text
    assert "A study with several objectives stores no curves" in shown.text
    pictures = {path.stem for path in write_pictures(report, tmp_path)}
    assert {"front-val_loss-val_mae", "history-parameters", "slices-val_mae", "importances"} <= pictures
    assert [each["trial"] for each in report_data(report)["best"]] == front


@pytest.mark.full
def test_the_pictures_are_named_and_are_pictures(studies: Studies, tmp_path: Path) -> None:
    with studies.open(N_TRIALS) as (view,):
        several(view)
    folder = tmp_path / "made" / "for them"
    printed = hpo("report", studies.folder / "study.yaml", N_TRIALS, "--png", folder).stdout.split("\n")
    assert sorted(printed[1:-1]) == sorted(str(path) for path in folder.iterdir())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    data = hpo_json("report", studies.folder / "study.yaml", N_TRIALS, "--png", folder)
    assert data["pictures"] == printed[1:-1]
    assert set(data["importances"]) == {"optimizer.lr", "model.hidden"}
    assert data["timeline"]["workers"][0]["attempts"] == 4


def test_a_front_of_one_trial_says_what_it_takes_to_look_for_edges(small_plotly: None) -> None:
    trials = [create_trial(values=[float(number), float(number)]) for number in range(5)]
    for number, trial in enumerate(trials):
        trial.number = number
    text = Page(page(report_of(trials, goals={"val_loss": "minimize", "val_mae": "minimize"}))).text
    assert "It takes several trials on the Pareto front to say." in text


SLASHES = """
study: {name: tiny, n_trials: 2, objectives: {val/loss: minimize, val/mae: minimize}}
objective: {_target_: parts.mae, outputs: 0, targets: 0}
search_space: {objective.outputs: {type: int, low: 0, high: 4}}
"""


def test_metrics_with_a_slash_have_pictures(studies: Studies, tmp_path: Path, small_pictures: None) -> None:
    with studies.open(text=SLASHES) as (view,):
        for values in ([1.0, 2.0], [2.0, 1.0]):
            view.study.tell(ask(view)[0], values)
        found = {path.stem for path in write_pictures(study_report(view), tmp_path)}
    assert {"history-val-loss", "front-val-loss-val-mae"} <= found


def test_metrics_that_would_start_a_formula_are_drawn_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goals = {"cost in $": "minimize", "$x_{^$": "maximize"}
    space = {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}
    trials = []
    for number in range(24):
        params = {"a": number / 24, "b": number * 7 % 24 / 24}
        trials.append(create_trial(values=[number + 0.5, -number - 0.5], params=params, distributions=space))
        trials[-1].number = number
    shown: dict[str, set[str]] = {}

    def look(figure: Figure, path: Path, **_: object) -> None:
        figure.canvas.draw()
        shown[path.name] = {axis.label.get_text() for each in figure.axes for axis in (each.xaxis, each.yaxis)}

    monkeypatch.setattr(Figure, "savefig", look)
    write_pictures(report_of(trials, goals=goals), tmp_path)
    curve = trial_of(0, {}, {}, 1.0, curve={1: 2.0, 2: 1.0})
    write_pictures(report_of([curve], goals={"$x_{^$": "minimize"}), tmp_path)
    assert {r"cost in \$", r"\$x_{^\$"} <= shown["front-cost in $-$x_{^$.png"]
    assert all(r"\$x_{^\$" in shown[f"{name}-$x_{{^$.png"] for name in ("history", "slices", "contour"))
    assert r"\$x_{^\$" in shown["curves.png"]


def test_metrics_whose_files_would_have_one_name_have_a_picture_each(tmp_path: Path, small_pictures: None) -> None:
    goals = {"val/loss": "minimize", "val-loss": "maximize"}
    trials = [create_trial(values=[1.0, 2.0]), create_trial(values=[2.0, 1.0])]
    for number, trial in enumerate(trials):
        trial.number = number
    written = write_pictures(report_of(trials, goals=goals), tmp_path)
    assert [path.name for path in written if "history" in path.name] == [
        "history-val-loss.png",
        "history-val-loss-2.png",
    ]
    assert len(written) == len(set(written)) == len(list(tmp_path.iterdir()))


def test_pictures_that_cannot_be_written_are_an_error(studies: Studies, tmp_path: Path) -> None:
    with studies.open(N_TRIALS) as (view,):
        one(view)
    (tmp_path / "file").touch()
    error = hpo("report", studies.folder / "study.yaml", N_TRIALS, "--png", tmp_path / "file", code=2).stderr
    assert error.startswith("--png: can't be written: ")
    assert "fix: " in error


def test_without_matplotlib_the_fix_is_said(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    with studies.open(N_TRIALS) as (view,):
        one(view)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = hpo("report", studies.folder / "study.yaml", N_TRIALS, "--png", studies.folder / "png", code=3).stderr
    assert (
        error == "matplotlib draws the pictures, and is not installed\n  fix: pip install 'hpo-service[plots]'\n"
    )


def lose_note(view: OpenStudy) -> None:
    """As if a person had edited it in the dashboard."""
    view.storage.set_study_system_attr(view.study_id, "dashboard:note_str:0", "mine ```yaml\n{")


@pytest.mark.parametrize("edited", [False, True])
def test_no_password_is_in_the_page(studies: Studies, small_plotly: None, edited: bool) -> None:
    with studies.open(N_TRIALS, "data.password=sesame") as (view,):
        if edited:
            lose_note(view)
        report = study_report(view)
    text = page(report)
    assert "sesame" not in text
    assert report.config["data"] == {"_target_": "parts.load", "password": "***"}
    assert "hidden: 4" in text


def test_the_study_file_in_the_page_is_read_as_the_same_values() -> None:
    config = {"study": {"name": "made-up"}, "model": {"lr": "1e-3", "octal": "0o17", "on": True, "rate": 1e-5}}
    folded = str(config_section(replace(report_of([]), config=config)).content)
    text = unescape(folded.partition('<pre tabindex="0">')[2].partition("</pre>")[0])
    assert yaml.load(text, Loader=Loader) == config


def test_what_is_known_of_the_machine_is_said(studies: Studies, small_plotly: None) -> None:
    with studies.open(N_TRIALS) as (view,):
        one(view)
        known = page(study_report(view))
        lose_note(view)
        unknown = page(study_report(view))
    for said in (f'<th scope="row">optuna</th><td>{optuna.__version__}</td>', "where the study was created"):
        assert said in known
        assert said not in unknown
    assert "no versions are stored" in unknown


def test_a_large_study_is_thinned(small_plotly: None) -> None:
    space = {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}
    trials = [
        trial_of(number, {"a": number / 400, "b": number * 7 % 400 / 400}, space, number, curve={1: 1.0, 2: 2.0})
        for number in range(400)
    ]
    shown = Page(page(report_of(trials)))
    assert len([x for x in shown.figures["curves"]["data"][0]["x"] if x is None]) == 300
    assert sum(trace.get("mode") == "lines" for trace in shown.figures["parallel-0"]["data"]) == 100
    assert "Of 400 curves 300 are drawn" in shown.text
    assert "Of 400 trials 100 are drawn" in shown.text
    assert "Of 400 trials 150 are used" in shown.text


@pytest.mark.parametrize(
    "values",
    [
        [sys.float_info.max if number % 5 == 0 else 0.1 + number for number in range(30)],
        [(-1) ** number * 1e308 * (1 - number / 100) for number in range(30)],
        [sys.float_info.max] * 3,
        [1e39 if number % 5 == 0 else float(number) for number in range(30)],
    ],
    ids=["penalties", "of both signs", "alone", "no float32"],
)
@pytest.mark.filterwarnings("error")
def test_values_near_the_end_of_what_a_float_holds_are_drawn(
    values: list[float], tmp_path: Path, small_plotly: None, small_pictures: None
) -> None:
    space = {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}
    trials = [
        trial_of(number, {"a": number / 30, "b": number * 7 % 30 / 30}, space, value, curve={1: value, 2: value})
        for number, value in enumerate(values)
    ]
    report = report_of(trials)
    drawn = Page(page(report))
    points = next(trace for trace in drawn.figures["history-0"]["data"] if trace["name"] == "trial")
    assert points["y"] == [max(-1e300, min(value, 1e300)) for value in values]
    said = "Values beyond ±1e+300 are drawn at ±1e+300." in drawn.text
    assert said == any(abs(value) > 1e300 for value in values)
    assert {path.stem for path in write_pictures(report, tmp_path)} >= {"curves", "history", "parallel", "slices"}


def drawn_as_it_runs(number: int) -> FrozenTrial:
    """A trial of an objective that draws a width for each layer, from a range that the depth decides."""
    layers = 1 + number % 3
    params = {"layers": layers, "lr": 1e-3 * 1.1**number}
    space: dict[str, BaseDistribution] = {
        "layers": IntDistribution(1, 3),
        "lr": FloatDistribution(1e-3, 0.1, log=True),
    }
    for layer in range(layers):
        params[f"width{layer}"] = 4 + number * (layer + 3) % (10 * layers)
        space[f"width{layer}"] = IntDistribution(4, 4 + 10 * layers)
    return trial_of(number, params, space, layers + 1 / (number + 1), curve={1: 2.0})


def test_a_space_that_changes_between_trials_is_right_and_said(
    tmp_path: Path, small_plotly: None, small_pictures: None
) -> None:
    report = report_of([drawn_as_it_runs(number) for number in range(40)])
    shown = Page(page(report))
    text = " ".join(shown.text.split())
    assert "width1 is in 26 of 40 trials." in text
    assert "width2 is in 13 of 40 trials." in text
    assert "The range of width0, width1 differs from trial to trial" in text
    assert "lr is in" not in text
    assert "Not every trial has width1, width2: its cell is empty." in text
    assert list(report.importances.shares)[:2] in (["lr", "layers"], ["layers", "lr"])
    slices = [figure for name, figure in shown.figures.items() if name.startswith("slice-")]
    points = sorted(len(each["x"]) for figure in slices for each in figure["data"])
    assert points == [13, 26, 40, 40, 40], "a slice shows the trials that have its parameter"
    lines = [each["y"] for each in shown.figures["parallel-0"]["data"] if each.get("mode") == "lines"]
    assert {len(line) for line in lines} == {6}, "every trial passes every axis"
    assert {path.stem for path in write_pictures(report, tmp_path)} >= {"slices", "parallel", "importances"}


def test_the_picture_of_the_curves_counts_whole_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ticks: list[float] = []

    def looked_at(found: Any, path: Path) -> Path:
        ticks.extend(found.gcf().axes[0].get_xticks())
        found.close("all")
        return path

    monkeypatch.setattr("hpo.report.pictures._saved", looked_at)
    curve = {epoch: 1 / epoch for epoch in range(1, 21)}
    report = report_of([trial_of(0, {"x": 0.5}, {"x": FloatDistribution(0, 1)}, 0.05, curve=curve)])
    monkeypatch.setattr("hpo.report.pictures._of_metric", lambda *_: [])
    write_pictures(report, tmp_path)
    assert ticks
    assert all(tick == int(tick) for tick in ticks)
    assert not pyplot.get_fignums()


def test_a_slice_of_a_single_value_has_no_other_at_its_axis(small_plotly: None) -> None:
    """Around 0.076 plotly shows -0.5 to 1: a dropout that is none."""
    space = {"dropout": FloatDistribution(0.0, 0.5), "lr": FloatDistribution(1e-4, 0.1, log=True)}
    trials = [
        trial_of(number, {"dropout": 0.0760578, "lr": 0.01 * (1 + number)}, space, 1.0 + number)
        for number in range(3)
    ]
    figures = Page(page(report_of(trials))).figures
    axes = {
        each["title"]["text"]: each
        for place in range(2)
        for each in [figures[f"slice-0-{place}"]["layout"]["xaxis"]]
    }
    assert (axes["dropout"]["tickvals"], axes["dropout"]["ticktext"]) == ([0.0760578], ["0.0760578"])
    assert "tickvals" not in axes["lr"]


def test_a_slice_over_choices_shows_the_trials_outside_the_bounds(small_plotly: None) -> None:
    choices = CategoricalDistribution(["relu", "tanh"])
    trials = [
        trial_of(number, {"kind": kind}, {"kind": choices}, value)
        for number, (kind, value) in enumerate([("relu", 2.0), ("tanh", 1.0), ("relu", 3.0)])
    ]
    for trial, violation in zip(trials, (-1.0, 5.0, -2.0), strict=True):
        trial.system_attrs["constraints:parameters"] = violation
    data = Page(page(report_of(trials, bounds={"parameters": "<= 10"}))).figures["slice-0-0"]["data"]
    assert [(each["customdata"], each["x"], each["y"]) for each in data] == [
        ([0, 2], ["relu", "relu"], [2.0, 3.0]),
        ([1], ["tanh"], [1.0]),
    ]


@pytest.mark.parametrize("values", [(2, "2", "[16]"), ("[16]", "2", 2)])
def test_a_slice_tells_choices_apart_that_look_alike(values: tuple[str | int, ...], small_plotly: None) -> None:
    choices = CategoricalDistribution(values)
    trials = [trial_of(number, {"a": each}, {"a": choices}, 1.0) for number, each in enumerate(values)]
    drawn = Page(page(report_of(trials))).figures["slice-0-0"]
    texts = [{2: "2", "2": "'2'", "[16]": "[16]"}[each] for each in values]
    assert [each["x"] for each in drawn["data"]] == [texts]
    assert drawn["layout"]["xaxis"]["categoryarray"] == texts


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([{"a": "x"}, {"a": "y"}], None),
        ([{"a": "x"}, {"a": None}], None),
        ([{"a": "x", "b": "y"}, {"a": "y"}], "`None` means that a trial does not have the parameter."),
        ([{"a": "x", "b": None}, {"a": "y"}], "`None` means that a trial does not have the parameter."),
        (
            [{"a": "x", "b": "y"}, {"a": None}],
            "`None` means that a trial does not have the parameter; of a it is a choice.",
        ),
    ],
)
def test_lines_say_what_none_means_where_trials_lack_a_parameter(
    values: list[dict[str, str | None]], said: str | None, small_plotly: None
) -> None:
    choices = CategoricalDistribution(["x", "y", None])
    trials = [
        trial_of(number, params, dict.fromkeys(params, choices), number) for number, params in enumerate(values)
    ]
    text = Page(page(report_of(trials))).text
    assert said.replace("`", "") in text if said else "None means" not in text
