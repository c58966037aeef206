"""A whole study with four workers: `hpo run` against the same study as a plain Optuna script.

    python benchmarks/whole_study.py [--rounds 3] [--trials 40]

Both search the same space over the same model and data on a fresh SQLite file, from the start of the first
process to the end of the last. Without pruning both train the same number of epochs; with it each prunes by its
own trials, so the time per epoch is what can be compared. The plain script makes no checkpoints and no logs.
"""

import argparse
import contextlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
STUDY = HERE.parent / "studies" / "digits" / "study.yaml"
WORKERS = 4
EPOCHS = 20


def ours(folder: Path, trials: int, *, prune: bool) -> Path:
    command = [sys.executable, "-m", "hpo", "run", STUDY, "--workers", WORKERS, "--n-trials", trials]
    command += ["--output-dir", folder, "callbacks={}", f"study.pruner={PRUNERS[prune]}"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return folder / "study.db"


def plain(folder: Path, trials: int, *, prune: bool) -> Path:
    file = folder / "plain.db"
    command = [sys.executable, str(HERE / "plain_optuna.py"), f"sqlite:///{file}", "--trials", str(trials)]
    command += ["--epochs", str(EPOCHS), *(["--prune"] if prune else [])]
    create = "import optuna, sys; optuna.create_study(storage=sys.argv[1], study_name='digits')"
    # One process creates the tables: several at once on an empty SQLite file fail.
    subprocess.run([sys.executable, "-c", create, f"sqlite:///{file}"], check=True, stderr=subprocess.DEVNULL)
    processes = [subprocess.Popen(command) for _ in range(WORKERS)]
    if any(process.wait() for process in processes):
        raise RuntimeError("a process of the plain script failed")
    return file


PRUNERS = {True: "{name: median, n_startup_trials: 5, n_warmup_steps: 3}", False: "none"}
CONTESTANTS: dict[str, Callable[..., Path]] = {"plain Optuna": plain, "hpo run": ours}


def measure(name: str, trials: int, *, prune: bool) -> tuple[float, int, int]:
    """Seconds, trials and epochs of one run."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        file = CONTESTANTS[name](Path(folder), trials, prune=prune)
        seconds = time.perf_counter() - started
        with contextlib.closing(sqlite3.connect(file)) as database:
            ended = database.execute("SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'PRUNED')")
            epochs = database.execute("SELECT count(*) FROM trial_intermediate_values")
            return seconds, ended.fetchone()[0], epochs.fetchone()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    print("| pruning | contestant | median s | trials | epochs | time ratio | time per epoch ratio |")
    print("|---|---|---|---|---|---|---|")
    for prune in (False, True):
        runs: dict[str, list[tuple[float, int, int]]] = {name: [] for name in CONTESTANTS}
        for _ in range(arguments.rounds):
            for name in CONTESTANTS:
                runs[name].append(measure(name, arguments.trials, prune=prune))
        for name, results in runs.items():
            report("median" if prune else "none", name, results, runs["plain Optuna"])


def report(
    pruning: str, name: str, results: list[tuple[float, int, int]], base: list[tuple[float, int, int]]
) -> None:
    seconds, trials, epochs = (statistics.median(column) for column in zip(*results, strict=True))
    ratio = statistics.median(mine[0] / other[0] for mine, other in zip(results, base, strict=True))
    each = statistics.median(
        (mine[0] / mine[2]) / (other[0] / other[2]) for mine, other in zip(results, base, strict=True)
    )
    print(
        f"| {pruning} | {name} | {seconds:.1f} | {trials:.0f} | {epochs:.0f} | {ratio:.2f} | {each:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
