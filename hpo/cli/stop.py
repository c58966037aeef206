"""`hpo stop`."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.console.output import read_by_others
from hpo.wording import count_of

if TYPE_CHECKING:
    from hpo.study.open_study import OpenStudy

#: Seconds between two checks whether the agents have left.
_PAUSE: Final = 1.0


def stop(
    study: StudyFile,
    overrides: Overrides = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all agents have left.")] = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Ask all agents of a study, on any machine, to requeue their trials and leave.

    Each `hpo run` and `hpo worker` notices this within 10 seconds. Its workers finish their batches and write
    checkpoints, and it ends with exit code 0 (`hpo run`: 130). Agents of an engine that still wait for a machine
    leave as soon as they start. An agent that you start later works as usual, and resumes the trials.

    Example: hpo stop study.yaml --wait
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.study.agents import ask_all_to_leave
    from hpo.study.open_study import load_study

    with load_study(spec) as opened:
        asked = ask_all_to_leave(opened)
        hosts = ", ".join(sorted({each.host for each in asked}))
        with read_by_others():
            if asked:
                print(f"asked {count_of(len(asked), 'agent')} to leave on {hosts}")
            else:
                print(f"no agent is at work on the study {spec.study.name}")
        if wait and asked:
            _wait(opened, {each.agent_id for each in asked})
            with read_by_others():
                print("all of them have left")


def _wait(opened: OpenStudy, asked: set[int]) -> None:
    """Wait until the database says that these agents have ended or are dead; waits on if it can't be reached."""
    from hpo.storage.outage import DatabaseAwayError
    from hpo.storage.recovery import Sightings
    from hpo.study.agents import end_dead_agents, not_dead

    sightings = Sightings()
    while True:
        grace = opened.spec.run.lost_after
        with contextlib.suppress(DatabaseAwayError), opened.storage.patience.whole():
            end_dead_agents(opened.storage, opened.study_id, grace=grace, sightings=sightings)
            with opened.storage.engine.connect() as conn:
                left = not_dead(conn, opened.study_id)
            if not any(each.agent_id in asked for each in left):
                return
        time.sleep(_PAUSE)
