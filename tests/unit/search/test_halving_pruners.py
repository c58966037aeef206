"""Pruners that halve decide by what trials had at the rungs as Optuna's do by whole trials."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import optuna
import pytest
from optuna import pruners
from optuna.trial import TrialState

from hpo.search.halving_pruners import BracketsFirstHyperbandPruner, LooksAhead, RungsPruner
from hpo.storage.cache import StudyCache
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import id_of_study

pytestmark = pytest.mark.full

NAME = "same"  # brackets are drawn by it
EPOCHS = 9


def hyperband(kind: Any) -> Any:
    return kind(min_resource=1, max_resource=EPOCHS, reduction_factor=3)


PAIRS: dict[str, tuple[Any, Any]] = {
    "first rung given": (lambda kind: kind(min_resource=1, reduction_factor=2), RungsPruner),
    "first rung found": (lambda kind: kind(reduction_factor=3), RungsPruner),
    "hyperband": (hyperband, BracketsFirstHyperbandPruner),
}
_ON_SERVERS = (("hyperband", "minimize"), ("first rung found", "maximize"))
#: What is asked of a database is the same for all pairs, but for the order of values.
CASES = [
    *(("sqlite", pair, direction) for pair in PAIRS for direction in ("minimize", "maximize")),
    *((kind, pair, direction) for kind in ("postgresql", "mariadb") for pair, direction in _ON_SERVERS),
]


@pytest.mark.parametrize(("ready_url", "pair", "direction"), CASES, indirect=["ready_url"])
def test_decisions_are_those_by_whole_trials(
    ready_url: str, pair: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kind = PAIRS[pair]
    plain = make(pruners.HyperbandPruner if pair == "hyperband" else pruners.SuccessiveHalvingPruner)
    expected = optuna.create_study(study_name=NAME, direction=direction, pruner=plain)
    # Two workers, each with a pruner and a cache of its own.
    opened = [open_storage(ready_url, create=False, owner=Owner.current()) for _ in range(2)]
    optuna.create_study(study_name=NAME, direction=direction, storage=opened[0])
    studies = [
        optuna.load_study(study_name=NAME, storage=StudyCache(storage, most=4), pruner=make(kind))
        for storage in opened
    ]
    for study in studies:
        monkeypatch.setattr(study, "get_trials", None)  # whole trials are not asked for
    rng, running, decided = random.Random(7), list[Any](), set[bool]()
    with closing(opened[0]), closing(opened[1]):
        for _ in range(220):
            if len(running) < 4:
                worker = rng.randrange(2)
                opened[worker].set_budget(id_of_study(studies[worker]), 10**6)
                pruner = studies[worker].pruner
                assert isinstance(pruner, LooksAhead)
                pruner.look_ahead(studies[worker])
                running.append((expected.ask(), studies[worker].ask(), worker, 0))
            other, ours, worker, epoch = running.pop(rng.randrange(len(running)))
            value = rng.choice([float("inf"), float("nan"), *(rng.random() for _ in range(12))])
            for trial in (other, ours):
                trial.report(value, epoch + 1)
            prune = other.should_prune()
            assert ours.should_prune() == prune
            decided.add(prune)
            if prune or epoch + 1 == EPOCHS:
                state = TrialState.PRUNED if prune else TrialState.COMPLETE
                values = None if prune else [rng.random()]
                expected.tell(other, values, state)
                studies[worker].tell(ours, values, state)
            else:
                running.append((other, ours, worker, epoch + 1))
    assert decided == {True, False}


def test_in_memory_they_are_optunas() -> None:
    study = optuna.create_study(pruner=RungsPruner(min_resource=1, reduction_factor=2))
    for value in (1.0, 3.0, 0.5):
        trial = study.ask()
        trial.report(value, 1)
        assert trial.should_prune() == (value == 3.0)
