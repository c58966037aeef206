"""What a process of its own costs each trial: the time between two trials of one worker.

    python benchmarks/trial_process.py [--trials 60]

A study of one-epoch trials with one worker. Between the end of one trial in the ledger and the start of the next
lie the end of a process, a fork, new connections, and the asking. The fork alone is measured beside it: a process
that has imported what a worker has, and does nothing.
"""

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

STUDY = Path(__file__).parent.parent / "studies" / "digits" / "study.yaml"
FORKS = 50


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
    trials = parser.parse_args().trials
    for name, seconds in (("a fork alone", forks()), ("between two trials", between_trials(trials))):
        print(f"{name}: median {statistics.median(seconds) * 1e3:.1f} ms of {len(seconds)}")


if __name__ == "__main__":
    main()
