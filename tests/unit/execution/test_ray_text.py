"""What is made of `--on ray…`: engines, what Ray is asked for, and scripts that submit jobs."""

from __future__ import annotations

import ast
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import InputError
from hpo.execution.engines import engine
from hpo.execution.engines.by_name import address_of, engine_of
from hpo.execution.engines.engine import AgentOrder, Placement, Resources, Waits
from hpo.execution.engines.ray_engine import _NOT_STARTED, RayEngine, _Agent, _cause
from hpo.execution.engines.ray_jobs import ray_resources, runtime_env

ORDER = AgentOrder(
    Path("/home/me/my study/study.yaml"),
    "digits, 'small'",
    Path("/home/me/my study/runs/digits/logs"),
    arguments=("--output-dir", "/home/me/my study/runs/digits", "model.name=it's $HOME"),
    workers=2,
    resources=Resources(gpu=1, cpu=3.5, memory=2**30),
    environment=("HPO_STORAGE",),
)


def jobs_of(script: str) -> list[dict[str, Any]]:
    """What a script submits: it is run, with a stand-in for Ray."""
    jobs: list[dict[str, Any]] = []

    class Client:
        def __init__(self, address: str) -> None:
            self._address = address

        def submit_job(self, **settings: Any) -> str:
            jobs.append({"address": self._address, **settings})
            return "raysubmit_1"

    class Node:
        state = "ALIVE"
        node_ip = "10.0.0.1"
        resources_total = {"CPU": 8.0, "GPU": 2.0}  # noqa: RUF012

    tree = ast.parse(script)
    tree.body = [line for line in tree.body if not isinstance(line, ast.ImportFrom)]
    names = {"JobSubmissionClient": Client, "list_nodes": lambda _: [Node, Node, Node]}
    exec(compile(tree, "script", "exec"), names)
    return jobs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ray:10.0.0.1:6379", "--on: there is no place '10.0.0.1:6379' of Ray"),
        ("ray", "--on: there is no place '' of Ray"),
        ("ray:auto,per=core", "--on ray: per: is 'core'\n  value: ray:auto,per=core\n  fix: write `per=node`"),
        ("ray:auto,ship=no", "--on ray: ship: is 'no'"),
        ("ray:auto,nodes=3", "--on: the engine `ray` has no key 'nodes'"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        engine_of(address_of(text))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("resources", "found"),
    [
        (Resources(cpu=2), {"num_cpus": 2}),
        (Resources(gpu=0.5), {"num_cpus": 1.0, "num_gpus": 0.5}),
        (Resources(gpu=0, memory=5), {"num_cpus": 1.0, "memory": 5}),
    ],
)
def test_resources_have_other_names_at_ray(resources: Resources, found: dict[str, float]) -> None:
    assert ray_resources(resources) == found


@pytest.mark.parametrize("text", ["ray://head:10001", "ray:auto", "ray:local"])
def test_the_script_submits_each_agent_as_a_job(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = engine_of(address_of(text)).script(ORDER, 3)
    jobs = jobs_of(script)
    assert len(jobs) == 3
    assert jobs[0]["address"] == {"ray:local": "auto", "ray:auto": "auto"}.get(text, text)
    assert (jobs[0]["entrypoint_num_cpus"], jobs[0]["entrypoint_num_gpus"]) == (3.5, 1)
    assert jobs[0]["entrypoint_memory"] == 2**30
    entrypoint = shlex.split(jobs[0]["entrypoint"])
    assert entrypoint == ["hpo", *ORDER.command("hpo")[1:], "</dev/null"]
    assert "before `ray start`: HPO_STORAGE" in script
    assert capsys.readouterr().out == "raysubmit_1\n" * 3


@pytest.mark.parametrize("order", [ORDER, replace(ORDER, resources=Resources())], ids=["per node", "no resources"])
def test_agents_get_whole_nodes(order: AgentOrder) -> None:
    text = "ray:auto,per=node" if order is ORDER else "ray:auto"
    jobs = jobs_of(engine_of(address_of(text)).script(order, 2))
    assert len(jobs) == 2
    assert jobs[0]["entrypoint_num_cpus"] == 8.0
    assert jobs[0]["entrypoint_resources"] == {"node:10.0.0.1": 0.001}


def test_a_study_that_is_shipped_takes_no_results_with_it() -> None:
    address = address_of("ray:auto,ship=study")
    environment = runtime_env(address, ORDER)
    assert environment["working_dir"] == "/home/me/my study"
    assert "/runs/digits" in environment["excludes"]
    elsewhere = replace(ORDER, logs=Path("/shared/digits/logs"))
    assert len(runtime_env(address, elsewhere)["excludes"]) == len(environment["excludes"]) - 1
    (job,) = jobs_of(engine_of(address).script(ORDER, 1))
    assert job["runtime_env"] == environment
    assert shlex.split(job["entrypoint"])[:3] == ["hpo", "worker", "study.yaml"]
    bare = replace(ORDER, arguments=())
    (job,) = jobs_of(engine_of(address).driver_script(["run", str(bare.study)], bare))
    assert shlex.split(job["entrypoint"])[1:5] == [
        "run",
        "study.yaml",
        "--output-dir",
        "/home/me/my study/runs/digits",
    ]


def test_a_job_that_has_the_study_in_its_working_directory_ships_it_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, order = address_of("ray:auto,ship=study"), replace(ORDER, study=tmp_path / "study.yaml")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "gcs://package.zip"}}')
    assert runtime_env(address, order)["working_dir"] == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert runtime_env(address, order) == {}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {}}')
    assert runtime_env(address, order)["working_dir"] == str(tmp_path)


def test_memory_of_the_drivers_machine_is_no_cause_of_an_agents_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "vmstat"
    kernel.write_text("oom_kill 3\n")
    monkeypatch.setattr("hpo.execution.limits._VMSTAT", kernel)
    assert _cause(-9) == "the agent was killed by SIGKILL"
    assert (_cause(0), _cause(75), _cause(1)) == (
        "it has left",
        "it was asked to leave",
        "the agent ended with exit code 1",
    )


def test_the_script_of_a_driver_asks_for_nothing_that_agents_need() -> None:
    (job,) = jobs_of(engine_of(address_of("ray:auto")).driver_script(["run", "my study.yaml"], ORDER))
    assert job == {"address": "auto", "entrypoint": "hpo run 'my study.yaml' </dev/null"}


def test_that_an_agent_has_not_started_for_long_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_engine, placement = RayEngine(address_of("ray:auto")), Placement("ray:one")
    starting = _Agent(ORDER, actor=object(), starting=object())
    assert ray_engine._change(None, placement, starting, []) is None
    monkeypatch.setattr(engine, "LONG_WAIT", 0.0)
    assert ray_engine._change(None, placement, starting, []) == Waits(placement, _NOT_STARTED)
    assert ray_engine._change(None, placement, starting, []) is None
    runs = _Agent(ORDER, actor=object(), ending=object(), host="far")
    assert ray_engine._change(None, placement, runs, []) is None
