"""What people wait for at a very large study: `scale.py commands`."""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import sqlalchemy as sa
from finished_trials import postgres, server_cpu

from hpo.config.spec import StudySpec, load_spec
from hpo.console.snapshot import Looks
from hpo.storage.agents import AGENTS
from hpo.study.open_study import load_study
from tests.support.big_study import make_big_study


def add_agents(spec: StudySpec, count: int) -> None:
    """Let so many agents of other machines be at work on a study."""
    opened = load_study(spec)
    me = {"devices": "cpu", "placement": "", "workers": 1, "code": "", "config": "", "mark": ""}
    rows = [
        {**me, "study_id": opened.study_id, "number": at, "first_worker": at, "host": f"node-{at}", "boot_id": ""}
        | {"pid": at, "start_time": 0.0, "started_at": time.time(), "beat_at": time.time()}
        for at in range(1, count + 1)
    ]
    with opened.storage.engine.begin() as conn:
        conn.execute(sa.insert(AGENTS), rows)
    opened.storage.close()


def commands(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(postgres())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = place.format("postgres")
        file = make_big_study(folder, arguments.trials, storage=url, overrides=arguments.set)
        add_agents(load_spec(file, arguments.set), arguments.agents)
        print("| command | CPU s | CPU s of the server |\n|---|---|---|")
        for line in ("status", "best", "trials --last 20", "trials"):
            command = [sys.executable, "-m", "hpo", *line.split(), str(file), *arguments.set]
            ours, its = resource.getrusage(resource.RUSAGE_CHILDREN), server_cpu(url)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            now = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = now.ru_utime + now.ru_stime - ours.ru_utime - ours.ru_stime
            print(f"| hpo {line} | {cpu:.2f} | {server_cpu(url) - its:.2f} |", flush=True)
        opened = load_study(load_spec(file, arguments.set))
        looks = Looks(opened)
        for which in ("first", "later"):
            began, its = time.process_time(), server_cpu(url)
            looks.look()
            cpu = time.process_time() - began
            print(f"| {which} look of status --watch | {cpu:.2f} | {server_cpu(url) - its:.2f} |", flush=True)
        opened.storage.close()
