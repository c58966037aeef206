"""What it brings to keep the processes of paused trials: whole runs of one study, with and without, in turn.

    python benchmarks/resumes.py [--rounds 5] [--workers 1] [--epochs 300]

One worker and one seed give the same study twice, with the same pauses. Without: a callback leaves a child in each
trial's process, so none is kept. The time is that of the ledger, from the first attempt's start to the last end.
"""

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from itertools import groupby, pairwise
from pathlib import Path

from trainer.callback import Callback

STUDY = Path(__file__).parent.parent / "studies" / "mnist1d" / "study.yaml"


class LeavesChild(Callback):
    """Leaves a child process that has ended and has not been waited for."""

    def on_fit_start(self, _: object) -> None:
        """Start the child."""
        os.posix_spawn("/bin/true", ["true"], {})


def run(*, keep: bool, workers: int, epochs: int) -> tuple[float, int, int]:
    """A run's seconds, how many attempts resumed a trial, and how many of these in the trial's own process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpo", "run", STUDY, "--output-dir", folder, "--workers", workers]
        command += ["study.pruner=null", "study.scheduler={name: freeze_thaw, switch: 1}", "study.n_trials=40"]
        command += [f"study.epochs={epochs}", "study.sampler={name: random, seed: 1}"]
        if not keep:
            command.append("callbacks.leaves_child._target_=resumes.LeavesChild")
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, env=env)
        rows = (
            sqlite3.connect(Path(folder, "study.db"))
            .execute("SELECT trial_id, pid, started_at, ended_at FROM hpo_attempts ORDER BY trial_id, attempt")
            .fetchall()
        )
    of_trials = [list(attempts) for _, attempts in groupby(rows, lambda row: row[0])]
    resumed = [before[1] == after[1] for attempts in of_trials for before, after in pairwise(attempts)]
    return max(row[3] for row in rows) - min(row[2] for row in rows), len(resumed), sum(resumed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=300)
    given = parser.parse_args()
    pairs = [
        [run(keep=keep, workers=given.workers, epochs=given.epochs) for keep in (True, False)]
        for _ in range(given.rounds)
    ]
    for name, of_rounds in zip(("kept", "not kept"), zip(*pairs, strict=True), strict=True):
        seconds = statistics.median(each[0] for each in of_rounds)
        print(f"{name}: {seconds:.1f} s; {of_rounds[0][1]} resumes, {of_rounds[0][2]} in the trial's own process")
    ratio = statistics.median(with_[0] / without[0] for with_, without in pairs)
    print(f"kept / not kept: {ratio:.3f}, the median of {given.rounds} rounds")


if __name__ == "__main__":
    main()
