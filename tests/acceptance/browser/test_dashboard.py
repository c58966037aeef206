"""`hpo dashboard` as people see it: the command, a real browser, and a study with curves, artifacts and a note."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from optuna.trial import TrialState

from hpo.config.spec import load_spec
from hpo.storage.attributes import BEST_ATTR
from hpo.storage.ledger import Owner
from hpo.study.folders import attempt_folder
from hpo.study.note import write_note
from hpo.study.open_study import load_study, start_study
from hpo.trial.artifacts import artifact_folder, artifact_id, keep_artifacts
from tests.support.commands import PATIENCE, make_study, start_hpo
from tests.support.studies import ask

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.support.forked_program import ForkedProgram

TRIALS = 4
#: What Chromium says on its console of an answer that the test asks for.
REFUSED = "Failed to load resource: the server responded with a status of 403"


@dataclass(frozen=True)
class Dashboard:
    """A dashboard that runs.

    Attributes:
        link: What it printed.
        address: Scheme, host and port.
        study: The study file.
        study_id: Optuna's id of the study.
    """

    link: str
    address: str
    study: Path
    study_id: int

    @property
    def home(self) -> str:
        """Address of the study's page."""
        return f"{self.address}/dashboard/studies/{self.study_id}"

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer; to 127.0.0.1, whatever the Host header says."""
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self.address).port or 0, timeout=PATIENCE)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            content = answer.read().decode()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(content) if is_json else content
        finally:
            connection.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of a few trials that ended, with intermediate values, artifacts and a note."""
    file = make_study(tmp_path_factory.mktemp("looked-at"))
    spec = load_spec(file)
    created = start_study(spec)
    write_note(created)
    created.storage.close()
    view = load_study(spec, Owner.current(worker="worker-0"))
    for number in range(TRIALS):
        trial, params = ask(view)
        losses = [1.0 / (epoch + 10 * params["optimizer.lr"]) for epoch in range(1, 9)]
        for epoch, loss in enumerate(losses, 1):
            trial.report(loss, epoch)
        folder = attempt_folder(spec, number, 1)
        (folder / "config.yaml").write_text(f"seed: {number}  # größer\n", encoding="utf-8")
        (folder / "log.txt").write_text("epoch 1 <script>alert(1)</script>\n")
        keep_artifacts(view, trial._trial_id, number, folder)
        metrics = {"val_loss": losses[-1], "val_mae": 0.123456789, "max_grad_norm": 3.0}
        trial.set_user_attr(BEST_ATTR, {"epoch": 8, "metrics": metrics, "checkpoint": "x" * 300})
        state = TrialState.PRUNED if number == 2 else TrialState.COMPLETE
        view.study.tell(trial, None if number == 2 else losses[-1], state=state)
    view.storage.close()
    return file


def started(study: Path, *options: str) -> tuple[Dashboard, ForkedProgram]:
    process = start_hpo("dashboard", study, "--port", 0, *options)
    assert process.stdout is not None
    found = re.match(r"dashboard of tiny: ((http://[^/]+)/\S+)\n", process.stdout.readline())
    if found is None:
        process.kill()
        raise AssertionError(process.communicate()[1])
    return Dashboard(found[1], found[2], study, 1), process


@pytest.fixture(scope="module")
def dashboards(study: Path) -> Iterator[tuple[Dashboard, Dashboard]]:
    """One on every interface, so with a token; a read-only one on this machine's own."""
    options = (["--host", "0.0.0.0", "--allow-host", "localhost"], ["--read-only"])
    with ThreadPoolExecutor() as pool:
        running = list(pool.map(lambda given: started(study, *given), options))
    yield running[0][0], running[1][0]
    for _, process in running:
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in errors


@pytest.fixture
def guarded(dashboards: tuple[Dashboard, Dashboard]) -> Dashboard:
    return dashboards[0]


@pytest.fixture
def read_only(dashboards: tuple[Dashboard, Dashboard]) -> Dashboard:
    return dashboards[1]


def test_a_wrong_token_is_refused_and_the_right_one_leads_to_the_page_asked_for(
    page: Page, guarded: Dashboard, console_errors: list[str]
) -> None:
    page.goto(f"{guarded.home}/trials")
    assert urlsplit(page.url).path == "/login"
    page.get_by_label("Token").fill("not-the-token")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").wait_for()
    assert page.get_by_role("alert").inner_text() == "This is not the token."
    token = guarded.link.partition("token=")[2]
    assert token not in page.content()
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{guarded.home}/trials")
    page.get_by_text(f"{TRIALS} Trials").wait_for()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert token not in cookie["value"]
    assert [REFUSED in error for error in console_errors] == [True]


def test_the_login_page_fits_a_phone_and_follows_dark_mode(
    page: Page, guarded: Dashboard, console_errors: list[str]
) -> None:
    page.set_viewport_size({"width": 320, "height": 560})
    page.emulate_media(color_scheme="dark")
    page.goto(guarded.home)
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    label = page.get_by_text("Token", exact=True)
    assert label.evaluate("each => getComputedStyle(each).color") == "rgb(255, 255, 255)"
    assert console_errors == []


def test_the_printed_link_logs_in_and_leaves_no_token_in_the_address(
    page: Page, guarded: Dashboard, console_errors: list[str]
) -> None:
    page.goto(guarded.link)
    page.wait_for_url(guarded.home)
    curves = page.locator("#plot-intermediate-values, [id*=intermediate]").locator(
        "svg.main-svg .scatterlayer .trace"
    )
    curves.first.wait_for()
    assert curves.count() == TRIALS
    page.goto(f"{guarded.address}/logout")
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto(guarded.home)
    assert urlsplit(page.url).path == "/login"
    assert console_errors == []


def test_a_trials_page_lists_its_values_and_artifacts_and_they_open(
    page: Page, read_only: Dashboard, console_errors: list[str]
) -> None:
    page.goto(f"{read_only.home}/trials?numbers=1")
    page.get_by_text("config.yaml").wait_for()
    page.get_by_text("log.txt").wait_for()
    page.get_by_text("Intermediate Values").wait_for()
    folder = f"{read_only.address}/artifacts/{read_only.study_id}/2/"
    page.goto(folder + artifact_id("tiny", 1, "config.yaml"))
    assert page.inner_text("body") == "seed: 1  # größer\n"
    page.goto(folder + artifact_id("tiny", 1, "log.txt"))
    assert "<script>alert(1)</script>" in page.inner_text("body")
    assert console_errors == []


def test_axes_have_the_metrics_name_and_a_trial_its_metrics(
    page: Page, read_only: Dashboard, console_errors: list[str]
) -> None:
    page.goto(read_only.home)
    page.locator(".ytitle", has_text="val_loss").first.wait_for()
    text = page.inner_text("body")
    assert "Objective 0" not in text
    assert "hpo:" not in text
    page.goto(f"{read_only.home}/trials?numbers=1")
    page.get_by_text("0.123457").wait_for()
    text = page.inner_text("body")
    for hidden in ("hpo:", "max_grad_norm", "xxx"):
        assert hidden not in text
    assert console_errors == []


def test_it_fits_a_phone(page: Page, read_only: Dashboard, console_errors: list[str]) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path, seen in (("", "Best Trial"), ("/trials?numbers=1", "0.123457")):
        page.goto(read_only.home + path)
        page.get_by_text(seen).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert console_errors == []


def test_an_artifact_whose_file_is_elsewhere_is_not_found(read_only: Dashboard) -> None:
    name = artifact_id("tiny", 3, "log.txt")
    (artifact_folder(load_spec(read_only.study)) / name).unlink()
    status, text = read_only.request("GET", f"/artifacts/1/4/{name}")
    assert status == 404
    assert "isn't on this machine" in text


def test_the_note_shows_the_study_file_and_the_environment(
    page: Page, read_only: Dashboard, console_errors: list[str]
) -> None:
    page.goto(f"{read_only.home}/note")
    page.get_by_role("heading", name="Environment").wait_for()
    text = page.inner_text("body")
    assert "_target_: torch.optim.AdamW" in text
    assert "optuna: 5." in text
    assert console_errors == []


def test_a_change_is_refused_where_it_is_read_only_and_the_page_says_so(
    page: Page, read_only: Dashboard, console_errors: list[str]
) -> None:
    before = read_only.request("GET", "/api/studies/1?after=0")
    page.goto(f"{read_only.home}/note")
    page.get_by_role("heading", name="Environment").wait_for()
    page.get_by_test_id("EditIcon").first.click()
    page.locator("textarea").first.fill("changed")
    page.get_by_role("button", name="Save").first.click()
    page.get_by_text("--read-only").first.wait_for()
    assert [REFUSED in error or "--read-only" in error for error in console_errors] == [True, True]
    for method, path, body in (
        ("DELETE", "/api/studies/1", {}),
        ("POST", "/api/studies", {"study_name": "new", "directions": ["minimize"]}),
        ("PUT", "/api/studies/1/note", {"version": 2, "body": "changed"}),
        ("POST", "/api/trials/1/tell", {"state": "Fail"}),
    ):
        status, answer = read_only.request(method, path, body)
        assert (status, "--read-only" in answer["reason"]) == (403, True)
    assert read_only.request("GET", "/api/studies/1?after=0") == before
    assert len(read_only.request("GET", "/api/studies")[1]["study_summaries"]) == 1


def test_a_wrong_host_is_refused(guarded: Dashboard, read_only: Dashboard) -> None:
    for dashboard in (guarded, read_only):
        status, text = dashboard.request("GET", "/api/studies", Host="evil.example")
        assert (status, "--allow-host" in text) == (421, True)
    assert guarded.request("GET", "/api/studies")[0] == 401
    assert read_only.request("GET", "/api/studies")[0] == 200


def test_a_foreign_pages_write_is_refused_and_the_dashboards_own_is_stored(
    page: Page, guarded: Dashboard, read_only: Dashboard
) -> None:
    evil = f'<form method="post" action="{guarded.address}/api/studies"><button>Win a prize</button></form>'
    page.route("http://evil.example/", lambda route: route.fulfill(body=evil, content_type="text/html"))
    page.goto(guarded.link)
    page.wait_for_url(guarded.home, wait_until="commit")
    page.goto("http://evil.example/")
    with page.expect_response(f"{guarded.address}/api/studies") as refused:
        page.get_by_role("button", name="Win a prize").click()
    assert refused.value.status == 403
    page.get_by_text("another site").wait_for()
    page.goto(guarded.home)
    create = """async name => (await fetch("/api/studies", {
        method: "POST", headers: {"Content-Type": "application/json"},
        body: JSON.stringify({study_name: name, directions: ["minimize"]})})).status"""
    assert page.evaluate(create, "own") == 201
    names = [each["study_name"] for each in read_only.request("GET", "/api/studies")[1]["study_summaries"]]
    assert sorted(names) == ["own", "tiny"]
