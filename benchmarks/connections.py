"""The connections of one agent to PostgreSQL: through a pooler of its own, and without one.

    python benchmarks/connections.py [--workers 8] [--epoch 2 43] [--seconds 60] [--rounds 2]

A study whose epochs take so many seconds runs on a private server, in turn with pgbouncer and without. Once each
worker has finished an epoch, the server's connections are counted 20 times a second, and its transactions and the
CPU time of its processes and of pgbouncer are taken for so long. Without pgbouncer the URL has a parameter that it
has no setting for. "whole" is the time of a study of 200 trials of 5 epochs that take nothing, from the start of
the command to its end.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import sqlalchemy as sa
from finished_trials import postgres, server_cpu

HPO = [sys.executable, "-m", "hpo"]
#: A parameter of libpq that pgbouncer has no setting for.
ALONE = "&channel_binding=disable"
CODE = """
import time


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    for step in range(EPOCHS):
        time.sleep(SECONDS)
        trial.report(x, step)
    return x
"""
STUDY = "study: {name: waits, direction: minimize, n_trials: TRIALS, sampler: random, pruner: none}\n"
STUDY += "objective: {_target_: waits.objective}\n"


def start(
    url: str, folder: Path, workers: int, trials: int, epochs: int, seconds: float
) -> subprocess.Popen[bytes]:
    """Run a study whose epochs take this many seconds."""
    (folder / "waits.py").write_text(CODE.replace("EPOCHS", str(epochs)).replace("SECONDS", str(seconds)))
    (folder / "study.yaml").write_text(STUDY.replace("TRIALS", str(trials)))
    command = [*HPO, "run", "study.yaml", "--workers", str(workers), "--storage", url]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pooler_cpu(agent: psutil.Process) -> float:
    """The CPU seconds of the agent's pgbouncer; 0 without one."""
    times = [each.cpu_times() for each in agent.children(recursive=True) if each.name() == "pgbouncer"]
    return sum(each.user + each.system for each in times)


def count(url: str, workers: int, epoch: float, seconds: float) -> str:
    """Count the connections of a working agent, and measure their cost."""
    name = sa.make_url(url).database
    look = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = :name")
    work = sa.text("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = :name")
    engine = sa.create_engine(url.replace(f"/{name}", "/postgres", 1), isolation_level="AUTOCOMMIT")
    with tempfile.TemporaryDirectory() as folder, engine.connect() as conn:
        process = start(url, Path(folder), workers, workers, 10_000, epoch)
        try:
            time.sleep(10 + epoch)
            agent, seen = psutil.Process(process.pid), []
            before = conn.execute(work, {"name": name}).scalar_one(), server_cpu(url), pooler_cpu(agent)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                seen.append(conn.execute(look, {"name": name}).scalar_one())
                time.sleep(0.05)
            after = conn.execute(work, {"name": name}).scalar_one(), server_cpu(url), pooler_cpu(agent)
        finally:
            process.terminate()
            process.wait()
    engine.dispose()
    done, server, pooler = (b - a for a, b in zip(before, after, strict=True))
    return (
        f"connections {statistics.mean(seen):4.1f}, at most {max(seen):2}; "
        f"{60 * done / seconds:5.0f} transactions a minute; CPU ms a second: "
        f"server {1000 * server / seconds:4.1f}, pgbouncer {1000 * pooler / seconds:4.1f}"
    )


def whole(url: str, workers: int) -> float:
    """Seconds of a study of short trials."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process = start(url, Path(folder), workers, 200, 5, 0)
        if process.wait():
            raise RuntimeError("the study failed")
    return time.monotonic() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epoch", type=float, nargs="+", default=[2.0, 43.0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with postgres() as server:
        admin = sa.create_engine(server.format("postgres"), isolation_level="AUTOCOMMIT")
        names = iter(range(1_000_000))

        def fresh(extra: str) -> str:
            name = f"study{next(names)}"
            with admin.connect() as conn:
                conn.exec_driver_sql(f"CREATE DATABASE {name}")
            return server.format(name) + extra

        ways = {"pgbouncer": "", "alone": ALONE}
        for turn in range(options.rounds):
            for way, extra in ways.items():
                for epoch in options.epoch:
                    said = count(fresh(extra), options.workers, epoch, options.seconds)
                    print(f"round {turn}, epochs of {epoch:g} s, {way:9}: {said}", flush=True)
                print(f"round {turn}, whole, {way:9}: {whole(fresh(extra), options.workers):.1f} s", flush=True)
        admin.dispose()


if __name__ == "__main__":
    main()
