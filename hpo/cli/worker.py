"""`hpo worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import (
    Debug,
    Devices,
    Events,
    OutputDir,
    Overrides,
    Quiet,
    Storage,
    StudyFile,
    Workers,
    read_spec,
    refuse_both,
)
from hpo.cli.run import listening, warn
from hpo.console.output import read_by_others
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.config.spec import StudySpec

_Idle = Annotated[
    str, typer.Option("--leave-when-idle", metavar="60s", help="Leave after this time without a trial to take.")
]
# For drivers only, so it is not shown in the help.
_StopSeen = Annotated[str | None, typer.Option("--stop-seen", hidden=True)]


def worker(
    study: StudyFile,
    overrides: Overrides = None,
    workers: Workers = None,
    leave_when_idle: _Idle = "60s",
    stop_seen: _StopSeen = None,
    storage: Storage = None,
    devices: Devices = None,
    output_dir: OutputDir = None,
    quiet: Quiet = False,
    json_: Events = False,
    debug: Debug = False,
) -> None:
    """Let this machine join a study that `hpo run` has started; leave when there is nothing to do.

    Any number of agents on any number of machines can work on one study. An agent leaves after `hpo stop`,
    SIGTERM, SIGUSR1 or SIGHUP, and when the pipe on its standard input closes; its trials are requeued with their
    checkpoints. Exit code 0: it has left as planned; 75: a signal asked it to leave, so start it again.

    Example: hpo worker study.yaml --workers 4 --leave-when-idle 5m
    """
    del debug
    refuse_both(quiet=quiet, json_=json_)
    idle = _seconds(leave_when_idle)
    spec = read_spec(
        study,
        overrides,
        require_search_space=True,
        workers=workers,
        devices=devices,
        storage=storage,
        output_dir=output_dir,
    )
    ending = _join(spec, idle, stop_seen, quiet=quiet, json_=json_)
    if not (quiet or json_):
        with read_by_others():
            print(f"left the study {spec.study.name}: {_WHY[ending]}")
    if ending == "interrupted":
        from hpo.execution.engines.engine import LEFT_EARLY

        raise typer.Exit(LEFT_EARLY)


#: Texts on why an agent has left, by its ending.
_WHY = {
    "done": "all its trials have ended",
    "goal": "it has reached its goal",
    "timeout": "the time limit of this run is over",
    "stopped": "`hpo stop`",
    "idle": "there was nothing to do",
    "interrupted": "asked by a signal",
}


def _seconds(text: str) -> float:
    from pydantic_core import PydanticCustomError

    from hpo.config.schema_types import in_seconds

    try:
        return in_seconds(text)
    except PydanticCustomError as error:
        fix = (error.context or {}).get("fix", "")
        raise InputError(error.message(), path="--leave-when-idle", value=text, fix=fix) from None


def _join(spec: StudySpec, idle: float, stop_seen: str | None, *, quiet: bool, json_: bool) -> str:
    """Work on the study and show what happens here; returns why this agent has left."""
    from hpo.execution.agent import join

    with listening(quiet=quiet, json_=json_) as listen:
        return join(spec, listen, warn, idle, stop_seen).value
