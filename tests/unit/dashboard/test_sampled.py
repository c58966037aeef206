"""A large study's page gets some of its trials; a small one's, a download and a copy get all of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from hpo.config.spec import load_spec
from hpo.dashboard.sampled import SampledStorage, _chosen
from hpo.dashboard.serve import dashboard
from hpo.storage.attributes import CONSTRAINT_ATTR, PAUSED_ATTR
from hpo.study.open_study import OpenStudy, load_study
from tests.support.big_study import make_big_study

TRIALS, MOST = 300, 80


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred trials are a large study here."""
    monkeypatch.setattr("hpo.dashboard.sampled.MOST_TRIALS", MOST)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenStudy]:
    with load_study(load_spec(make_big_study(tmp_path_factory.mktemp("large"), TRIALS, epochs=40))) as opened:
        yield opened


def get(opened: OpenStudy, path: str, page: str = "") -> bytes:
    """What the dashboard answers to a page of this address."""
    said: list[str] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "", "HTTP_HOST": "here"}
    environ |= {"SERVER_NAME": "here", "SERVER_PORT": "80", "HTTP_REFERER": page}
    given: dict[str, Any] = {"wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "wsgi.url_scheme": "http"}
    body = b"".join(dashboard(opened)(environ | given, lambda status, *_: said.append(status)))
    assert said == ["200 OK"]
    return body


def test_the_page_of_a_large_study_gets_its_best_latest_and_some_other_trials(large: OpenStudy) -> None:
    detail = json.loads(get(large, f"/api/studies/{large.study_id}"))
    shown = {trial["number"]: trial for trial in detail["trials"]}
    assert len(detail["trials"]) == len(shown) == MOST
    assert detail["user_attrs"][0]["value"].startswith(f"{MOST} of {TRIALS}: ")
    trials = large.study.get_trials(deepcopy=False)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    ranked = [trial.number for trial in sorted(complete, key=lambda trial: trial.value or 0.0)]
    assert detail["best_trials"][0]["number"] == ranked[0]
    assert {*ranked[: MOST // 4], *range(TRIALS - MOST // 4, TRIALS)} <= shown.keys()
    for number, trial in shown.items():
        steps = [point["step"] for point in trial["intermediate_values"]]
        assert len(steps) <= 16
        assert steps[-1] == trials[number].last_step
    # The first of them by number are not all that is shown of the rest.
    others = sorted(shown.keys() - set(ranked[: MOST // 4]) - set(range(TRIALS - MOST // 4, TRIALS)))
    assert others[-1] > TRIALS // 2


def test_the_best_that_are_shown_are_within_the_bounds() -> None:
    bounds = {f"{CONSTRAINT_ATTR}parameters": 1.0}  # above its bound
    trials = [
        create_trial(value=float(place), system_attrs=bounds if place < 200 else {}) for place in range(TRIALS)
    ]
    for number, trial in enumerate(trials):
        trial.number = trial._trial_id = number
    shown = _chosen(trials, [StudyDirection.MINIMIZE], ())
    assert {*range(200, 200 + MOST // 4)} <= shown


@pytest.mark.parametrize("most", [TrialState.RUNNING, TrialState.WAITING], ids=["paused", "waiting"])
def test_of_a_study_that_is_paused_or_waits_for_the_most_part_as_many_are_shown(most: TrialState) -> None:
    """And those that train, whatever their numbers: they were paused before, or queued, and have been taken."""
    paused = {PAUSED_ATTR: 3} if most == TrialState.RUNNING else {}
    trials = [create_trial(state=most, user_attrs=paused) for _ in range(TRIALS)]
    for number, trial in enumerate(trials):
        trial.number = trial._trial_id = number
    trials[7].state, trials[7].user_attrs = TrialState.RUNNING, {}
    shown = _chosen(trials, [StudyDirection.MINIMIZE], ())
    assert len(shown) == MOST
    assert {7, *range(TRIALS - MOST // 4 + 1, TRIALS)} <= shown


def test_a_trial_that_is_opened_has_its_whole_curve(large: OpenStudy) -> None:
    plain = {trial.number for trial in SampledStorage(large.storage).get_all_trials(large.study_id)}
    wanted = next(
        trial.number
        for trial in large.study.get_trials(deepcopy=False)
        if trial.number not in plain and trial.last_step == 40
    )
    page = f"http://here/dashboard/studies/{large.study_id}/trials?numbers={wanted},x,-1"
    detail = json.loads(get(large, f"/api/studies/{large.study_id}", page))
    curves = {trial["number"]: len(trial["intermediate_values"]) for trial in detail["trials"]}
    assert curves.pop(wanted) == 40
    assert max(curves.values()) == 16


def test_a_table_to_download_has_all_trials(large: OpenStudy) -> None:
    text = get(large, f"/csv/{large.study_id}").decode()
    assert len(list(csv.reader(io.StringIO(text)))) == 1 + TRIALS


def test_what_has_not_ended_comes_first(tmp_path: Path) -> None:
    """So the page asks for the whole sample again as long as trials run: it may change."""
    with load_study(load_spec(make_big_study(tmp_path, TRIALS, epochs=5))) as opened:
        opened.study.enqueue_trial({})
        trials = SampledStorage(opened.storage).get_all_trials(opened.study_id)
        first, *others = [trial.number for trial in trials]
        assert first == TRIALS
        assert others == sorted(others)


def test_a_small_study_is_shown_whole(tmp_path: Path) -> None:
    with load_study(load_spec(make_big_study(tmp_path, MOST, epochs=20))) as opened:
        detail = json.loads(get(opened, f"/api/studies/{opened.study_id}"))
    assert [trial["number"] for trial in detail["trials"]] == list(range(MOST))
    assert max(len(trial["intermediate_values"]) for trial in detail["trials"]) == 20
    assert detail["user_attrs"] == []
