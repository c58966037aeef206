"""A long storm: faults of every kind at random times, then the audit of what the study has come to.

    python benchmarks/chaos.py --kills 200 [--database sqlite|postgresql|mariadb|both] [study.key=value …]

Two supervisors on this host, and a third in a host name of its own where that is permitted, share one study. Each
hundred faults the database server is restarted five times. The exit code is 1 if the audit finds anything, or a
supervisor ended in a way that no fault explains; the folder with the log of the storm then stays.
"""

import argparse
import contextlib
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna

from hpo.config.spec import StudySpec, load_spec
from hpo.storage import ledger
from hpo.storage.ledger import Attempt
from hpo.storage.lineage import epochs_trained as epochs_of_its_own
from hpo.storage.lineage import forked_from
from hpo.storage.settling import LOST
from hpo.study.open_study import load_study
from hpo.study.outcome import outcome_of
from tests.acceptance.chaos.audit import audit
from tests.acceptance.chaos.storm import Record, Storm, other_hosts_work
from tests.acceptance.chaos.study import make_study
from tests.acceptance.chaos.weather import Weather
from tests.support.servers import DatabaseServer, running_mariadb, running_postgres

#: The `n_trials` of a study with a budget of epochs.
_MANY = 1_000_000
_SERVERS = {"postgresql": running_postgres, "mariadb": running_mariadb}


@contextlib.contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[str, DatabaseServer | None]]:
    """URL of a new database, and its server."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'study.db'}", None
        return
    with _SERVERS[kind]() as server:
        yield server.new_database(), server


def blow(kind: str, folder: Path, arguments: argparse.Namespace) -> bool:
    """Run one storm on one kind of database; returns whether the audit passed."""
    file = make_study(folder, arguments.overrides)
    hosts = ["", "", "other"] if other_hosts_work() else ["", ""]
    with database(kind, folder) as (url, server):
        spec = load_spec(file).with_options(storage=url)
        # A budget of epochs is raised while faults are left, else that of trials.
        spec = spec.with_options(n_trials=_MANY if spec.study.epochs else arguments.trials)
        weather = Weather(
            kills=arguments.kills,
            restarts=0 if server is None else max(1, arguments.kills // 20),
            retries=arguments.retries,
            seed=arguments.seed,
            workers=arguments.workers,
            mines=arguments.mines,
            pauses=arguments.pauses,
            limit=arguments.limit,
        )
        storm = Storm(spec, weather, hosts=hosts, server=server)
        print(f"{kind}: {weather}\n  log: {storm.log}", flush=True)
        record = storm.run()
        problems = [*record.surprises, *audit(spec)]
        report(kind, spec, record, len(hosts))
    for problem in problems:
        print(f"  {problem}")
    print(f"{kind}: the audit finds {len(problems) or 'no'} problems\n", flush=True)
    return not problems


def report(kind: str, spec: StudySpec, record: Record, supervisors: int) -> None:
    opened = load_study(spec)
    try:
        trials = opened.storage.get_all_trials(opened.study_id)
        with opened.storage.engine.connect() as conn:
            attempts = ledger.attempts(conn, opened.study_id)
    finally:
        opened.storage.close()
    ended = Counter(str(attempt.outcome) for attempt in attempts)
    outcomes = Counter(outcome_of(trial) for trial in trials)
    again = Counter(Counter(attempt.trial_id for attempt in attempts).values())
    rows = {
        "database": kind,
        "supervisors, and their starts": f"{supervisors}, {record.starts}",
        **{str(fault): count for fault, count in record.faults.items()},
        "trials": f"{len(trials)}: " + _counts(outcomes),
        "attempts": f"{len(attempts)}: " + _counts(ended),
        "most attempts at a trial": max(again, default=0),
        "workers taken for dead that came back": came_back(attempts),
        "epochs kept": sum(len(trial.intermediate_values) for trial in trials),
        "epochs that the budget counts": sum(map(epochs_of_its_own, trials)),
        "forks": sum(forked_from(trial) is not None for trial in trials),
        "epochs trained": epochs_trained(spec),
        "seconds": f"{record.seconds:.0f}",
    }
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def came_back(attempts: Sequence[Attempt]) -> int:
    """Lost attempts whose process later took other trials: it was alive, and its work in between did not count."""
    last: dict[tuple[str, int, float], float] = {}
    for each in sorted(attempts, key=lambda attempt: attempt.started_at):
        last[each.host, each.pid, each.start_time] = each.started_at
    lost = [each for each in attempts if each.outcome == LOST and each.ended_at is not None]
    return sum(last[each.host, each.pid, each.start_time] > (each.ended_at or 0.0) for each in lost)


def epochs_trained(spec: StudySpec) -> int:
    """The epochs of all attempts, including those that were trained again."""
    total = 0
    for folder in (spec.output_dir / "trials").glob("*/attempt-*"):
        table, log = folder / "metrics.csv", folder / "log.txt"
        if table.exists():
            begun = re.search(r"(?:resuming|forked) from \S*/epoch-(\d+)", log.read_text(errors="replace"))
            total += max(0, len(table.read_text().splitlines()) - 1) - (int(begun[1]) if begun else 0)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--database", choices=["sqlite", *_SERVERS, "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="of each supervisor")
    parser.add_argument("--trials", type=int, default=40, help="to begin with; raised while faults are left")
    parser.add_argument("--mines", type=float, default=0.005, help="chance of a death in each hook of a mine")
    parser.add_argument("--retries", type=int, default=0, help="times that all failed trials are retried")
    parser.add_argument("--pauses", action="store_true", help="pause and resume trials again and again")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each database")
    parser.add_argument("overrides", nargs="*", help="of the study, such as run.max_retries=2")
    arguments = parser.parse_args()
    kinds = ["sqlite", "postgresql"] if arguments.database == "both" else [arguments.database]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sound = True
    for kind in kinds:
        folder = Path(tempfile.mkdtemp(prefix=f"hpo-chaos-{kind}-"))
        if blow(kind, folder, arguments):
            shutil.rmtree(folder)
        else:
            sound = False
            print(f"everything is kept in {folder}")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
