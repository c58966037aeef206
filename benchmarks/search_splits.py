"""The tasks of search.py by their names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from search_rugged import SHAPES, Rugged
from search_tasks import Formula, LCBench, Structured, Table, Task, surrogate

_STRUCTURED: Final = ("choices", "branches", "layers")


def split(name: str, data: Path | None) -> list[Task]:
    """`lc`, `ce` (LCBench: error, cross-entropy), `ts` (tables), or a kind of formula; or half of the instances.

    ``lc:0`` are the instances at even places, ``lc:1`` those at odd ones: to develop on, and to hold out. A task's
    own name, as in ``formula-cross-1``, is that task alone, and ``rugged-power`` all whose names begin so.
    """
    kind, _, half = name.partition(":")
    kind, _, which = kind.partition("-")
    tasks = [task for task in _tasks(kind, data) if not which or f"{task.name}-".startswith(f"{kind}-{which}-")]
    if not tasks:
        raise SystemExit(f"no task is named `{name}`")
    return tasks[int(half) :: 2] if half else tasks


def _tasks(kind: str, data: Path | None) -> Iterator[Task]:
    if kind == "formula":
        for each in ("agree", "silent", "cross", "hidden"):
            yield from (Formula(each, instance) for instance in range(4))
        return
    if kind == "rugged":
        for each in SHAPES:
            yield from (Rugged(each, instance) for instance in range(4))
        return
    if kind == "failing":
        yield from (Rugged(kind, instance) for instance in range(4))
        return
    if kind in _STRUCTURED:
        yield from (Structured(kind, instance) for instance in range(6))
        return
    if data is None:
        raise SystemExit(f"the tasks `{kind}` need --data FOLDER with lcbench/ and learning_curves/")
    if kind in ("lc", "ce"):
        folder = data / "lcbench"
        yield from (LCBench(folder, each, kind) for each in surrogate(folder)[1]["instances"])
    elif kind == "ts":
        yield from (Table(path) for path in sorted((data / "learning_curves").glob("*.npz")))
    else:
        raise SystemExit(
            f"no tasks are named `{kind}`: there are lc, ce, ts, formula, rugged, failing, choices, branches and "
            "layers"
        )
