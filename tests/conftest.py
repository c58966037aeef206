"""What all tests share, and which of them `make test` leaves to `make test-all`."""

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread a test: the suite runs in parallel, and bit-exactness holds at an equal number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# `nohup`, or a shell's `&`, hands "ignore this signal" down to all processes: tests that send it wait in vain.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

from hpo.console import slow
from hpo.storage.ledger import Owner
from hpo.storage.study_storage import StudyStorage
from tests.support.in_process import workers_in_process
from tests.support.owners import make_study, opened
from tests.support.studies import Studies

pytest_plugins = ["tests.support.databases", "tests.support.slurm_cluster", "tests.support.ray_cluster"]

#: Databases that are programs of their own, as tests name them.
_SERVERS = ("postgresql", "mariadb")
_HERE = Path(__file__).parent
#: What is all of the full suite: whole studies as a person runs them, and what needs large libraries of others.
_FULL = (
    _HERE / "acceptance",
    _HERE / "unit" / "integrations",
    _HERE / "unit" / "trainer" / "callbacks" / "test_save_pretrained.py",
)
#: What lies there takes long: it is begun with, a process takes whole files of it, and these before all others.
_LONG = (_HERE / "acceptance", _HERE / "integration")
_LONGEST = ("test_ray.py", "test_ray_page.py", "test_slurm_study.py", "test_chaos.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave those unread where the full suite is left out: to import what they need takes seconds."""
    return True if config.option.markexpr == "not full" and collection_path in _FULL else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark what lies there, or needs a server, as part of the full suite; begin with what takes longest."""
    for item in items:
        if any(map(item.path.is_relative_to, _FULL)) or _needs_a_server(item):
            item.add_marker("full")
    yield  # what `-m` leaves out is gone then
    items[:] = _dealt(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in an order in which no process is left alone with a long one at the end.

    Each process of pytest-xdist is given an equal run of the list, and steals from the ends of others' runs later:
    each run begins with its share of the long files. A file stays together, as its tests may share a cluster.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long = [path for path in files if any(map(path.is_relative_to, _LONG))]
    long.sort(key=lambda path: _LONGEST.index(path.name) if path.name in _LONGEST else len(_LONGEST))
    rest = itertools.chain.from_iterable(tests for path, tests in files.items() if path not in long)
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        for path in long[worker::workers]:
            dealt += files[path]
        end = len(items) * (worker + 1) // workers
        dealt += itertools.islice(rest, max(0, end - len(dealt)))
    return dealt


def pytest_sessionstart() -> None:
    """Look for no garbage during the collection: almost all stays, and visiting it takes a sixth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take what the collection made out of the garbage collector's sight: modules and thousands of tests stay.

    Without this each full collection of each test visits them all.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_visited() -> Iterator[None]:
    """Nor what a module's tests have imported: each collection that a later test asks for would visit it."""
    yield
    gc.collect()
    gc.freeze()


def _needs_a_server(item: pytest.Item) -> bool:
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    asked = {"postgres_server", "mariadb_server", "slurm_cluster", "ray_cluster"} & set(
        getattr(item, "fixturenames", ())
    )
    return bool(asked) or any(isinstance(value, str) and value in _SERVERS for value in given)


@pytest.fixture(autouse=True)
def steps_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name no step for taking long on a busy machine: tests compare what they print."""
    monkeypatch.setattr(slow, "SILENCE", 3600.0)


@pytest.fixture
def studies(tmp_path: Path, ready_sqlite_file: Path) -> Studies:
    """Studies in the test's own folder."""
    return Studies(tmp_path, ready_sqlite_file)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes on one thread: bits that are compared with those of a process that has one."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture
def two_owners(ready_url: str) -> Iterator[tuple[StudyStorage, StudyStorage]]:
    """Two workers' storages on one study with a budget of 10."""
    make_study(ready_url, 10)
    with (
        opened(ready_url, owner=Owner.current(worker="a")) as first,
        opened(ready_url, owner=Owner.current(worker="b")) as second,
    ):
        yield first, second


@pytest.fixture
def in_process() -> Iterator[None]:
    """`hpo run` and `hpo.run` use threads of this process as workers: where no process is the point."""
    with workers_in_process():
        yield
