"""Final training: what it starts from, how its schedule goes, and what it leaves."""

from __future__ import annotations

import errno
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpo.errors import StudyError
from hpo.final.learning_rates import learning_rate_plan
from hpo.final.starting import Start, start_of_base, start_of_trial
from hpo.final.training import train_at, train_final
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from tests.support.attempts import run
from tests.support.studies import Studies
from trainer import Trainer
from trainer.checkpoint.manager import newest_checkpoint

CPU = torch.device("cpu")


def train(view: OpenStudy, start: Start, epochs: int | None = None) -> dict[str, Any]:
    return train_final(Builder(view.spec), start, epochs=epochs, device=CPU)


def test_it_goes_on_from_the_best_epoch_and_keeps_the_best_of_both(studies: Studies) -> None:
    with studies.open() as (view,):
        report = run(view)
        start = start_of_trial(view, "best", from_scratch=False)
        assert start.checkpoint is not None
        assert start.epoch == 3
        result = train(view, start, 2)
        assert (result["epochs"], result["trial"]) == (5, 0)
        assert report.value is not None
        assert result["value"] <= report.value
        assert result["metrics"]["val_loss"] == pytest.approx(result["value"], abs=1e-6)
        folder = view.spec.output_dir / "final"
        assert json.loads((folder / "metrics.json").read_text()) == result
        weights = torch.load(folder / "model.pt", weights_only=True)
        assert set(weights) == set(start.checkpoint["model"])
        assert not list(folder.glob("*.part"))


def test_what_is_optimised_is_among_the_metrics_where_no_evaluation_gives_it(studies: Studies) -> None:
    with studies.open("study.metric=train_loss") as (view,):
        run(view)
        result = train(view, start_of_trial(view, "best", from_scratch=False), 1)
        assert result["metrics"]["train_loss"] == result["value"]
        assert result["metrics"]["val_loss"] != result["value"]


def test_when_no_later_epoch_is_better_the_weights_are_those_it_started_from(studies: Studies) -> None:
    space = "search_space={model.hidden: {type: int, low: 4, high: 4}}"
    with studies.open(space, "lr_scheduler=null") as (view,):
        run(view)
        start = start_of_trial(view, "0", from_scratch=False)
        assert start.checkpoint is not None
        worse = Start(start.name, 0, start.seed, {**start.params, "optimizer.lr": 1e3}, start.checkpoint)
        result = train(view, worse, 1)
        assert result["best_epoch"] == start.epoch
        weights = torch.load(result["model"], weights_only=True)
        assert all(torch.equal(weights[name], tensor) for name, tensor in start.checkpoint["model"].items())


def test_a_schedule_written_for_the_epochs_of_a_trial_spans_the_new_ones(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open() as (view,):
        run(view)
        start = start_of_trial(view, "0", from_scratch=False)
        train(view, start, 4)
        plan = capsys.readouterr().out
        assert "learning rate over 4 epochs, CosineAnnealingLR" in plan
        rows = (view.spec.output_dir / "final" / "metrics.csv").read_text().splitlines()
        rates = [float(row.split(",")[rows[0].split(",").index("lr")]) for row in rows[1:]]
        assert rates[3] == pytest.approx(start.params["optimizer.lr"])
        assert rates[3:] == sorted(rates[3:], reverse=True)
        train(view, start, 1)
        assert "learning rate over 1 epoch, CosineAnnealingLR" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("null", "learning rate: 0.01, constant"),
        ("{_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, interval: step}", "StepLR at each step"),
        ("{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}", "lower when val_loss stalls"),
        ("{_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.1}", "0.01 (epoch 1), 0.001 (epoch 2)"),
    ],
)
def test_it_says_how_the_learning_rate_will_go(
    studies: Studies, capsys: pytest.CaptureFixture[str], scheduler: str, line: str
) -> None:
    spec = studies.spec(f"lr_scheduler={scheduler}")
    train_final(Builder(spec), start_of_base(spec), epochs=2, device=CPU)
    assert line in capsys.readouterr().out


def test_it_says_where_the_optimizer_has_no_learning_rate(studies: Studies) -> None:
    spec = studies.spec("lr_scheduler=null")
    optimizer = SimpleNamespace(param_groups=[{"params": [], "lr": None}])
    plan: Any = SimpleNamespace(optimizer=optimizer)
    assert learning_rate_plan(Builder(spec), {}, plan) == ["learning rate: the optimizer finds its own"]


def test_a_schedule_with_a_rate_for_each_group_is_said_by_the_first_one(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = "optimizer.groups={'*.bias': {lr: 0.001}}"
    cycle = "{_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: [0.5, 0.05], total_steps: 2}"
    spec = studies.spec(groups, f"lr_scheduler={cycle}")
    train_final(Builder(spec), start_of_base(spec), epochs=2, device=CPU)
    assert "learning rate over 2 epochs, OneCycleLR: 0.406 (epoch 1), 2e-06 (epoch 2)" in capsys.readouterr().out


def test_a_searched_seed_is_that_of_the_training(studies: Studies) -> None:
    with studies.open("search_space={trainer.seed: {type: categorical, choices: [5]}}") as (view,):
        value = run(view).value
        start = start_of_trial(view, "0", from_scratch=True)
        assert start.seed == 5
        assert train(view, start)["value"] == value


def test_a_seed_that_is_made_of_a_parameter_is_that_of_the_training(studies: Studies) -> None:
    space = "search_space={model.hidden: {type: categorical, choices: [5]}}"
    with studies.open(space, "trainer.seed='${model.hidden}'") as (view,):
        run(view)
        assert start_of_trial(view, "0", from_scratch=True).seed == 5


def test_a_trial_that_took_over_a_result_is_trained_as_the_one_that_has_it(studies: Studies) -> None:
    space = "search_space={model.hidden: {type: int, low: 4, high: 4}}"
    with studies.open("study.duplicates=reuse", space) as (view,):
        value = run(view).value
        run(view)
        start = start_of_trial(view, "1", from_scratch=True)
        assert (start.trial, start.seed, start.value) == (1, view.trial_seed(0, {}), value)
        assert train(view, start)["value"] == value


def test_twice_the_same_training_ends_in_the_same_weights(studies: Studies) -> None:
    spec = studies.spec()
    ends = []
    for _ in range(2):
        result = train_final(Builder(spec), start_of_base(spec), epochs=None, device=CPU)
        ends.append((result, torch.load(result["model"], weights_only=True)))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(tensor, ends[1][1][name]) for name, tensor in ends[0][1].items())


def test_a_training_that_diverges_says_so(studies: Studies) -> None:
    spec = studies.spec("loss.nan=true")
    with pytest.raises(StudyError, match="no epoch has a finite val_loss"):
        train_final(Builder(spec), start_of_base(spec), epochs=1, device=CPU)


def test_a_training_that_diverges_leaves_the_model_of_an_earlier_one(studies: Studies) -> None:
    spec = studies.spec()
    result = train_final(Builder(spec), start_of_base(spec), epochs=2, device=CPU)
    folder = spec.output_dir / "final"
    kept = {name: (folder / name).read_bytes() for name in ("model.pt", "config.yaml", "metrics.json")}
    other = studies.spec("loss.nan=true")
    with pytest.raises(StudyError, match="no epoch has a finite val_loss"):
        train_final(Builder(other), start_of_base(other), epochs=1, device=CPU)
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert json.loads(kept["metrics.json"])["value"] == result["value"]


def test_parameters_that_the_file_does_not_search_are_not_taken_from_a_database(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.enqueue_trial({"optimizer._target_": "os.system"})
        trial = view.study.ask()
        trial.suggest_categorical("optimizer._target_", ["os.system"])
        view.study.tell(trial, 0.0)
        for which in ("0", "best"):
            with pytest.raises(StudyError, match="do not lie in the search space"):
                start_of_trial(view, which, from_scratch=True)


def test_a_trial_that_has_no_parameters_yet_waits(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.enqueue_trial({"model.hidden": 4})
        with pytest.raises(StudyError, match="trial 0 waits, and draws its parameters when it starts\n  fix: "):
            start_of_trial(view, "0", from_scratch=True)


@pytest.mark.parametrize("which", ["best", "7", "00"])
def test_a_trial_that_is_not_there_is_named(studies: Studies, which: str) -> None:
    with studies.open() as (view,), pytest.raises(StudyError, match=r"no complete trial yet|has no trial"):
        start_of_trial(view, which, from_scratch=False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("model.hidden=5", "size mismatch"),
        ("optimizer={_target_: torch.optim.SGD, lr: 0.01}", "the optimizer was another one, without"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_in_words(
    studies: Studies, change: str, problem: str
) -> None:
    space = "search_space={optimizer.lr: {type: float, low: 0.001, high: 0.1}}"
    with studies.open(space) as (view,):
        run(view)
        start = start_of_trial(view, "best", from_scratch=False)
        with pytest.raises(StudyError, match="checkpoint of trial 0 does not fit") as refused:
            train_final(Builder(studies.spec(space, change)), start, epochs=1, device=CPU)
        assert problem in str(refused.value)
        assert "--from-scratch" in str(refused.value)


def test_damaged_checkpoints_leave_training_anew(studies: Studies) -> None:
    with studies.open() as (view,):
        run(view)
        for file in view.spec.output_dir.rglob("*.pt"):
            file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(StudyError, match="--from-scratch"):
            start_of_trial(view, "best", from_scratch=False)
        start = start_of_trial(view, "best", from_scratch=True)
        assert (start.epoch, start.checkpoint) == (0, None)
        assert train(view, start, 1)["epochs"] == 1


def test_the_checkpoint_that_it_resumes_from_takes_no_memory_while_it_trains(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def newest(*arguments: Any) -> Any:
        found = newest_checkpoint(*arguments)
        loaded.extend(map(weakref.ref, found[1]["model"].values() if found else ()))
        return found

    def fit(trainer: Trainer, *arguments: Any) -> Any:
        gc.collect()
        left.extend(tensor() is not None for tensor in loaded)
        return trained(trainer, *arguments)

    trained = Trainer.fit
    monkeypatch.setattr("hpo.final.training.newest_checkpoint", newest)
    monkeypatch.setattr(Trainer, "fit", fit)
    with studies.open() as (view,):
        place = RunPlace(view.spec.output_dir / "again", "again")
        for epochs in (1, 2):
            train_at(Builder(view.spec), start_of_base(view.spec), place, epochs=epochs, device=CPU)
    assert left
    assert not any(left)


def test_a_full_disk_leaves_the_model_of_an_earlier_training_and_no_part_of_another(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(content: Any, target: Any) -> None:
        save(content, target)
        if "optimizer" not in content:  # the weights, not a checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")

    save, spec = torch.save, studies.spec()
    before = Path(train_final(Builder(spec), start_of_base(spec), epochs=1, device=CPU)["model"])
    content, files = before.read_bytes(), {file.name for file in before.parent.iterdir()}
    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        train_final(Builder(spec), start_of_base(spec), epochs=2, device=CPU)
    assert before.read_bytes() == content
    assert {file.name for file in before.parent.iterdir()} == {*files, "run.json"}
