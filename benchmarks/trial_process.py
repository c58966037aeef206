"""What a process of its own costs each trial: the time between two trials of one worker, and the CPU of a switch.

    python benchmarks/trial_process.py [--trials 60] [--trackers wandb mlflow …]

A study of one-epoch trials with one worker. Between the end of one trial in the ledger and the start of the next
lie the end of a process, a fork, new connections, and the asking. The fork alone is measured beside it: a process
that has imported what a worker has, and does nothing.

The CPU of a switch, user and system, is that of all the processes of a run: what a trial of one epoch takes more
than one trial less, without the epoch itself, which runs of more epochs show. It includes building, checkpoint and
config, and does not depend on how busy the machine is otherwise, as long as its caches are not.

With --trackers, instead, the CPU that each tracker adds to a trial of one epoch, and once to a study; W&B is
offline, and Comet, without a key, not started.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

STUDY = Path(__file__).parent.parent / "studies" / "digits" / "study.yaml"
SWITCHING = Path(__file__).parent.parent / "studies" / "mnist1d" / "study.yaml"
FORKS = 50
#: Linux: what a process's children leave behind becomes its own.
_SUBREAPER = 36
_ENVIRONMENT = os.environ | {"WANDB_MODE": "offline"}


def cpu(trials: int, epochs: int, *overrides: str) -> float:
    """Seconds of user and system CPU that a run takes, all its processes together."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpo", "run", SWITCHING, "--workers", 2, "--n-trials", trials]
        command += ["--output-dir", folder, "study.pruner=none", "study.sampler={name: random, seed: 1}"]
        command += ["callbacks.early_stopping=false", f"trainer.max_epochs={epochs}", *overrides]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, env=_ENVIRONMENT)
        with contextlib.suppress(ChildProcessError):
            while True:  # the fork server ends after the run
                os.waitpid(-1, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_of_a_switch(trials: int) -> tuple[float, float]:
    """Seconds of CPU of a switch, and of an epoch."""
    few = max(2, trials // 10)
    fewer, one, three = cpu(few, 1), cpu(trials, 1), cpu(trials, 3)
    epoch = (three - one) / (2 * trials)
    return (one - fewer) / (trials - few) - epoch, epoch


def cpu_of_trackers(names: Sequence[str], trials: int) -> None:
    """Print seconds of CPU that each adds to a trial, and once to a study."""
    few = max(2, trials // 10)
    more, less = cpu(trials, 1), cpu(few, 1)
    for name in names:
        all_of_it, part = (cpu(count, 1, f"callbacks.{name}=true") for count in (trials, few))
        each = ((all_of_it - part) - (more - less)) / (trials - few)
        print(f"{name}: {each:.2f} s of CPU a trial, and {part - less - few * each:.1f} s a study")


def between_trials(trials: int) -> list[float]:
    """Seconds from the end of each trial to the start of the next."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpo", "run", STUDY, "--workers", 1, "--n-trials", trials]
        command += ["--output-dir", folder, "callbacks={}", "study.pruner=none", "study.sampler=random"]
        subprocess.run([*map(str, command), "trainer.max_epochs=1"], check=True, stdout=subprocess.DEVNULL)
        rows = sqlite3.connect(Path(folder, "study.db")).execute(
            "SELECT started_at, ended_at FROM hpo_attempts ORDER BY started_at"
        )
        times = rows.fetchall()
    return [later - ended for (_, ended), (later, _) in pairwise(times)]


def forks() -> list[float]:
    """Seconds of a fork of a process that has imported what a worker has, until it has ended."""
    import hpo.execution.launchers.preload  # noqa: F401 - what the fork server imports

    taken = []
    for _ in range(FORKS):
        started = time.perf_counter()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--trackers", nargs="+", help="names of callbacks")
    arguments = parser.parse_args()
    trials = arguments.trials
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if arguments.trackers:
        cpu_of_trackers(arguments.trackers, trials)
        return
    for name, seconds in (("a fork alone", forks()), ("between two trials", between_trials(trials))):
        print(f"{name}: median {statistics.median(seconds) * 1e3:.1f} ms of {len(seconds)}")
    switch, epoch = cpu_of_a_switch(trials)
    print(f"CPU of a switch: {switch * 1e3:.1f} ms; of an epoch: {epoch * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
