"""The shared storage as workers use it, against plain Optuna on the same databases.

    python benchmarks/storage.py [--databases sqlite postgresql] [--processes 1 4 8] [--trials 50 500 5000 10000]
                                 [--rounds 3] [--sleep-trials 10] [--pauses 0.05 0.25]

TPE, three parameters, ten reports a trial, MedianPruner; processes start together and take a few trials each.
"Plain" is `optuna.load_study(storage=URL)`; "ours" is the same study opened as `hpo run`'s workers open it:
StudyStorage with an owner, leases and a budget, under StudyCache. "Memory" does the same calls on an
InMemoryStorage with the same trials, in as many processes: what it takes is the sampler, the pruner and Optuna.

The storage's share is the time inside the storage's methods, less memory's. The number of processes varies at the
first number of trials, the number of trials at 4 processes. Contestants run in turn in each round. PostgreSQL is a
private server with its default, durable settings; without its programs it is left out.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as workers have it; before NumPy is imported

import argparse
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import optuna
from finished_trials import EPOCHS, NAME, SPACE, Databases, curve, point, postgres
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import create_trial

from hpo.storage.cache import StudyCache
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.study.open_study import MAX_AGE

CONTESTANTS = ("plain", "ours", "memory")
REFERENCE = 4  # processes at which the number of trials varies
TRIALS_EACH = 4

forked = multiprocessing.get_context("forkserver")


# ---------------------------------------------------------------------------- what a process does


class Clock:
    """The time inside a storage's methods; one called from another counts once."""

    def __init__(self, storage: BaseStorage) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in dir(BaseStorage):
            if not name.startswith("_") and callable(getattr(storage, name)):
                setattr(storage, name, partial(self._timed, getattr(storage, name)))

    def _timed(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return method(*args, **kwargs)
        self._inside, started = True, time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started
            self._inside = False


@dataclass
class Times:
    """Seconds per operation: in all, and inside the storage."""

    start: float = 0.0
    ask: list[tuple[float, float]] = field(default_factory=list)
    report: list[tuple[float, float]] = field(default_factory=list)
    tell: list[tuple[float, float]] = field(default_factory=list)


def in_memory(trials: int) -> InMemoryStorage:
    storage = InMemoryStorage()
    study = optuna.create_study(study_name=NAME, storage=storage)
    for i in range(trials):
        values = dict(enumerate(curve(i), start=1))
        study.add_trial(
            create_trial(params=point(i), distributions=SPACE, value=curve(i)[-1], intermediate_values=values)
        )
    return storage


def open_study(contestant: str, url: str, seed: int, memory: InMemoryStorage | None) -> optuna.Study:
    storage: str | BaseStorage
    if contestant == "ours":
        storage = StudyCache(open_storage(url, create=False, owner=Owner.current()), max_age=MAX_AGE)
    else:
        storage = memory or url
    return optuna.load_study(
        study_name=NAME,
        storage=storage,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(),
    )


def suggest(trial: optuna.Trial) -> None:
    trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    trial.suggest_int("hidden", 8, 256, log=True)
    trial.suggest_float("dropout", 0.0, 0.5)


def measure(contestant: str, url: str, seed: int, trials: int, barrier: Barrier) -> Times:
    """Open the study and run trials; the first one is the start's, and is not counted otherwise."""
    memory = in_memory(trials) if contestant == "memory" else None
    times = Times()
    barrier.wait()
    started = time.perf_counter()
    study = open_study(contestant, url, seed, memory)
    suggest(study.ask())
    times.start = time.perf_counter() - started
    clock = Clock(study._storage)  # noqa: SLF001 - the cache around it, too

    def timed(record: list[tuple[float, float]], work: Callable[[], Any]) -> Any:
        before, began = clock.seconds, time.perf_counter()
        result = work()
        record.append((time.perf_counter() - began, clock.seconds - before))
        return result

    def asked() -> optuna.Trial:
        trial = study.ask()
        suggest(trial)
        return trial

    def reported(trial: optuna.Trial, value: float, step: int) -> None:
        trial.report(value, step)
        trial.should_prune()  # not acted on: all contestants shall do the same

    barrier.wait()
    for _ in range(TRIALS_EACH):
        trial = timed(times.ask, asked)
        for step, value in enumerate(curve(trial.number), start=1):
            timed(times.report, partial(reported, trial, value, step))
        timed(times.tell, partial(study.tell, trial, curve(trial.number)[-1]))
    return times


def sleep_through(
    contestant: str, url: str, seed: int, trials: int, barrier: Barrier, *, pause: float
) -> tuple[float, float]:
    """Trials that sleep instead of computing; when it began and when it was done."""
    study = open_study(contestant, url, seed, None)
    study.get_trials(deepcopy=False)
    barrier.wait()
    began = time.monotonic()
    for _ in range(trials):
        trial = study.ask()
        suggest(trial)
        for step, value in enumerate(curve(trial.number), start=1):
            time.sleep(pause)
            trial.report(value, step)
            trial.should_prune()
        study.tell(trial, curve(trial.number)[-1])
    return began, time.monotonic()


# ---------------------------------------------------------------------------- many processes


def _child(work: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    answer.send(work(*args))


def in_processes(count: int, work: Callable[..., Any], contestant: str, url: str, trials: int) -> list[Any]:
    """The work's answers from processes that start together."""
    barrier, running = forked.Barrier(count), []
    for seed in range(count):
        mine, theirs = forked.Pipe(duplex=False)
        process = forked.Process(target=_child, args=(work, (contestant, url, seed, trials, barrier), theirs))
        process.start()
        theirs.close()
        running.append((process, mine))
    answers = [mine.recv() for _, mine in running]
    for process, _ in running:
        process.join()
    return answers


# ---------------------------------------------------------------------------- tables

Cell = tuple[int, int]  # processes, finished trials
Measured = dict[tuple[Cell, str], list[list[Times]]]


def run_cells(databases: Databases, cells: list[Cell], rounds: int) -> Measured:
    found: Measured = {(cell, name): [] for cell in cells for name in CONTESTANTS}
    for _, (processes, trials), name in itertools.product(range(rounds), cells, CONTESTANTS):
        with ExitStack() as stack:
            url = "" if name == "memory" else stack.enter_context(databases.fresh(name, trials))
            found[(processes, trials), name].append(in_processes(processes, measure, name, url, trials))
    return found


def milliseconds(runs: list[list[Times]], operation: str, column: int = 0) -> float:
    """Mean within a round (slow calls count), median over the rounds."""
    each = [statistics.mean(pair[column] for times in run for pair in getattr(times, operation)) for run in runs]
    return statistics.median(each) * 1000


def start_seconds(runs: list[list[Times]]) -> float:
    return statistics.median(max(times.start for times in run) for run in runs)


def print_cells(kind: str, cells: list[Cell], found: Measured) -> None:
    print(f"\n### {kind}: milliseconds per operation, ours / plain\n")
    print("| processes | finished | ask + 3 suggests | ratio | report + should_prune | ratio | tell | start, s |")
    print("|---|---|---|---|---|---|---|---|")
    for cell in cells:
        ours, plain = found[cell, "ours"], found[cell, "plain"]
        ask, report, tell = (
            (milliseconds(ours, name), milliseconds(plain, name)) for name in ("ask", "report", "tell")
        )
        print(
            f"| {cell[0]} | {cell[1]:,} | {ask[0]:.1f} / {ask[1]:.1f} | {ask[0] / ask[1]:.2f} "
            f"| {report[0]:.2f} / {report[1]:.2f} | {report[0] / report[1]:.2f} | {tell[0]:.1f} / {tell[1]:.1f} "
            f"| {start_seconds(ours):.2f} / {start_seconds(plain):.2f} |",
            flush=True,
        )


def print_growth(kind: str, cells: list[Cell], found: Measured) -> None:
    print(f"\n### {kind}: the storage's share and the rest, {cells[0][0]} processes, ms, ours / plain\n")
    print("| finished trials | storage in ask + suggests | storage in report + should_prune | sampler | pruner |")
    print("|---|---|---|---|---|")
    shares: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        shown = []
        memory = found[cell, "memory"]
        for operation in ("ask", "report"):
            for name in ("ours", "plain"):
                share = milliseconds(found[cell, name], operation, 1) - milliseconds(memory, operation, 1)
                shares.setdefault((name, operation), []).append(share)
            shown.append(" / ".join(f"{shares[name, operation][-1]:.2f}" for name in ("ours", "plain")))
        rest = [milliseconds(memory, name) for name in ("ask", "report")]
        print(f"| {cell[1]:,} | {shown[0]} | {shown[1]} | {rest[0]:.1f} | {rest[1]:.2f} |")
    growth = {key: values[-1] / values[0] for key, values in shares.items()}
    asks, reports = (f"{growth['ours', name]:.2f} / {growth['plain', name]:.2f}" for name in ("ask", "report"))
    print(f"| last ÷ first | {asks} | {reports} | | |", flush=True)


def print_efficiency(databases: Databases, rounds: int, trials: int, pause: float) -> None:
    workers = 8
    ideal = trials * EPOCHS * pause
    each = f"{trials} trials each of {EPOCHS} epochs that sleep {pause:g} s"
    print(f"\n### {databases.kind}: {workers} workers, {each}\n")
    print("| contestant | seconds | of the ideal |")
    print("|---|---|---|")
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for _, name in itertools.product(range(rounds), seconds):
        with databases.fresh(name, 50) as url:
            spans = in_processes(workers, partial(sleep_through, pause=pause), name, url, trials)
            seconds[name].append(max(end for _, end in spans) - min(begin for begin, _ in spans))
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"| {name} | {middle:.2f} | {ideal / middle:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--trials", type=int, nargs="+", default=[50, 500, 5000, 10000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep-trials", type=int, default=10, help="trials of a sleeping worker; 0: left out")
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.05, 0.25], help="seconds of such an epoch")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    dialect = "sqlalchemy.dialects.postgresql.psycopg"
    forked.set_forkserver_preload(["hpo.storage.cache", "optuna.samplers", dialect])
    across = [(processes, arguments.trials[0]) for processes in arguments.processes]
    reference = REFERENCE if REFERENCE in arguments.processes else arguments.processes[0]
    along = [(reference, trials) for trials in arguments.trials]
    cells = sorted({*across, *along})
    for kind in arguments.databases:
        if kind == "postgresql" and not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
            print("\nno PostgreSQL server programs here: apt-get install postgresql")
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(postgres()) if kind == "postgresql" else ""
            databases = Databases(kind, folder, server)
            found = run_cells(databases, cells, arguments.rounds)
            print_cells(kind, cells, found)
            if len(along) > 1:
                print_growth(kind, along, found)
            if arguments.sleep_trials:
                for pause in arguments.pauses:
                    print_efficiency(databases, arguments.rounds, arguments.sleep_trials, pause)


if __name__ == "__main__":
    main()
