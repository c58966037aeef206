"""The bridge between a real Trainer and a real trial: reports, questions, decisions, and what a resume finds."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hpo.storage.attributes import PRUNED_ATTR
from hpo.study.open_study import OpenStudy
from hpo.trial.pruner_callback import PrunerCallback
from hpo.trial.reports import Reports
from tests.support.attempts import AskedAt
from tests.support.studies import Studies, ask, session_of
from trainer import Trainer
from trainer.callbacks import CSVLogging, NaNDetection
from trainer.state import DIVERGED, PRUNED

DATA = TensorDataset(torch.zeros(1, 1), torch.zeros(1, 1))


class Losses:
    """A step whose validation losses are given, by epoch."""

    def __init__(self, losses: Sequence[float]) -> None:
        self.losses, self.trainer = losses, None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.trainer is not None
        value = 1.0 if model.training else self.losses[self.trainer.state.epoch]
        return sum(parameter.sum() * 0 for parameter in model.parameters()) + torch.tensor(value)


def make_trainer(
    view: OpenStudy, trial: optuna.Trial, losses: Sequence[float], *, kind: type[Reports] = Reports
) -> Trainer:
    model, step = nn.Linear(1, 1), Losses(losses)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters()),
        step=step,
        callbacks=[NaNDetection(), CSVLogging(view.spec.output_dir / "metrics.csv")],
        core_callbacks=[PrunerCallback(session_of(view, trial, kind=kind))],
        max_epochs=len(losses),
        device="cpu",
    )
    step.trainer = trainer
    return trainer


def stored(view: OpenStudy, trial: optuna.Trial) -> dict[int, float]:
    return view.storage.get_trial(trial._trial_id).intermediate_values


def in_history(trainer: Trainer) -> dict[int, float]:
    return {epoch: item["val_loss"] for epoch, item in enumerate(trainer.state.history, start=1)}


def test_the_last_epoch_of_a_pruned_trial_is_everywhere_before_it_ends(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.pruner = AskedAt(prune_at=2)
        trial, _ = ask(view)
        trainer = make_trainer(view, trial, [3.0, 2.0, 1.0])
        with pytest.raises(optuna.TrialPruned, match="after epoch 2"):
            trainer.fit(DATA, DATA)
        assert in_history(trainer) == stored(view, trial) == {1: 3.0, 2: 2.0}
        assert trainer.state.stop_reason == PRUNED
        with (view.spec.output_dir / "metrics.csv").open() as file:
            assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]
        assert view.storage.get_trial(trial._trial_id).user_attrs[PRUNED_ATTR] == 2


def test_each_finished_epoch_is_asked_about_once(studies: Studies) -> None:
    with studies.open() as (view,):
        pruner = view.study.pruner = AskedAt()
        trial, _ = ask(view)
        make_trainer(view, trial, [3.0, 2.0, 1.0]).fit(DATA, DATA)
        assert pruner.steps == [1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_epoch_is_reported_but_not_asked_about(studies: Studies, bad: float) -> None:
    with studies.open() as (view,):
        pruner = view.study.pruner = AskedAt(prune_at=2)
        trial, _ = ask(view)
        trainer = make_trainer(view, trial, [3.0, bad, 1.0])
        trainer.fit(DATA, DATA)
        assert trainer.state.stop_reason == DIVERGED
        assert pruner.steps == [1]
        assert str(stored(view, trial)) == str({1: 3.0, 2: bad})


def test_successive_halving_does_not_take_a_diverged_trial_for_a_bad_one(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        for number, losses in enumerate(([1.0, 1.0], [math.nan, 1.0])):
            trial, _ = ask(view)
            trainer = make_trainer(view, trial, losses)
            trainer.fit(DATA, DATA)
            assert trainer.state.stop_reason == (DIVERGED if number else None)
            view.study.tell(trial, 1.0)
        trial, _ = ask(view)
        with pytest.raises(optuna.TrialPruned):  # as it does with a bad one
            make_trainer(view, trial, [5.0, 5.0]).fit(DATA, DATA)


@pytest.mark.parametrize(
    ("before", "finished"),
    [
        ({}, 2),  # killed between the checkpoint and the first report
        ({1: 3.0}, 2),
        ({1: 3.0, 2: 2.0}, 2),
        ({1: 3.0, 2: 2.0, 3: 1.0}, 1),  # killed between a report and its checkpoint
        ({1: 3.0, 2: 2.0}, 0),
        ({1: 9.0, 2: 9.0, 3: math.nan}, 2),  # another machine's numbers
        ({2: 2.0}, 2),
    ],
)
def test_a_resume_leaves_one_value_a_step_equal_to_the_history(
    studies: Studies, before: dict[int, float], finished: int
) -> None:
    losses = [3.0, 2.0, 1.0, 0.5]
    with studies.open() as (view,):
        view.study.pruner = AskedAt()
        trial, _ = ask(view)
        first = make_trainer(view, trial, losses[:finished])
        first.callbacks = type(first.callbacks)()
        first.fit(DATA, DATA)
        for step, value in before.items():
            trial.report(value, step)
        view.storage.requeue(trial._trial_id)
        trial, _ = ask(view)
        pruner = view.study.pruner = AskedAt()
        second = make_trainer(view, trial, losses)
        second.load_state_dict(first.state_dict())
        second.fit(DATA, DATA)
        assert stored(view, trial) == in_history(second) == dict(enumerate(losses, start=1))
        # Only the last stored one may have been left unasked by the crash.
        assert pruner.steps == [step for step in range(finished + 1, 5) if step >= max(before, default=0)]


@pytest.mark.parametrize(
    ("decided", "reported", "finished"),
    [(1, 1, 0), (1, 1, 1), (3, 3, 0), (3, 3, 1), (3, 3, 3), (2, 3, 1), (2, 3, 2), (2, 0, 0)],
)
def test_a_stored_decision_to_prune_holds_and_is_not_asked_for_again(
    studies: Studies, decided: int, reported: int, finished: int
) -> None:
    """The checkpoint may lie before the epoch that the trial was pruned at: its files are to hold that one too.

    So they are to hold one that was reported after it, by a decision that came late. Reports may be gone: an
    attempt that began anew, and diverged in its first epoch, deletes them, and may be killed before it ends.
    """
    losses = [3.0, 2.0, 1.0, 0.5]
    with studies.open() as (view,):
        trial, _ = ask(view)
        first = make_trainer(view, trial, losses[:finished])
        first.callbacks = type(first.callbacks)()
        first.fit(DATA, DATA)
        for step, value in enumerate(losses[:reported], start=1):
            trial.report(value, step)
        trial.set_user_attr(PRUNED_ATTR, decided)
        view.storage.requeue(trial._trial_id)
        trial, _ = ask(view)
        pruner = view.study.pruner = AskedAt()
        trainer = make_trainer(view, trial, losses)
        trainer.load_state_dict(first.state_dict())
        with pytest.raises(optuna.TrialPruned):
            trainer.fit(DATA, DATA)
        assert pruner.steps == []
        assert trainer.state.stop_reason == PRUNED
        ends = max(decided, reported)
        assert stored(view, trial) == in_history(trainer) == dict(enumerate(losses[:ends], start=1))
        view.study.tell(trial, state=TrialState.PRUNED)
        assert view.storage.get_trial(trial._trial_id).value == losses[ends - 1]


def test_without_a_pruner_nothing_is_asked(studies: Studies) -> None:
    with studies.open("study.pruner=none") as (view,):
        trial, _ = ask(view)
        make_trainer(view, trial, [3.0, 2.0]).fit(DATA, DATA)
        assert stored(view, trial) == {1: 3.0, 2: 2.0}
