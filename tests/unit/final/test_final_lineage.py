"""Final training of a fork: on from its own best epoch, or from scratch along all trials that it came from."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpo.final.seed_run import SeedTrainer
from hpo.final.starting import start_of_trial
from hpo.final.training import train_at, train_final
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from tests.support.forking import RATE, ForkOnce
from tests.support.studies import Studies
from tests.unit.study.test_forking import OVERRIDES, checkpoint, run_all, trials_of
from tests.unit.trainer.support import assert_same
from trainer.checkpoint.manager import newest_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
EVERY = ("callbacks={checkpoint: {max_overhead: 1, keep_last: 9}}",)


def forked_study(studies: Studies) -> OpenStudy:
    with studies.open(*OVERRIDES, *EVERY) as (view,):
        run_all(replace(view, scheduler=ForkOnce()))
        return view


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as lines:
        return [float(row["val_loss"]) for row in csv.DictReader(lines)]


def test_from_scratch_it_is_trained_as_the_study_trained_it(studies: Studies) -> None:
    view = forked_study(studies)
    parent, _, fork = trials_of(view)
    start = start_of_trial(view, "2", from_scratch=True)
    assert [(stage.trial, stage.until, stage.params[RATE]) for stage in start.stages] == [
        (0, 2, parent.params[RATE]),
        (2, None, 0.02),
    ]
    result = train_final(Builder(view.spec), start, epochs=None, device=CPU)
    expected = [parent.intermediate_values[step] for step in (1, 2)]
    expected += [fork.intermediate_values[step] for step in (3, 4, 5)]
    folder = view.spec.output_dir / "final"
    assert losses(folder) == expected
    assert result["value"] == min(expected)
    assert result["best_epoch"] == expected.index(min(expected)) + 1
    newest = newest_checkpoint([folder / "checkpoints"])
    assert newest is not None
    for part in ("model", "optimizer", "scheduler"):
        assert_same(newest[1][part], checkpoint(view, 2, 5)[part])


def test_the_best_epoch_of_the_whole_may_be_one_of_the_parents(studies: Studies) -> None:
    with studies.open(*OVERRIDES, *EVERY) as (view,):
        run_all(replace(view, scheduler=ForkOnce(changes=((RATE, 1e-3),))))
        start = start_of_trial(view, "2", from_scratch=True)
        spoilt = replace(start, params={**start.params, RATE: 0.1}, lineage=start.lineage)
        builder = Builder(view.spec)
        result = train_final(builder, spoilt, epochs=None, device=CPU)
        values = losses(view.spec.output_dir / "final")
        assert result["value"] == min(values)
        assert result["metrics"]["val_loss"] == pytest.approx(min(values), abs=1e-6)


@pytest.mark.parametrize("epoch", [1, 2, 3, 4])
def test_interrupted_anywhere_it_resumes_in_the_stage_where_it_was(epoch: int, studies: Studies) -> None:
    view = forked_study(studies)
    start, builder = start_of_trial(view, "2", from_scratch=True), Builder(view.spec)
    whole, cut = (RunPlace(view.spec.output_dir / name, name) for name in ("whole", "cut"))
    train_at(builder, start, whole, epochs=None, device=CPU)
    cut.checkpoints.mkdir(parents=True)
    shutil.copy(whole.checkpoints / f"epoch-{epoch:05d}.pt", cut.checkpoints)
    train_at(builder, start, cut, epochs=None, device=CPU)
    one, other = (newest_checkpoint([place.checkpoints]) for place in (whole, cut))
    assert one is not None
    assert other is not None
    assert_same({**one[1], "rng": 0}, {**other[1], "rng": 0})


def test_with_fewer_epochs_the_lineage_ends_earlier(studies: Studies) -> None:
    view = forked_study(studies)
    start = start_of_trial(view, "2", from_scratch=True)
    assert train_final(Builder(view.spec), start, epochs=1, device=CPU)["epochs"] == 1
    assert train_final(Builder(view.spec), start, epochs=7, device=CPU)["epochs"] == 7


def test_on_from_its_checkpoint_it_trains_with_its_own_parameters(studies: Studies) -> None:
    view = forked_study(studies)
    fork = trials_of(view)[2]
    start = start_of_trial(view, "2", from_scratch=False)
    best = min(fork.intermediate_values, key=fork.intermediate_values.__getitem__)
    assert (start.epoch, [stage.trial for stage in start.stages]) == (best, [2])
    assert train_final(Builder(view.spec), start, epochs=2, device=CPU)["epochs"] == best + 2


def test_seeds_train_the_whole_lineage_each_with_its_own(studies: Studies) -> None:
    view = forked_study(studies)
    start = start_of_trial(view, "2", from_scratch=True)
    assert [stage.seed for stage in start.with_seed(5).stages] == [5, 5]
    trainer = SeedTrainer(Builder(view.spec), None, CPU)
    runs = [trainer.run(start, seed, "test") for seed in (5, 6, 5)]
    assert [run.epochs for run in runs] == [5, 5, 5]
    assert runs[0].value != runs[1].value
    assert (runs[2].value, runs[2].trained_before) == (runs[0].value, True)
