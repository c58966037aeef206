"""The report of a large study holds a sample of its trials, says so, and is right about the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from optuna.trial import create_trial

from hpo.config.spec import load_spec
from hpo.report.data import study_report
from hpo.report.page import page
from hpo.report.sections import history_section
from hpo.study.open_study import load_study
from tests.support.big_study import make_big_study
from tests.support.reports import report_of
from tests.unit.report.test_report import Page

pytestmark = pytest.mark.full

TRIALS, MOST = 400, 60


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred trials are a large study here, and the pages have no library in them."""
    for name in ("data", "sections", "internal_sections"):
        monkeypatch.setattr(f"hpo.report.{name}.MOST_TRIALS", MOST)
    monkeypatch.setattr("hpo.report.page.get_plotlyjs", lambda: "const Plotly = {};")


def test_a_large_study_is_sampled_and_the_page_says_so(tmp_path: Path) -> None:
    with load_study(load_spec(make_big_study(tmp_path, TRIALS, epochs=5))) as opened:
        report = study_report(opened)
    text = page(report)
    assert len(re.findall('aria-label="compare trial', text)) == MOST
    for said in (
        f"Of {TRIALS} trials {MOST} are listed: the best, and an even sample of the others.",
        f"Of {TRIALS} curves 300 are drawn",
        f"Of {TRIALS} attempts the latest {MOST} are drawn.",
    ):
        assert said in text
    found = Page(text)
    assert sum(len(trace["customdata"]) for trace in found.figures["timeline"]["data"]) == MOST
    # Whatever the sample, the line of the best value so far is that of all trials.
    line = next(trace for trace in found.figures["history-0"]["data"] if trace["name"] == "best so far")
    least, so_far = float("inf"), []
    for trial in report.complete:
        least = min(least, trial.value or least)
        so_far.append((trial.number, least))
    drawn = dict(zip(line["x"], line["y"], strict=True))
    assert MOST <= len(report.complete_sample) < len(report.complete)
    assert all(drawn[number] == value for number, value in so_far if number <= max(drawn))


def test_a_small_study_is_shown_whole(tmp_path: Path) -> None:
    with load_study(load_spec(make_big_study(tmp_path, MOST, epochs=5))) as opened:
        report = study_report(opened)
    assert report.sample == report.trials
    assert report.complete_sample == report.complete
    assert "even sample" not in page(report)


def test_of_a_large_pareto_front_some_trials_are_listed() -> None:
    trials = [create_trial(values=[float(number), float(-number)]) for number in range(TRIALS)]
    for number, trial in enumerate(trials):
        trial.number = number
    report = report_of(trials, goals={"a": "minimize", "b": "minimize"})
    assert len(report.best) == TRIALS
    content = str(history_section(report).content)
    listed = re.findall(r'<tr><td class="number">(\d+)</td>', content)
    assert (len(listed), listed[0]) == (MOST, "0")
    assert f"Of {TRIALS} trials on the front {MOST} are listed, an even sample." in content
