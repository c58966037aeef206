"""`hpo submit`."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli.options import (
    Agents,
    Debug,
    Devices,
    DryRun,
    On,
    OutputDir,
    Overrides,
    Storage,
    StudyFile,
    Workers,
    read_spec,
)
from hpo.console.output import read_by_others
from hpo.errors import InputError


def submit(
    study: StudyFile,
    overrides: Overrides = None,
    on: On = None,
    agents: Agents = None,
    workers: Workers = None,
    n_trials: Annotated[
        int | None, typer.Option(min=1, help="Trials to finish in all, earlier runs included.", show_default=False)
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="2h", help="Time limit, counted from the first start of the job.", show_default=False
        ),
    ] = None,
    devices: Devices = None,
    dry_run: DryRun = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Submit `hpo run --on` itself as a job of the engine, so that no terminal has to stay open.

    The job places the agents. `hpo status --watch` shows the progress; `hpo stop` asks the agents to leave.

    Example: hpo submit study.yaml --on slurm:partition=gpu,time=4h --agents 4
    """
    del debug
    options = {"workers": workers, "n_trials": n_trials, "timeout": timeout, "devices": devices}
    places = {"storage": storage, "output_dir": output_dir, "on": on, "agents": agents}
    spec = read_spec(study, overrides, require_search_space=True, **options, **places)
    if spec.run.on is None:
        raise InputError("no engine is given", path="--on", fix="give one, such as `--on slurm:partition=gpu`")
    from hpo.execution.placing import placing_of, submit

    placed = submit(placing_of(spec, overrides or ()), dry_run=dry_run)
    with read_by_others():
        print(placed, end="" if dry_run else "\n")
