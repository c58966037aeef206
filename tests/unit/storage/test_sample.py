"""A worker that joins a very large study reads a sample of it, and keeps to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from hpo.config.space import SearchSpace
from hpo.config.spec import load_spec
from hpo.search.history import MOST, most_shown
from hpo.storage.cache import StudyCache, look_age
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import REPORTS, TRIALS, id_of_study
from hpo.storage.sample import BEST, stride
from hpo.storage.study_storage import StudyStorage
from tests.support.big_study import make_big_study

TRIALS_STORED = 1_000
SHOWN = 100


@pytest.fixture(params=[StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE], ids=["minimize", "maximize"])
def large(request: pytest.FixtureRequest, ready_url: str) -> Iterator[tuple[StudyStorage, optuna.Study]]:
    """A study of so many trials with a report each, the values in no order, one in a hundred infinite."""
    storage = open_storage(ready_url, create=False)
    study = optuna.create_study(storage=storage, directions=[request.param])
    template = create_trial(value=0.0, intermediate_values={1: 0.0})
    first = storage.create_new_trial(id_of_study(study), template)
    with storage.engine.begin() as conn:
        row = dict(conn.execute(sa.select(TRIALS)).mappings().one())
        numbers = range(1, TRIALS_STORED)
        ids = {number: first + number for number in numbers}
        conn.execute(sa.insert(TRIALS), [row | {"number": n, "trial_id": ids[n]} for n in numbers])
        values = [_value(ids[number], value_of(number)) for number in numbers]
        conn.execute(sa.insert(sa.Table("trial_values", sa.MetaData(), autoload_with=conn)), values)
        reports = {"step": 1, "intermediate_value": 0.5, "intermediate_value_type": "FINITE"}
        conn.execute(sa.insert(REPORTS), [reports | {"trial_id": trial_id} for trial_id in ids.values()])
        if storage.engine.name == "postgresql":
            conn.execute(sa.text(f"SELECT setval('trials_trial_id_seq', {max(ids.values())})"))
    with closing(storage):
        yield storage, study


def value_of(number: int) -> float:
    """A trial's value."""
    return float("inf") if number % 100 == 99 else (number * 7919) % TRIALS_STORED + 0.5


def _value(trial_id: int, value: float) -> dict[str, object]:
    kind = "INF_POS" if value == float("inf") else "FINITE"
    return {
        "trial_id": trial_id,
        "objective": 0,
        "value": None if kind == "INF_POS" else value,
        "value_type": kind,
    }


def expected(study: optuna.Study, trials: int) -> set[int]:
    """The numbers of the sample, worked out from all values."""
    every = stride(trials, SHOWN)
    finite = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
    finite = [trial for trial in finite if trial.values[0] < float("inf")]
    finite.sort(key=lambda trial: trial.values[0], reverse=study.direction == StudyDirection.MAXIMIZE)
    even = {trial.number for trial in study.get_trials(deepcopy=False) if trial.number % every == 0}
    return even | {trial.number for trial in finite[:BEST]}


def numbers(cache: StudyCache, study: optuna.Study) -> set[int]:
    """What a cache shows of the finished trials."""
    return {trial.number for trial in cache.get_all_trials(id_of_study(study), deepcopy=False)}


def test_a_newcomer_and_one_who_saw_all_of_it_have_the_same_sample(
    large: tuple[StudyStorage, optuna.Study],
) -> None:
    """Both show the even sample and the best, whenever they came; unfinished trials are all shown."""
    storage, study = large
    early = StudyCache(storage, most=SHOWN)
    assert numbers(early, study) == expected(study, TRIALS_STORED)
    for value in (-1.0, 1e6, 17.0):  # the best, or the worst, by the direction
        storage.set_trial_state_values(storage.create_new_trial(id_of_study(study)), TrialState.COMPLETE, [value])
        numbers(early, study)
    running = [storage.get_trial_number_from_id(storage.create_new_trial(id_of_study(study))) for _ in range(3)]
    late = StudyCache(storage, most=SHOWN)
    whole = {trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))}
    assert numbers(early, study) == numbers(late, study)
    assert numbers(late, study) - set(running) == expected(study, TRIALS_STORED + 6) & whole
    assert set(running) <= numbers(late, study)


def test_paused_trials_are_sampled_too_and_followed_without_asking_for_them(ready_url: str) -> None:
    """A scheduler leaves most trials paused; only one that resumes is looked at again."""
    with (
        closing(open_storage(ready_url, create=False, owner=Owner.current())) as worker,
        closing(open_storage(ready_url, create=False)) as storage,
    ):
        study = optuna.create_study(storage=worker)
        early = StudyCache(storage, most=8)
        ids = []
        for number in range(30):
            ids.append(worker.create_new_trial(id_of_study(study)))
            worker.set_trial_intermediate_value(ids[-1], 1, float(number))
            if number % 3:
                worker.pause(ids[-1], 1)
            numbers(early, study)
        running = set(range(0, 30, 3))
        late = StudyCache(storage, most=8)
        assert numbers(early, study) == numbers(late, study) == running | set(range(0, 30, 4))
        found: list[set[int]] = []
        read = storage.read_changes_since

        def noted(*given: Any, **more: Any) -> Any:
            look = read(*given, **more)
            found.append({row.trial_id for row in look[2]})
            return look

        storage.read_changes_since = noted  # type: ignore[method-assign]
        assert worker.resume(ids[1])
        assert worker.resume(ids[4])
        worker.set_trial_intermediate_value(ids[4], 2, 7.0)
        worker.pause(ids[4], 2)
        assert numbers(early, study) == running | {1} | set(range(0, 30, 4))
        assert found[0] == {ids[number] for number in running | {1, 4}}
        numbers(early, study)
        assert found[1] == {ids[number] for number in running | {1}}
        shown = {trial.number: trial for trial in early.get_all_trials(id_of_study(study))}
        assert shown[4].intermediate_values == {1: 4.0, 2: 7.0}


def test_the_sample_halves_where_the_study_has_doubled(ready_url: str) -> None:
    """A worker that stays does not grow; below the bound all is shown."""
    with closing(open_storage(ready_url, create=False)) as storage:
        study = optuna.create_study(storage=storage)
        cache, most = StudyCache(storage, most=4), 4
        for number in range(60):
            study.add_trial(create_trial(value=float(number)))
            shown = numbers(cache, study)
            if number < most:
                assert shown == set(range(number + 1))
            best = set(range(min(BEST, number + 1)))
            assert shown == best | set(range(0, number + 1, stride(number + 1, most)))


@pytest.mark.parametrize(("trials", "step"), [(1, 1), (100, 1), (101, 2), (200, 2), (201, 4), (50_000, 512)])
def test_stride(trials: int, step: int) -> None:
    """The least power of two, or the one above it, that leaves no more than the bound."""
    assert stride(trials, 100) == step
    assert len(range(0, trials, step)) <= 100 + (step == 1)


def test_looks_of_many_workers_cost_in_proportion_to_them() -> None:
    """The age of a look grows with the trials that it has to ask about; without one each look is new."""
    assert look_age(0.2, 8) == 0.2
    assert look_age(0.2, 1_000) == 2 * look_age(0.2, 500) == 20.0
    assert look_age(0.0, 1_000) == 0.0


@pytest.mark.parametrize(
    ("overrides", "whole"),
    [
        ("study.n_trials=7", False),
        ("study.sampler.name=random", False),
        ("study.sampler.name=TPESampler", False),
        ("study.sampler.name=NSGAIISampler", True),
        ("study.pruner={name: none}", False),
        ("study.pruner={name: NopPruner}", False),
        ("study.pruner={name: MedianPruner}", False),
        ("study.pruner={name: PatientPruner, patience: 3, wrapped_pruner: Median}", False),
        ("study.pruner={name: hyperband}", False),
        ("study.pruner={name: successive_halving}", False),
        ("study.pruner={name: wilcoxon}", False),
        ("study.pruner={name: predicted_loss}", True),
        ("study.pruner={name: patient, patience: 3, wrapped_pruner: {name: median}}", False),
        ("study.pruner={name: patient, patience: 3, wrapped_pruner: {name: predicted_loss}}", True),
        ("study.sampler={name: nsgaii}", True),
        ("study.duplicates=reuse", True),
        ("study.constraints={val_accuracy: '>= 0.5'}", True),
        ("study.epochs=700", False),
        ("study.pruner=null; study.scheduler=asha", False),
        ("study.pruner=null; study.scheduler=hyperband", False),
        ("study.pruner=null; study.scheduler=freeze_thaw", True),
    ],
)
def test_what_needs_single_trials_is_shown_all_of_them(tmp_path: Path, overrides: str, whole: bool) -> None:
    """A grid's order, a population and duplicates are in trials that a sample may lack."""
    spec = load_spec(make_big_study(tmp_path, 1, epochs=5), overrides.split("; "))
    assert most_shown(spec, SearchSpace.from_spec(spec)) == (None if whole else MOST)
