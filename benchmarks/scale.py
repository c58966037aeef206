"""What a study costs that is very large, or that very many workers share, on PostgreSQL.

    python benchmarks/scale.py workers [--trials 50000] [--rows ours optuna grpc] [--set OVERRIDE ...]
    python benchmarks/scale.py server  [--trials 50000] [--workers 8 100 1000] [--seconds 0] [--every 10]
    python benchmarks/scale.py commands [--trials 50000] [--agents 1000] [--set OVERRIDE ...]
    python benchmarks/scale.py quality [--trials 3000] [--most 250 500 1000]

`workers`: a process that joins a study of finished trials (`tests/support/big_study.py`): from opening it to its
first trial with parameters; a later ask; a report with the pruner's decision (median); memory beyond what the
process had before it opened the study, with all that workers have from their fork server, torch and hpo. With a
scheduler (`--set study.pruner=null study.scheduler=asha`) most trials are paused, and the decision is that at a
grant's end. "optuna" is
`optuna.load_study` on the same database with the same sampler and pruner, "grpc" the same through
`optuna.storages.run_grpc_proxy_server`; it is left out without grpcio, and its server's memory stands beside the
process's own.

`server`: so many simulated workers, each of which holds a trial, reports every ten seconds, and looks for finished
trials as often as a worker does; agents of eight workers beat for these every ten seconds; the CPU time of all of
PostgreSQL's processes, for each of these in milliseconds and for all of them together in cores, worked out from
them, and measured for `--seconds`. A thirtieth of the workers end their trial and take a new one each minute then.

`commands`: what people wait for at a study of so many trials, and of so many agents that are at work.

`quality`: the best value that TPE finds where it is shown a sample of so many trials, against all of them; and of
random points with falling curves, what MedianPruner finds and trains where it compares with such a sample.

The machine may be shared: read CPU seconds (of the process, with its children) rather than seconds.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in workers; before NumPy is imported

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import optuna
import psutil
from finished_trials import postgres, server_cpu
from optuna.trial import TrialState
from sampled_search import quality
from waiting import commands

from hpo.config.spec import load_spec
from hpo.storage import beats
from hpo.storage.beats import Beat
from hpo.storage.cache import look_age
from hpo.storage.ledger import Lease, Owner
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import id_of_study, id_of_trial, reports_of
from hpo.storage.study_storage import StudyStorage
from hpo.study.open_study import MAX_AGE, load_study
from hpo.study.taking import Taker, begin
from tests.support.big_study import make_big_study

ROWS = ("ours", "optuna", "grpc")
ASKS, REPORTS = 3, 30
FINISHED = [state for state in TrialState if state.is_finished()]


# ---------------------------------------------------------------------------- a worker


def memory() -> float:
    """The memory of this process that it does not share, in MB."""
    return psutil.Process().memory_full_info().uss / 2**20


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    began, before = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - before


def open_as(row: str, file: Path, overrides: list[str], proxy: int) -> optuna.Study:
    spec = load_spec(file, overrides)
    if row == "ours":
        return load_study(spec, Owner.current()).study
    opened = load_study(spec)
    sampler = optuna.samplers.TPESampler(seed=0)
    storage: Any = opened.storage.url
    if row == "grpc":
        storage = optuna.storages.GrpcStorageProxy(port=proxy)
    return optuna.load_study(study_name="big", storage=storage, sampler=sampler, pruner=opened.study.pruner)


def as_worker(row: str, file: Path, overrides: list[str], proxy: int) -> dict[str, Any]:
    """Join the study, ask and report; returns the costs."""
    import hpo.execution.launchers.preload  # noqa: F401 - as the fork server that workers come from
    from hpo.config.space import SearchSpace

    spec = load_spec(file, overrides)
    space = SearchSpace.from_spec(spec)
    before, found = memory(), {}
    trials: list[optuna.Trial] = []

    def ask() -> None:
        trials.append(study.ask() if taker is None else taken(taker))
        space.suggest(trials[-1])

    def join() -> None:
        nonlocal study, taker
        if spec.study.scheduler is None:
            study = open_as(row, file, overrides, proxy)
        else:
            taker = Taker(load_study(spec, Owner.current()))
            study = taker.opened.study
        ask()

    study: Any = None
    taker: Taker | None = None
    found["first"] = timed(join)
    found["ask"] = median_of(timed(ask) for _ in range(ASKS))
    trial, values = trials[-1], iter(np.exp(-np.arange(REPORTS) / 9.0))

    def report() -> None:
        reported = reports_of(trial)
        step, value = len(reported) + 1, float(next(values))
        if taker is None:
            trial.report(value, step)
            trial.should_prune()  # its answer is ignored
            return
        reported[step] = value
        if taker.extended(id_of_trial(trial), {step: value}) is None:
            trial.storage.set_trial_intermediate_value(id_of_trial(trial), step, value)

    found["report"] = median_of([timed(report) for _ in range(REPORTS)][5:])
    found["memory"] = memory() - before
    return found


def median_of(pairs: Any) -> tuple[float, float]:
    seconds, cpu = zip(*pairs, strict=True)
    return statistics.median(seconds), statistics.median(cpu)


def taken(taker: Taker) -> optuna.Trial:
    """The next trial by the study's scheduler."""
    lease = taker.take()
    assert isinstance(lease, Lease), lease
    return begin(taker.opened, lease)


@contextmanager
def grpc_server(url: str, port: int) -> Iterator[psutil.Process]:
    code = (
        f"import optuna; optuna.storages.run_grpc_proxy_server(optuna.storages.get_storage({url!r}), port={port})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        time.sleep(5)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def workers(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(postgres())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = make_big_study(folder, arguments.trials, storage=server.format("postgres"), overrides=arguments.set)
        print("| row | first ask, s (CPU) | later ask, s (CPU) | report + decision, ms (CPU) | memory, MB |")
        print("|---|---|---|---|---|")
        for row in arguments.rows:
            if row == "grpc" and find_spec("grpc") is None:
                print("| grpc | grpcio is not installed | | | |")
                continue
            with ExitStack() as each:
                proxy = (
                    each.enter_context(grpc_server(server.format("postgres"), 13_100)) if row == "grpc" else None
                )
                command = [sys.executable, __file__, "as-worker", row, str(file), "--set", *arguments.set]
                answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found = json.loads(answer.splitlines()[-1])
                beside = f" + {proxy.memory_full_info().uss / 2**20:.0f} in the proxy" if proxy else ""
            first, ask, report = (found[name] for name in ("first", "ask", "report"))
            print(
                f"| {row} | {first[0]:.2f} ({first[1]:.2f}) | {ask[0]:.2f} ({ask[1]:.2f}) "
                f"| {report[0] * 1e3:.1f} ({report[1] * 1e3:.1f}) | {found['memory']:.0f}{beside} |",
                flush=True,
            )


# ---------------------------------------------------------------------------- the server


#: How many workers a simulated agent has.
AGENT = 8


class Simulated:
    """Simulated workers that only query the database, with one storage for all their trials."""

    def __init__(self, storage: StudyStorage, study: optuna.Study, count: int, every: float, age: float) -> None:
        self.storage, self.study_id, self.every, self.age = storage, id_of_study(study), every, age
        self.running = [storage.create_new_trial(self.study_id) for _ in range(count)]
        self.steps = dict.fromkeys(self.running, 0)
        self.fresh_until = [0.0] * count
        self.last = max(self.running)
        self.done = {"report": 0, "look": 0, "trial": 0}

    def report(self, worker: int) -> None:
        """A worker's report, and its look for finished trials if the last one is too old."""
        trial_id = self.running[worker]
        self.steps[trial_id] += 1
        self.storage.set_trial_intermediate_value(trial_id, self.steps[trial_id], 1 / self.steps[trial_id])
        self.done["report"] += 1
        now = time.monotonic()
        if now >= self.fresh_until[worker]:
            self.look()
            self.fresh_until[worker] = now + self.age
            self.done["look"] += 1

    def look(self) -> None:
        """A look for finished trials."""
        among = set(self.running)
        self.storage.read_changes_since(self.study_id, 0, after=self.last, among=among, states=FINISHED)

    def next_trial(self, worker: int) -> None:
        """End a worker's trial and take a new one."""
        self.storage.set_trial_state_values(self.running[worker], TrialState.COMPLETE, [0.5])
        trial_id = self.storage.create_new_trial(self.study_id)
        self.steps[trial_id], self.running[worker] = 0, trial_id
        self.last = max(self.last, trial_id)
        self.done["trial"] += 1

    def run(self, seconds: float) -> None:
        """Let all workers work for these seconds."""
        self.done = dict.fromkeys(self.done, 0)
        began, jobs = time.monotonic(), []
        for worker in range(len(self.running)):
            at = random.uniform(0, self.every)
            self.fresh_until[worker] = began + random.uniform(0, self.age)
            while at < seconds:
                jobs.append((at, self.report, worker))
                at += self.every
        ends = int(len(self.running) / 30 * seconds / 60)
        jobs += [
            (random.uniform(0, seconds), self.next_trial, random.randrange(len(self.running))) for _ in range(ends)
        ]
        for agent in range(self.agents):
            first = random.uniform(0, self.every)
            jobs += [(at, self.beat, agent) for at in np.arange(first, seconds, self.every)]
        with ThreadPoolExecutor(4) as pool:
            for at, work, worker in sorted(jobs, key=lambda job: job[0]):
                time.sleep(max(0.0, began + at - time.monotonic()))
                pool.submit(work, worker).add_done_callback(lambda done: done.result())

    @property
    def agents(self) -> int:
        """How many agents these workers need."""
        return math.ceil(len(self.running) / AGENT)

    def beat(self, agent: int) -> None:
        """An agent's heartbeat for its workers."""
        held = self.running[agent * AGENT : (agent + 1) * AGENT]
        with self.storage.one_transaction() as conn:
            beats.give(conn, [Beat(Lease(trial_id, 1), 1.0) for trial_id in held])


def server(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(postgres())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = make_big_study(folder, arguments.trials, storage=place.format("postgres"))
        spec = load_spec(file)
        print(
            "| running | report | look | beat | end + new trial | 1 report and 1 beat in 10 s, cores | measured |"
        )
        print("|---|---|---|---|---|---|---|")
        for count in arguments.workers:
            opened = load_study(spec)
            storage = open_storage(opened.storage.url, create=False, owner=Owner.current())
            age = look_age(MAX_AGE, count) if arguments.look_age is None else arguments.look_age
            simulated = Simulated(storage, opened.study, count, arguments.every, age)
            report, look, beat, trial = costs(simulated)
            looks = count / max(age, arguments.every)  # a worker only looks when it reports
            worked_out = count / arguments.every * (report + beat) + looks * look
            milliseconds = " | ".join(f"{cost * 1e3:.3f}" for cost in (report, look, beat, trial))
            print(
                f"| {count:,} | {milliseconds} | {worked_out:.3f} | {measured(simulated, arguments)} |", flush=True
            )
            for trial_id in simulated.running:
                storage.set_trial_state_values(trial_id, TrialState.FAIL)
            storage.close()
            opened.storage.close()


def cost_of(url: str, work: Callable[[int], Any], times: int) -> float:
    """The CPU seconds of the server."""
    before = server_cpu(url)
    for at in range(times):
        work(at)
    return (server_cpu(url) - before) / times


def costs(simulated: Simulated) -> Iterator[float]:
    """The server's CPU seconds for a report, a look, a heartbeat, and the change from a trial to a new one."""
    simulated.fresh_until = [math.inf] * len(simulated.running)
    trials, url = len(simulated.running), simulated.storage.url
    yield cost_of(url, lambda at: simulated.report(at % trials), 1_000)
    yield cost_of(url, lambda _: simulated.look(), 200)
    yield cost_of(url, lambda at: simulated.beat(at % simulated.agents), 500) * simulated.agents / trials
    yield cost_of(url, lambda at: simulated.next_trial(at % trials), 100)


def measured(simulated: Simulated, arguments: argparse.Namespace) -> str:
    """How many cores the server used while all workers worked, if that was requested."""
    if not arguments.seconds:
        return ""
    url = simulated.storage.url
    before, began = server_cpu(url), time.monotonic()
    simulated.run(arguments.seconds)
    took = time.monotonic() - began
    return f"{(server_cpu(url) - before) / took:.3f} at {simulated.done['report'] / took:.0f} reports/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("workers")
    one.add_argument("--trials", type=int, default=50_000)
    one.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    one.add_argument("--set", nargs="*", default=[], help="overrides of the study file")
    one.set_defaults(work=workers)
    child = parts.add_parser("as-worker")
    child.add_argument("row")
    child.add_argument("file", type=Path)
    child.add_argument("--set", nargs="*", default=[])
    child.set_defaults(work=lambda each: print(json.dumps(as_worker(each.row, each.file, each.set, 13_100))))
    many = parts.add_parser("server")
    many.add_argument("--trials", type=int, default=50_000)
    many.add_argument("--workers", type=int, nargs="+", default=[8, 100, 1_000])
    many.add_argument("--seconds", type=float, default=0.0)
    many.add_argument("--every", type=float, default=10.0, help="seconds between two reports of a worker")
    many.add_argument("--look-age", type=float, help="seconds that a look holds; without it, as workers do")
    many.set_defaults(work=server)
    looks = parts.add_parser("commands")
    looks.add_argument("--trials", type=int, default=50_000)
    looks.add_argument("--agents", type=int, default=1_000)
    looks.add_argument("--set", nargs="*", default=[], help="overrides of the study file")
    looks.set_defaults(work=commands)
    good = parts.add_parser("quality")
    good.add_argument("--trials", type=int, default=3_000)
    good.add_argument("--most", type=int, nargs="+", default=[250, 500, 1_000])
    good.add_argument("--seeds", type=int, default=5)
    good.set_defaults(work=quality)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    arguments.work(arguments)


if __name__ == "__main__":
    main()
