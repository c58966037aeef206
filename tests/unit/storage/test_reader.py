"""The reader of whole trials reads what Optuna reads, and the hot path takes the statements it is meant to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.storage import id_lists, trial_rows
from hpo.storage.cache import StudyCache
from hpo.storage.ledger import Owner
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import NAME, make_study, opened, study_id

SPACE: dict[str, BaseDistribution] = {
    "rate": FloatDistribution(1e-5, 1.0, log=True),
    "units": IntDistribution(1, 9, step=2),
    "kind": CategoricalDistribution(("a", 2, None, True, 0.5)),
}


@pytest.fixture
def storage(ready_url: str) -> Iterator[StudyStorage]:
    make_study(ready_url, 2000)
    with opened(ready_url, owner=Owner.current()) as storage:
        yield storage


def fill(storage: StudyStorage) -> None:
    """Trials in each state, with everything that a trial can have."""
    study = optuna.load_study(study_name=NAME, storage=storage)
    for i, state in enumerate([*TrialState, TrialState.COMPLETE, TrialState.COMPLETE]):
        finished, complete = state.is_finished(), state == TrialState.COMPLETE
        trial = create_trial(
            state=state,
            value=[math.inf, -math.inf, 0.1 + i][i % 3] if complete else None,
            params={"units": 1 + 2 * (i % 4), "rate": 0.1 / (i + 1), "kind": ("a", 2, None, True, 0.5)[i % 5]},
            distributions=SPACE,
            user_attrs={"text": "ü'%:{}", "deep": {"list": [1, None]}},
            system_attrs={"rung": i},
            intermediate_values={3: math.nan, 1: math.inf, 2: -math.inf, 10: i / 7},
        )
        trial.datetime_start = datetime(2026, 7, 1, 12, 0, i, 123456)
        trial.datetime_complete = datetime(2026, 12, 1, 12, 0, i, 654321) if finished else None
        study.add_trial(trial)


def shown(trials: list[FrozenTrial]) -> list[str]:
    """Trials as text, for NaN is not equal to itself. The order of parameters counts, other orders don't."""
    for trial in trials:
        trial.intermediate_values = dict(sorted(trial.intermediate_values.items()))
        trial.user_attrs = dict(sorted(trial.user_attrs.items()))
        trial.system_attrs = dict(sorted(trial.system_attrs.items()))
    return [repr(trial) for trial in trials]


def test_trials_are_read_as_optuna_reads_them(storage: StudyStorage) -> None:
    fill(storage)
    study = study_id(storage)
    optunas = RDBStorage._get_trials(storage, study, None, set(), -1)
    assert shown(storage._get_trials(study, None, set(), -1)) == shown(optunas)
    one_by_one = [storage.get_trial(trial._trial_id) for trial in optunas]
    assert shown(one_by_one) == shown(optunas)
    assert [storage.get_trial_system_attrs(trial._trial_id) for trial in optunas] == [
        trial.system_attrs for trial in optunas
    ]


@pytest.mark.parametrize("chunk", [1, 3])
def test_many_trials_are_read_in_several_statements(
    storage: StudyStorage, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    fill(storage)
    study = study_id(storage)
    expected = shown(storage._get_trials(study, None, set(), -1))
    ids = [trial._trial_id for trial in storage.get_all_trials(study)]
    monkeypatch.setattr(id_lists, "AT_ONCE", chunk)
    monkeypatch.setattr(trial_rows, "_WHOLE_AT_ONCE", chunk)
    assert shown(storage._get_trials(study, None, set(), -1)) == expected
    among = storage._get_trials(study, None, {ids[0], ids[2]}, ids[4])
    assert [trial._trial_id for trial in among] == [ids[0], ids[2], *ids[5:]]


def test_a_trial_that_is_not_there_is_a_key_error(storage: StudyStorage) -> None:
    for read in (storage.get_trial, storage.get_trial_system_attrs):
        with pytest.raises(KeyError):
            read(12345)
    for get_all in (storage.get_all_trials, StudyCache(storage).get_all_trials):
        with pytest.raises(KeyError):
            get_all(12345)


@contextmanager
def statements(engine: sa.Engine) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


def test_the_hot_path_takes_few_statements(storage: StudyStorage) -> None:
    """Plain Optuna takes 17 to ask, 2 to suggest, 3 to report, 7 to ask whether to prune and 16 to tell."""
    study = optuna.load_study(
        study_name=NAME,
        storage=StudyCache(storage),
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
    )
    counted: dict[str, int] = {}

    def count(name: str, operation: Callable[[], Any]) -> Any:
        with statements(storage.engine) as seen:
            result = operation()
        counted[name] = len(seen)
        return result

    for _ in range(4):  # the first of a process looks more up
        trial = count("ask", study.ask)
        count("suggest", lambda: trial.suggest_float("x", 0, 1))  # noqa: B023
        for step in (1, 2):
            count("report", lambda: trial.report(0.5, step))  # noqa: B023
            count("should_prune", trial.should_prune)
        count("waiting", lambda: study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))
        count("system attributes", lambda: storage.get_trial_system_attrs(trial._trial_id))  # noqa: B023
        count("tell", lambda: study.tell(trial, 1.0))  # noqa: B023
    most = {
        "ask": 10,
        "suggest": 1,
        "report": 1,
        "should_prune": 1,
        "waiting": 1,
        "system attributes": 1,
        "tell": 9,
    }
    assert {name: number for name, number in counted.items() if number > most[name]} == {}
