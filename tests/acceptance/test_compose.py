"""The containers, as far as that goes without Docker: the files are sound, and their commands do the work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
import sqlalchemy as sa
import typer
import yaml

from hpo.cli.app import app
from tests.support.commands import (
    HELD,
    PATIENCE,
    STUDY,
    epochs_trained,
    hpo,
    ledger_of,
    make_study,
    start_hpo,
    wait_until,
)

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")
AGENTS = ("study", "worker")
HPO_SERVICES = (*AGENTS, "dashboard")


def instructions(name: str) -> list[list[str]]:
    """The Dockerfile's lines of this instruction, as words."""
    joined = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in joined.splitlines()]
    return [words[1:] for words in lines if words and words[0] == name]


def substituted(text: str, env: dict[str, str]) -> str:
    """Replace ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}`` as Compose does."""

    def value(match: re.Match[str]) -> str:
        given = env.get(match["name"])
        if given:
            return given
        assert match["kind"] == "-", f"{match['name']} is required: {match['text']}"
        return match["text"]

    return VARIABLE.sub(value, text)


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services as Compose sees them, with nothing set but the password."""
    text = substituted(COMPOSE.read_text(), {"POSTGRES_PASSWORD": "secret"})
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def test_the_compose_file_fits_the_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_the_compose_file_refers_to_is_there(services: dict[str, dict[str, Any]]) -> None:
    volumes = yaml.safe_load(COMPOSE.read_text())["volumes"]
    assert set(services) == {"db", *HPO_SERVICES}
    for service in services.values():
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in services[other]
        for volume in service["volumes"]:
            if isinstance(volume, str):
                assert volume.partition(":")[0] in volumes
            else:
                assert (ROOT / volume["source"] / "study.yaml").is_file()
        if "build" in service:
            assert (ROOT / service["build"] / "Dockerfile").is_file()


def test_every_variable_is_explained_and_only_the_password_must_be_set() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    variables = list(VARIABLE.finditer(COMPOSE.read_text()))
    assert set(example) == {match["name"] for match in variables}
    for match in variables:
        required = match["name"] == "POSTGRES_PASSWORD"
        assert match["kind"] == ("?" if required else "-")
        assert example[match["name"]] == ("" if required else match["text"])


def test_the_password_stays_out_of_commands_and_the_ports_on_this_machine(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {name: service.get("ports") for name, service in services.items() if "ports" in service} == {
        "dashboard": ["127.0.0.1:8080:8080"]
    }
    for service in services.values():
        assert "secret" not in str(service.get("command"))


@pytest.mark.parametrize("name", HPO_SERVICES)
def test_a_service_calls_a_command_that_exists_on_the_database_that_exists(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    command, *arguments = services[name]["command"]
    context = typer.main.get_command(app).commands[command].make_context(command, arguments)  # type: ignore[attr-defined]
    assert context.params["storage"] is None
    url, database = sa.make_url(services[name]["environment"]["HPO_STORAGE"]), services["db"]["environment"]
    assert url.host == "db"
    assert (url.username, url.database) == (database["POSTGRES_USER"], database["POSTGRES_DB"])
    assert services[name]["environment"]["PGPASSWORD"] == database["POSTGRES_PASSWORD"]
    study = context.params["study"]
    assert study.parent == Path(services[name]["volumes"][0]["target"])


def test_the_dashboards_token_is_the_one_that_is_set() -> None:
    env = {"POSTGRES_PASSWORD": "secret", "DASHBOARD_TOKEN": "chosen"}
    dashboard = yaml.safe_load(substituted(COMPOSE.read_text(), env))["services"]["dashboard"]
    assert (dashboard["environment"]["PGPASSWORD"], dashboard["environment"]["HPO_DASHBOARD_TOKEN"]) == (
        "secret",
        "chosen",
    )
    assert "chosen" not in str(dashboard["command"])


def test_the_image_is_made_of_what_is_there_and_of_the_pinned_versions() -> None:
    copied = [source for *sources, _ in instructions("COPY") for source in sources]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(copied)
    installs = [words for words in instructions("RUN") if words[:2] == ["pip", "install"]]
    assert installs
    assert all("-c constraints.txt" in " ".join(words) for words in installs)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_image_runs_hpo_as_an_ordinary_user() -> None:
    assert instructions("ENTRYPOINT") == [['["hpo"]']]
    users = instructions("USER")
    assert users
    # A number, by which Kubernetes sees that it is not root.
    assert users[-1] == ["1000:1000"]
    # The version that the project asks for, and no other.
    assert instructions("FROM") == [["python:3.11-slim"]]


def test_the_image_has_kubectl_only_where_it_is_asked_for() -> None:
    """The step is a shell's, which does nothing without a version, and names the program's file with one."""
    [words] = [each for each in instructions("RUN") if "KUBECTL_VERSION" in str(each)]
    stand_ins = 'python() { echo "$@"; }; dpkg() { echo amd64; }; chmod() { :; }; '
    script = stand_ins + " ".join(words)
    for version, said in (
        ("", ""),
        ("v1.33.0", "/release/v1.33.0/bin/linux/amd64/kubectl /usr/local/bin/kubectl"),
    ):
        done = subprocess.run(
            ["sh", "-c", script], env={"KUBECTL_VERSION": version}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip().endswith(said)
        assert bool(done.stdout) == bool(version)


# ---- the commands as they stand, on a PostgreSQL server of our own


def here(service: dict[str, Any], folder: Path) -> list[str]:
    """A service's command with the container's folder and port replaced by ours."""
    replaced = {"/study/study.yaml": str(folder / "study.yaml"), "--port=8080": "--port=0"}
    return [replaced.get(word, word) for word in service["command"]]


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """The link of a dashboard that runs meanwhile."""
    process = start_hpo(*command)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        match = re.search(r"http://localhost:\d+/\?token=\S+", line)
        if match is None:
            process.kill()
            raise AssertionError(line + process.communicate()[1])
        yield match[0].replace("localhost", "127.0.0.1")
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def logged_in(link: str) -> Callable[[str], Any]:
    """Gives the JSON at a path of the link's server, without a proxy."""
    cookies = urllib.request.HTTPCookieProcessor()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)
    opener.open(link, timeout=10).close()

    def answered(path: str) -> Any:
        with opener.open(urljoin(link, path), timeout=10) as response:
            return json.load(response)

    return answered


def test_agents_and_the_dashboard_share_one_database(
    services: dict[str, dict[str, Any]], tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STUDY.replace("n_trials: 6", "n_trials: 5").replace("max_epochs: 3", "max_epochs: 2")
    study = make_study(tmp_path, text, HELD)
    monkeypatch.setenv("HPO_STORAGE", postgres_url)
    commands = {name: here(services[name], tmp_path) for name in HPO_SERVICES}
    # Before there is a study they end, and the container's policy starts them anew.
    for name in ("worker", "dashboard"):
        hpo(*commands[name], code=3)
        assert services[name]["restart"] in ("on-failure:10", "unless-stopped")
    agents = [start_hpo(*commands["study"])]
    wait_until(lambda: epochs_trained(study) == [1])
    agents.append(start_hpo(*commands["worker"], "--leave-when-idle=1s"))
    wait_until(lambda: epochs_trained(study) == [1, 1])
    study.with_name("go").touch()
    for process in agents:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    assert {item.name for item in (tmp_path / "runs" / "tiny" / "trials").iterdir()} == set("01234")
    with served(commands["dashboard"]) as link:
        answered = logged_in(link)
        [summary] = answered("/api/studies")["study_summaries"]
        trials = answered(f"/api/studies/{summary['study_id']}")["trials"]
    assert summary["study_name"] == "tiny"
    assert [(trial["number"], trial["state"]) for trial in trials] == [(number, "Complete") for number in range(5)]
    # Two agents on one host are never taken for one.
    attempts = ledger_of(study)
    assert len({each.worker for each in attempts}) == 2
    assert len(list((tmp_path / "runs" / "tiny" / "logs").iterdir())) >= 2
