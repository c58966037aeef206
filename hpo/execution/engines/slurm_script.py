"""Builds the scripts that Slurm runs: for agents, as an array, and for a driver. They need no running driver."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from hpo.config.spec import STORAGE_ENV
from hpo.errors import InputError
from hpo.execution.engines.engine import LEFT_EARLY, PLACEMENT_ENV, AgentOrder, Resources, driver_command
from hpo.execution.engines.slurm_commands import SBATCH
from hpo.execution.engines.slurm_settings import OF_AGENTS, Settings

#: Begins the id of a placement, before the job's id; the agent finds the whole id in its environment.
PREFIX: Final = "slurm:"
_MEBIBYTE: Final = 2**20


def job_name(order: AgentOrder) -> str:
    """The name of the jobs of a study's agents: readable, and different for each study."""
    return f"hpo-{re.sub(r'[^A-Za-z0-9.-]+', '-', order.name)[:40]}-{order.key}"


def log_file(order: AgentOrder, job: str) -> Path:
    """The file with what a job prints."""
    return order.logs / f"agent-{job}.log"


def agents_script(order: AgentOrder, settings: Settings, count: int) -> str:
    """The script of an array of agents."""
    head = [
        f"# {count} agents of the study {order.name}, which has been started (hpo run, hpo submit).",
        f"# By hand: mkdir -p {shlex.quote(str(order.logs))}; sbatch THIS_FILE",
    ]
    output = _pattern(order.logs / "agent-%A_%a.log")
    options = [
        ("job-name", job_name(order)),
        ("array", f"0-{count - 1}"),
        *_options(settings, "USR1"),
        *_resources(order.resources, settings),
        ("output", output),
        ("chdir", str(order.study.parent)),
    ]
    # The id of one of the array's tasks is also that of the array: requeuing that id would requeue all tasks.
    job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    before = [*_needed(order), f'export {PLACEMENT_ENV}="{PREFIX}{job}"']
    return _script(head, options, before, order.command(), job)


def driver_script(command: Sequence[str], order: AgentOrder, settings: Settings) -> str:
    """The script of a driver."""
    head = [
        f"# The driver of the study {order.name}: it has agents placed, and replaces those that are lost.",
        f"# By hand: mkdir -p {shlex.quote(str(order.logs))}; sbatch THIS_FILE",
    ]
    options = [
        ("job-name", f"{job_name(order)}-driver"),
        *((key, value) for key, value in _options(settings, "TERM") if key not in OF_AGENTS),
        ("output", _pattern(order.logs / "driver-%j.log")),
        ("chdir", str(order.study.parent)),
    ]
    return _script(head, options, _needed(order), driver_command(command), "$SLURM_JOB_ID")


def _options(settings: Settings, warning: str) -> list[tuple[str, str]]:
    time = [] if settings.time is None else [("time", _clock(settings.time))]
    return [
        *settings.options.items(),
        ("nodes", "1"),
        ("ntasks", "1"),
        *time,
        ("signal", f"{warning}@{settings.grace}"),
        ("requeue", ""),
        ("open-mode", "append"),
    ]


def _resources(resources: Resources, settings: Settings) -> list[tuple[str, str]]:
    options = []
    if resources.cpu is not None:
        options.append(("cpus-per-task", str(math.ceil(resources.cpu))))
    if resources.memory is not None:
        options.append(("mem", f"{math.ceil(resources.memory / _MEBIBYTE)}M"))
    if resources.gpu and "gres" not in settings.options:
        options.append(("gres", f"gpu:{math.ceil(resources.gpu)}"))
    return options


def _needed(order: AgentOrder) -> list[str]:
    """Script lines about variables that must come from sbatch's environment; without a needed URL the job ends."""
    lines = [f"# From the environment of sbatch: {', '.join(order.environment)}."] if order.environment else []
    if STORAGE_ENV in order.environment:
        lines.append(f': "${{{STORAGE_ENV}?set it in the environment of sbatch}}"')
    return lines


def _script(
    head: Iterable[str],
    options: Iterable[tuple[str, str]],
    before: Iterable[str],
    command: Sequence[str],
    job: str,
) -> str:
    """A script that runs one command.

    srun makes the command a step, because Slurm warns only steps of a time limit or a preemption. The command's
    standard input is /dev/null, because srun would give it a pipe that closes.
    """
    lines = [
        "#!/bin/bash",
        *head,
        *(f"{SBATCH}--{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in options),
        "",
        *before,
        'srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --mpi=none --input=none \\',
        f"  sh -c 'exec \"$@\" </dev/null' sh {shlex.join(command)}",
        "code=$?",
        f"# {LEFT_EARLY}: warned of the time limit or a preemption, it leaves its work to its next start.",
        f'if [ "$code" -eq {LEFT_EARLY} ]; then',
        f'  scontrol requeue "{job}"',
        "fi",
        'exit "$code"',
        "",
    ]
    return "\n".join(lines)


def _pattern(path: Path) -> str:
    """A path as a file name pattern for Slurm: ``%`` in the folder is escaped, fields in the name are kept.

    Raises:
        InputError: The folder has a backslash, which turns off all fields in Slurm's patterns.
    """
    if "\\" in str(path.parent):
        fix = "give a folder without one by `--output-dir`"
        raise InputError(
            "Slurm writes into no folder with a backslash", path="run.output_dir", value=str(path.parent), fix=fix
        )
    return f"{str(path.parent).replace('%', '%%')}/{path.name}"


def _clock(seconds: int) -> str:
    """Seconds in Slurm's form HOURS:MINUTES:SECONDS."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
