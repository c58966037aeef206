"""Processes that work on a study as workers do, without training anything."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import optuna

from hpo.errors import BudgetExhaustedError
from hpo.storage.ledger import Owner
from tests.support.commands import PATIENCE
from tests.support.owners import forked, load, opened


def work(url: str, seed: int, pause: float = 0.0) -> None:
    """A worker's life: ask and tell until the budget is exhausted."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with opened(url, owner=Owner.current(worker=str(seed))) as storage:
        study = load(storage, seed)
        with contextlib.suppress(BudgetExhaustedError):
            while True:
                trial = study.ask()
                value = trial.suggest_float("x", 0, 1)
                for step in (1, 2):
                    trial.report(value, step)
                    time.sleep(pause)
                study.tell(trial, value)


def start(count: int, target: Callable[..., None], *args: Any) -> list[Any]:
    processes = [forked.Process(target=target, args=(args[0], i, *args[1:])) for i in range(count)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[Any]) -> None:
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    for process in processes:
        process.close()
