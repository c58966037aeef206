"""What `--dry-run` prints for Ray: Python scripts that submit agents, or a driver, as jobs of Ray's."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hpo.execution.engines.by_name import Address
from hpo.execution.engines.engine import AgentOrder, Resources

#: Environment variable of a job of Ray's that says as JSON how the job was submitted.
_JOB_CONFIG: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: Processor cores of an agent if the study file does not say how many.
_ONE_CORE: Final = 1.0
_EACH_NODE: Final = """\
nodes = [node for node in list_nodes({address!r}) if node.state == "ALIVE" and node.resources_total.get("CPU")]
for node in nodes[:{count}]:
    job = client.submit_job(
        entrypoint={entrypoint!r},
        entrypoint_num_cpus=node.resources_total["CPU"],
        entrypoint_num_gpus=node.resources_total.get("GPU", 0),
        entrypoint_resources={{f"node:{{node.node_ip}}": 0.001}},{more}
    )
    print(job)
"""
_ANYWHERE: Final = """\
for _ in range({count}):
    print(client.submit_job(entrypoint={entrypoint!r},{more}
    ))
"""


def by_node(address: Address, resources: Resources) -> bool:
    """Whether each agent gets a whole node."""
    return "per" in address.options or resources == Resources()


def ray_resources(resources: Resources) -> dict[str, float]:
    """An agent's resources by Ray's names for those of an actor; one core if no number of cores is given."""
    found: dict[str, float] = {"num_cpus": _ONE_CORE if resources.cpu is None else resources.cpu}
    if resources.gpu:
        found["num_gpus"] = resources.gpu
    if resources.memory is not None:
        found["memory"] = resources.memory
    return found


def arguments_there(address: Address, order: AgentOrder, arguments: Sequence[str]) -> list[str]:
    """Arguments after ``hpo`` as a node needs them: a shipped study has another path there, its output has not."""
    if "ship" not in address.options:
        return list(arguments)
    there = [order.study.name if each == str(order.study) else each for each in arguments]
    return there if "--output-dir" in there else [*there, "--output-dir", str(order.logs.parent)]


def agents_script(address: Address, order: AgentOrder, count: int) -> str:
    """A Python script that submits agents, which need no driver."""
    entrypoint = _entrypoint(address, order, order.command("hpo")[1:])
    whole = by_node(address, order.resources)
    needs = {} if whole else {f"entrypoint_{key}": value for key, value in ray_resources(order.resources).items()}
    body = _EACH_NODE if whole else _ANYWHERE
    return "\n".join(
        [
            f"# {count} agents of the study {order.name}, each a job of Ray's. The study must have been started:",
            "# they join it, and leave when nothing is left to be done. `hpo stop` ends them.",
            *_head(address, order, more=["from ray.util.state import list_nodes"] if whole else []),
            body.format(
                address=_job_address(address),
                count=count,
                entrypoint=entrypoint,
                more=_more(needs | _shipped(address, order)),
            ),
        ]
    )


def driver_script(address: Address, order: AgentOrder, command: Sequence[str]) -> str:
    """A Python script that submits a driver, which places agents from inside the cluster."""
    entrypoint = _entrypoint(address, order, command)
    return "\n".join(
        [
            f"# A driver of the study {order.name} as a job of Ray's; `ray job logs` shows what it prints.",
            *_head(address, order),
            _ANYWHERE.format(count=1, entrypoint=entrypoint, more=_more(_shipped(address, order))),
        ]
    )


def _entrypoint(address: Address, order: AgentOrder, arguments: Sequence[str]) -> str:
    return f"{shlex.join(['hpo', *arguments_there(address, order, arguments)])} </dev/null"


def _head(address: Address, order: AgentOrder, more: Sequence[str] = ()) -> list[str]:
    lines = ["# Needed: pip install 'ray[default]' here; hpo and the study's output folder on every node."]
    if order.environment:
        lines.append(
            f"# These variables reach jobs where they are set before `ray start`: {' '.join(order.environment)}"
        )
    imports = ["from ray.job_submission import JobSubmissionClient", *more]
    return [*lines, *imports, "", f"client = JobSubmissionClient({_job_address(address)!r})"]


def _job_address(address: Address) -> str:
    return "auto" if address.place == "local" else address.place


def runtime_env(address: Address, order: AgentOrder) -> dict[str, Any]:
    """Ray's runtime environment for everything that is placed: with ``ship=study``, the study's folder.

    Files that no agent needs are excluded. Inside a job that has a working directory already, that one goes to
    everything the job places, and Ray accepts no second one.
    """
    if "ship" not in address.options or order.study.parent == _folder_of_this_job():
        return {}
    folder, output = order.study.parent, order.logs.parent
    excludes = [".git", "__pycache__", ".venv"]
    if output != folder and output.is_relative_to(folder):
        excludes.append(f"/{output.relative_to(folder)}")
    return {"working_dir": str(folder), "excludes": excludes}


def _folder_of_this_job() -> Path | None:
    """The working directory that Ray has brought here, if this is a job that has one."""
    config = json.loads(os.environ.get(_JOB_CONFIG) or "{}")
    return Path.cwd() if config.get("runtime_env", {}).get("working_dir") else None


def _shipped(address: Address, order: AgentOrder) -> dict[str, Any]:
    environment = runtime_env(address, order)
    return {"runtime_env": environment} if environment else {}


def _more(settings: Mapping[str, Any]) -> str:
    return "".join(f"\n        {key}={value!r}," for key, value in settings.items())
