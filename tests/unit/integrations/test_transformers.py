"""The Trainer of Transformers trains trials: exact after an interruption, ended as the study says; wrong use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hpo.integrations.transformers import HPOCallback, unpacked
from hpo.study.outcome import Outcome
from hpo.trial.session import Session
from tests.support.attempts import AskedAt, stored
from tests.support.pausing import PauseAll
from tests.support.studies import Studies
from tests.unit.integrations.support import StopAt, reason, run
from trainer.checkpoint.files import list_checkpoints
from trainer.checkpoint.manager import load_checkpoint

EPOCHS, STEPS = 4, 5
METRIC = "study.metric=eval_loss"


class Words(Dataset[Any]):
    """Two classes by which half of the words stands more often."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(0, 2, (count,), generator=generator)
        self.words = torch.randint(1, 16, (count, 6), generator=generator) + 15 * self.labels[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def tiny() -> BertForSequenceClassification:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=8, **sizes))


def train(trial: Session, *callbacks: TrainerCallback, model: nn.Module | None = None, **options: Any) -> Trainer:
    """A person's function."""
    arguments: dict[str, Any] = {
        "output_dir": trial.folder / "out",
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": trial.seed,
    }
    callback = HPOCallback(trial)
    arguments = TrainingArguments(**(arguments | options))
    trainer = Trainer(
        model or tiny(), arguments, train_dataset=Words(STEPS * 8), eval_dataset=Words(24),
        callbacks=[callback, *callbacks],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=callback.load_checkpoint())
    return trainer


class At(TrainerCallback):
    """Calls something before each step, or after it."""

    def __init__(self, call: Any, event: str = "on_step_end") -> None:
        setattr(self, event, lambda *_, **__: call())


@pytest.mark.parametrize(
    ("options", "stop"),
    [
        ({}, 12),
        ({}, 10),
        ({"eval_strategy": "steps", "eval_steps": 3, "lr_scheduler_type": "cosine"}, 8),
        ({"gradient_accumulation_steps": 2, "save_strategy": "epoch", "save_total_limit": 1}, 4),
        ({"max_steps": 17, "eval_strategy": "steps", "eval_steps": 4}, 13),
    ],
)
def test_a_trial_that_is_interrupted_ends_as_one_that_is_not(
    studies: Studies, options: dict[str, Any], stop: int
) -> None:
    ends: list[dict[str, Any]] = []

    def trained(trial: Session, *callbacks: TrainerCallback) -> None:
        ends.append(train(trial, *callbacks, **options).model.state_dict())

    with studies.open(METRIC, at="whole") as (view,):
        whole, curve = run(view, trained)
    with studies.open(METRIC, at="cut") as (view,):
        stops = StopAt(stop)
        report, begun = run(view, lambda trial: trained(trial, At(stops)), stops.request)
        assert (report.outcome, report.reason) == (None, "")
        again, resumed = run(view, trained)
        assert list(stored(view).intermediate_values) == list(range(1, len(curve) + 1))
    assert not again.reason
    assert 0 < len(begun) < len(curve)
    assert (whole.outcome, again.outcome, again.value) == (Outcome.COMPLETE, Outcome.COMPLETE, whole.value)
    assert resumed == curve
    assert all(torch.equal(ends[0][name], ends[-1][name]) for name in ends[0])


@pytest.mark.parametrize(("options", "stop"), [({}, 10), ({}, 20), ({"max_steps": 12}, 12)])
def test_a_stop_in_the_last_step_of_an_epoch_loses_no_evaluation(
    studies: Studies, options: dict[str, Any], stop: int
) -> None:
    with studies.open(METRIC, at="whole") as (view,):
        _, curve = run(view, lambda trial: train(trial, **options))
    with studies.open(METRIC, at="cut") as (view,):
        stops = StopAt(stop)
        report, cut = run(view, lambda trial: train(trial, At(stops, "on_step_begin"), **options), stops.request)
        assert len(cut) == (stop + STEPS - 1) // STEPS
        if report.outcome is None:
            report, cut = run(view, lambda trial: train(trial, **options))
    assert (report.outcome, cut) == (Outcome.COMPLETE, curve)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [({"max_steps": 12}, 3), ({"max_steps": 17, "eval_strategy": "steps", "eval_steps": 4}, 5), ({}, EPOCHS)],
)
def test_a_trial_that_has_lost_its_end_only_has_no_further_epoch(
    studies: Studies, options: dict[str, Any], epochs: int
) -> None:
    stop = StopAt(1)
    counts: list[int] = []

    def lost(trial: Session) -> None:
        train(trial, At(stop, "on_train_end"), **options)
        counts.append(trial.max_epochs)
        assert trial.should_stop

    with studies.open(METRIC, "trainer.max_epochs=null", "trainer.max_steps=100") as (view,):
        report, curve = run(view, lost, stop.request)
        assert (report.outcome, report.reason, len(curve), counts) == (None, "", epochs, [epochs])
        report, again = run(view, lambda trial: train(trial, **options))
    assert (report.outcome, again) == (Outcome.COMPLETE, curve)


def test_no_checkpoint_lies_between_an_epoch_and_its_evaluation(studies: Studies) -> None:
    saved: list[tuple[int, int]] = []

    def trained(trial: Session) -> None:
        def look() -> None:
            for each in list_checkpoints([trial.folder / "checkpoints"]):
                state = load_checkpoint(each.path)["saved"]
                saved.append((state["step"], state["reported_at"]))

        train(trial, At(look, "on_prediction_step"), save_strategy="steps", save_steps=STEPS)

    with studies.open(METRIC) as (view,):
        run(view, trained)
    assert {step for step, _ in saved} == {5, 10, 15}
    assert all(step == reported_at for step, reported_at in saved)


def test_an_interrupted_trial_resumes_at_its_step(studies: Studies) -> None:
    steps: list[int] = []

    class Count(TrainerCallback):
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    with studies.open(METRIC) as (view,):
        stop = StopAt(7)
        run(view, lambda trial: train(trial, Count(), At(stop)), stop.request)
        run(view, lambda trial: train(trial, Count()))
    assert steps == list(range(EPOCHS * STEPS))


def test_each_evaluation_is_an_epoch_and_the_model_is_in_its_checkpoint(studies: Studies, tmp_path: Any) -> None:
    models: list[nn.Module] = []
    with studies.open(METRIC) as (view,):
        report, curve = run(view, lambda trial: models.append(train(trial).model))
        folder = view.spec.output_dir / "trials" / "0" / "attempt-1"
        assert list(stored(view).intermediate_values) == [1, 2, 3, 4]
    assert (report.outcome, [set(each) for each in curve]) == (Outcome.COMPLETE, [{"eval_loss"}] * EPOCHS)
    assert not list((folder / "out").glob("checkpoint-*"))
    saved = load_checkpoint(list_checkpoints([folder / "checkpoints"])[-1].path)["saved"]
    assert not any(name.endswith("training_args.bin") for name in saved["files"])
    again = BertForSequenceClassification.from_pretrained(unpacked(saved, tmp_path / "model"))
    expected = models[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_several_evaluation_sets_are_one_epoch_and_other_evaluations_none(studies: Studies) -> None:
    def function(trial: Session) -> None:
        callback = HPOCallback(trial)
        arguments = TrainingArguments(
            output_dir=trial.folder, num_train_epochs=2, eval_strategy="epoch", eval_on_start=True,
            report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(
            tiny(), arguments, train_dataset=Words(16), eval_dataset={"a": Words(8), "b": Words(4)},
            callbacks=[callback],
        )  # fmt: skip
        trainer.evaluate()
        trainer.train(resume_from_checkpoint=callback.load_checkpoint())
        trainer.evaluate()

    with studies.open("study.metric=eval_a_loss") as (view,):
        report, curve = run(view, function)
    assert (report.outcome, report.reason) == (Outcome.COMPLETE, "")
    assert [set(each) for each in curve] == [{"eval_a_loss", "eval_b_loss"}] * 2


@pytest.mark.parametrize("metric", ["eval_answer_time", "eval_samples_per_second"])
def test_a_time_can_be_the_studys_metric(studies: Studies, metric: str) -> None:
    def function(trial: Session) -> None:
        callback = HPOCallback(trial)
        arguments = TrainingArguments(
            output_dir=trial.folder, num_train_epochs=1, eval_strategy="epoch", save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(
            tiny(), arguments, train_dataset=Words(8), eval_dataset=Words(8), callbacks=[callback],
            compute_metrics=lambda _: {"answer_time": 0.5},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=callback.load_checkpoint())

    with studies.open(f"study.metric={metric}", "study.direction=maximize") as (view,):
        report, curve = run(view, function)
    assert (report.outcome, report.reason) == (Outcome.COMPLETE, "")
    assert set(curve[0]) == {"eval_loss", "eval_answer_time", metric}


def test_a_pruned_trial_ends_with_its_epoch(studies: Studies) -> None:
    with studies.open(METRIC) as (view,):
        view.study.pruner = AskedAt(2)
        report, _ = run(view, train)
    assert (report.outcome, report.epochs) == (Outcome.PRUNED, 2)


def test_a_paused_trial_can_resume_and_one_without_an_epoch_left_does_not_pause(studies: Studies) -> None:
    with studies.open(METRIC, "trainer.max_epochs=null", "trainer.max_steps=100") as (view,):
        report, _ = run(replace(view, scheduler=PauseAll(2)), train)
        assert (report.paused, report.epochs) == (True, 2)
        report, _ = run(replace(view, scheduler=PauseAll(EPOCHS)), train)
        assert (report.outcome, report.paused, report.epochs) == (Outcome.COMPLETE, False, EPOCHS)


def test_a_metric_that_is_nan_has_diverged(studies: Studies) -> None:
    class Odd(BertForSequenceClassification):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            output = super().forward(input_ids=input_ids, labels=labels)
            output.loss = output.loss * (1 if self.training else float("nan"))
            return output

    with studies.open(METRIC) as (view,):
        report, _ = run(view, lambda trial: train(trial, model=Odd(tiny().config)))
    assert (report.outcome, report.epochs, report.reason) == (Outcome.DIVERGED, 1, "")


def test_what_the_trainer_stops_by_itself_is_complete(studies: Studies) -> None:
    early = EarlyStoppingCallback(1, early_stopping_threshold=100.0)
    own = {"load_best_model_at_end": True, "save_strategy": "epoch", "metric_for_best_model": "loss"}
    with studies.open(METRIC) as (view,):
        report, _ = run(view, lambda trial: train(trial, early, **own))
    assert (report.outcome, report.epochs, report.reason) == (Outcome.COMPLETE, 2, "")


# ---- wrong use


def unasked(trial: Session) -> None:
    arguments = TrainingArguments(output_dir=trial.folder, eval_strategy="epoch", report_to="none", use_cpu=True)
    Trainer(
        tiny(), arguments, train_dataset=Words(8), eval_dataset=Words(8), callbacks=[HPOCallback(trial)]
    ).train()  # fmt: skip


def twice(trial: Session) -> None:
    train(trial)
    train(trial)


def one_callback_twice(trial: Session) -> None:
    callback = HPOCallback(trial)
    trainer = train(trial)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=callback.load_checkpoint())


def two_callbacks(trial: Session) -> None:
    train(trial, HPOCallback(trial))


def other_device(trial: Session) -> None:
    trial.device = torch.device("cuda:0")
    train(trial)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (unasked, "fix: write `trainer.train(resume_from_checkpoint=callback.load_checkpoint())`"),
        (twice, "one trial is one training, and this is another"),
        (one_callback_twice, "one trial is one training, and this is another"),
        (two_callbacks, "fix: write `trainer.train(resume_from_checkpoint=callback.load_checkpoint())`"),
        (other_device, "the trainer trains on cpu, and the trial's device is cuda:0"),
        (lambda trial: train(trial, output_dir="out"), "fix: `TrainingArguments(output_dir=trial.folder)`"),
        (lambda trial: train(trial, eval_strategy="no"), 'fix: `TrainingArguments(eval_strategy="epoch")`'),
        (lambda trial: train(trial, save_only_model=True), "saves too little to resume: `save_only_model`"),
        (
            lambda trial: train(trial, eval_delay=100),
            "the training has ended without a validation",
        ),
    ],
)
def test_wrong_use_is_the_trials_error_and_says_what_to_write(
    studies: Studies, function: Any, expected: str
) -> None:
    with studies.open(METRIC) as (view,):
        assert expected in reason(view, function)


def test_a_metric_that_is_not_measured_is_named(studies: Studies) -> None:
    with studies.open("study.metric=eval_accuracy", "study.direction=maximize") as (view,):
        problem = reason(view, train)
    assert "the validation has not measured eval_accuracy, the study's metric, but eval_loss" in problem
    assert "let `compute_metrics` of the trainer return 'eval_accuracy'" in problem
