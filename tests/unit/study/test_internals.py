"""What was asked for stands first; predictions and internals apart, in words and in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from hpo.study.internals import UNASKED, parted_metrics, unasked_metrics, wanted_metrics
from hpo.study.open_study import OpenStudy
from hpo.study.trial_entries import study_trials
from hpo.trial.callbacks import CALLBACKS
from tests.support.commands import hpo, hpo_json
from tests.support.finished import finished_study
from tests.support.studies import Studies, take


def test_unasked_is_what_the_default_callbacks_record() -> None:
    written = {name for row in CALLBACKS.values() if row.default for name in row.kind.writes}
    assert written | {"lr"} == UNASKED


def test_what_is_optimised_or_bounded_is_asked_for(studies: Studies) -> None:
    metrics = {"val_loss": 1.0, "lr": 0.1, "max_grad_norm": 2.0, "of_my_own": 3.0}
    asked = {"val_loss": 1.0, "of_my_own": 3.0}
    assert parted_metrics(studies.spec(), metrics) == (asked, {"lr": 0.1, "max_grad_norm": 2.0})
    bounded = studies.spec("study.constraints={max_grad_norm: '<= 10'}")
    assert parted_metrics(bounded, metrics) == (asked | {"max_grad_norm": 2.0}, {"lr": 0.1})


@pytest.mark.parametrize(
    "overrides",
    [
        ("study.metric=lr", "study.direction=minimize"),
        ("study.constraints={lr: '<= 1'}",),
        ("study.objectives={lr: minimize, x: minimize}", "study.pruner=none"),
    ],
)
def test_a_stored_config_asks_for_the_same(studies: Studies, overrides: tuple[str, ...]) -> None:
    spec = studies.spec(*overrides)
    assert unasked_metrics(spec.base_config()) == UNASKED - wanted_metrics(spec) == UNASKED - {"lr"}


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[OpenStudy]:
    with finished_study(tmp_path_factory.mktemp("study"), ready_sqlite_file, n_trials=2) as opened:
        yield opened


def test_best_has_them_in_a_block_of_their_own(view: OpenStudy) -> None:
    asked, _, kept = hpo("best", view.spec.path).stdout.partition("predictions and internals")
    for name in ("val_loss", "train_loss", "optimizer.lr", "model.hidden"):
        assert name in asked
        assert name not in kept
    assert "max_grad_norm" not in asked
    assert {line.split()[0] for line in kept.splitlines()[1:-1]} >= {"max_grad_norm", "lr", "seed"}
    best = hpo_json("best", view.spec.path)
    assert UNASKED.isdisjoint(best["metrics"])
    assert {"max_grad_norm", "lr"} <= set(best["internals"]["metrics"])


def test_trials_has_them_in_a_second_table_on_demand(view: OpenStudy) -> None:
    plain = hpo("trials", view.spec.path).stdout
    both = hpo("trials", view.spec.path, "--internals").stdout
    assert "attempts" not in plain
    assert both.startswith(plain)
    header, *rows = both.removeprefix(plain).strip().splitlines()[1:]
    assert {"trial", "attempts", "worker", "seed", "max_grad_norm"} <= set(header.split())
    assert [row.split()[:2] for row in rows] == [["0", "1"], ["1", "1"]]
    first = hpo_json("trials", view.spec.path)[0]
    assert UNASKED.isdisjoint(first["metrics"])
    assert (len(first["internals"]["attempts"]), "attempts" in first) == (1, False)
    assert "leave it out" in hpo("trials", view.spec.path, "--internals", "--json", code=2).stderr


def test_the_seed_of_a_trial_that_waits_is_the_one_that_it_was_queued_with(studies: Studies) -> None:
    with studies.open("search_space={trainer.seed: {type: int, low: 5, high: 9}}") as (view,):
        view.study.enqueue_trial({"trainer.seed": 7})
        view.study.enqueue_trial({"trainer.seed": 70, "trainer.sead": 7})  # by another tool, which knows no space
        assert [entry["internals"]["seed"] for entry in study_trials(view)] == [7, view.trial_seed(1, {})]
        taken = take(view)
        assert isinstance(taken, optuna.Trial)
        assert view.trial_seed(0, view.space.suggest(taken)) == 7
