"""StepMetrics: the numbers of single steps, in its file and in every tracker, whatever stops the run."""

import csv
import errno
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.support import mlflow_store, wandb_file
from tests.unit.trainer.callbacks.reads import no_reads_inside_a_step
from tests.unit.trainer.support import At, TwoUpdates, make_model, make_trainer, regression, through_file
from trainer import Callback, Trainer
from trainer.callbacks import (
    Checkpoint,
    ConsoleLogging,
    GradientAccumulation,
    GradientMonitor,
    MLflowLogging,
    StepMetrics,
    TensorBoardLogging,
    WandbLogging,
)
from trainer.step_log import StepLog, StepRecord

pytestmark = pytest.mark.full

EPOCHS, STEPS = 3, 9


def rows(path: Path) -> list[dict[str, float]]:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [
        {name: float(value) for name, value in json.loads(line).items()} for line in path.read_text().splitlines()
    ]


def start(model: nn.Linear) -> torch.Tensor:
    """Weights to begin with, in float64."""
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-0.5, 0.5, 4))
    return model.weight.detach().double()


def run(*callbacks: Callback, checkpoint: Any = None, model: nn.Module | None = None) -> Trainer:
    """Three epochs of three steps, with the rate of each step its own."""
    model = make_model() if model is None else model
    if isinstance(model, nn.Linear):
        start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = make_trainer(
        callbacks,
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        scheduler_interval="step",
        metrics={"mae": nn.functional.l1_loss},
        max_epochs=EPOCHS,
    )
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(11), regression(7, seed=8))
    return trainer


class Killed(BaseException):
    """As if the process were gone: nothing that comes after it counts."""


def killed_after(steps: int, checkpoint_at: int, *callbacks: Callback) -> Any:
    """Train, and be killed; returns the checkpoint of an earlier step."""
    kept: list[Any] = []

    def kill(trainer: Any) -> None:
        raise Killed

    def keep(trainer: Any) -> None:
        kept.append(through_file(trainer.state_dict()))

    saver = At("on_train_batch_end", keep, lambda trainer: trainer.state.step == checkpoint_at, priority=95)
    killer = At("on_train_batch_end", kill, lambda trainer: trainer.state.step == steps, priority=96)
    with pytest.raises(Killed):
        run(*callbacks, saver, killer)
    return kept[0]


def test_a_step_has_the_numbers_that_a_plain_loop_finds_and_reads_nothing_inside_a_step(tmp_path: Path) -> None:
    batches: list[Any] = []
    watch = At("on_train_batch_end", lambda trainer: batches.append(trainer.state.batch))
    run(
        StepMetrics(tmp_path),
        GradientMonitor(),
        watch,
        *no_reads_inside_a_step(),
        model=nn.Linear(4, 1, bias=False),
    )
    found = rows(tmp_path / "steps.csv")
    assert list(found[0]) == ["step", "epoch", "train_loss", "train_mae", "grad_norm", "lr"]
    assert [(row["step"], row["epoch"]) for row in found] == [(n + 1, n // 3 + 1) for n in range(STEPS)]
    weight = start(nn.Linear(4, 1, bias=False))
    for number, (inputs, targets) in enumerate(batches):
        error = inputs.double() @ weight.T - targets.double()
        rate = 0.05 * 0.9**number
        assert found[number]["train_loss"] == pytest.approx(float((error**2).mean()), rel=1e-5)
        assert found[number]["train_mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
        assert found[number]["lr"] == pytest.approx(rate, rel=1e-12)
        gradient = 2 * (error.T @ inputs.double()) / len(inputs)
        assert found[number]["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
        weight = weight - rate * gradient


def test_a_step_of_several_batches_has_their_weighted_mean_and_the_steps_between_are_left_out(
    tmp_path: Path,
) -> None:
    seen: list[tuple[float, float]] = []
    watch = At("on_before_backward", lambda t: seen.append((t.state.loss.item(), float(len(t.state.batch[0])))))
    run(GradientAccumulation(2), StepMetrics(tmp_path, every_n_steps=2, metrics=["train_l*"]), watch)
    steps = [seen[number : number + 2] for epoch in (0, 3, 6) for number in (epoch, epoch + 2)]
    steps = [pair[:1] if index % 2 else pair for index, pair in enumerate(steps)]  # the epoch's rest is a step
    means = [sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs) for pairs in steps]
    assert rows(tmp_path / "steps.csv") == [
        {"step": step, "epoch": step // 2, "train_loss": pytest.approx(means[step - 1], rel=1e-6)}
        for step in (2, 4, 6)
    ]


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_run_that_resumes_ends_with_the_same_file(accumulate: int, kind: Any, tmp_path: Path) -> None:
    def callbacks(folder: str, *earlier: str) -> list[Callback]:
        others = [GradientAccumulation(accumulate)] if accumulate > 1 else []
        places = [tmp_path / place for place in earlier]
        return [StepMetrics(tmp_path / folder, 1, 2, format=kind, earlier=places), *others]

    name = f"steps.{kind.replace('json', 'jsonl')}"
    run(*callbacks("whole"))
    expected = (tmp_path / "whole" / name).read_bytes()
    first = killed_after(5 if accumulate == 1 else 3, 2, *callbacks("first"))
    with (tmp_path / "first" / name).open("a") as file:
        file.write("6,")  # what a kill in the middle of a write leaves
    attempts = [("first", ()), ("second", ("first",))]
    for folder, earlier in attempts:  # in its own folder, and in one of its own attempt
        run(*callbacks(folder, *earlier), checkpoint=first)
        assert (tmp_path / folder / name).read_bytes() == expected
    run(*callbacks("first"))  # anew
    assert (tmp_path / "first" / name).read_bytes() == expected


def trackers(folder: Path, experiment: str) -> list[Callback]:
    return [
        StepMetrics(folder / "file", 1, 2, metrics=["train_loss"]),
        TensorBoardLogging(folder / "tensorboard"),
        MLflowLogging(experiment, run_key="one", tracking_uri=mlflow_store.uri()),
        WandbLogging("p", run_id="one", folder=folder / "wandb"),
    ]


def shown_in_tensorboard(folder: Path) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(folder / "tensorboard" / "steps"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars("step/train_loss")]


def shown_in_mlflow(experiment: str) -> list[tuple[int, float]]:
    client = mlflow_store.client()
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return [(p.step, p.value) for p in client.get_metric_history(found.info.run_id, "step/train_loss")]


def shown_in_wandb(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "wandb").rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [row for file in files for row in wandb_file.history(file)]


def test_every_tracker_has_each_step_once_whatever_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    wandb_file.keep_offline(tmp_path, monkeypatch)
    experiment = request.node.name
    checkpoint = killed_after(8, 5, *trackers(tmp_path, experiment))  # step 5 waits for step 6 to come over
    wandb.teardown()
    run(*trackers(tmp_path, experiment), checkpoint=checkpoint)
    wandb.teardown()
    steps = [(int(row["step"]), row["train_loss"]) for row in rows(tmp_path / "file" / "steps.csv")]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    assert shown_in_tensorboard(tmp_path) == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in steps]
    assert shown_in_mlflow(experiment) == steps
    records = shown_in_wandb(tmp_path)
    assert [row["_step"] for row in records] == list(range(1, STEPS + EPOCHS + 1))
    assert [(row["step"], row["step/train_loss"]) for row in records if "step" in row] == steps
    assert [(row["_step"], row["epoch"]) for row in records if "epoch" in row] == [(4, 1), (8, 2), (12, 3)]


def test_a_tracker_that_comes_later_is_sent_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, list[str]]] = []
    server = SimpleNamespace(
        starting_step=3,
        url=None,
        log=lambda record, step: sent.append((step, list(record))),
        define_metric=lambda name, step_metric: None,
        finish=lambda exit_code: None,
    )
    monkeypatch.setattr(wandb, "init", lambda **options: server)
    checkpoint = killed_after(7, 6, StepMetrics(tmp_path, 2, 2, metrics=["lr"]))
    run(
        StepMetrics(tmp_path, 2, 2, metrics=["lr"]),
        WandbLogging("p", run_id="one"),
        TensorBoardLogging(tmp_path),
        checkpoint=checkpoint,
    )
    step, epoch = ["step", "step/lr"], ["epoch", "train_loss", "train_mae", "val_loss", "val_mae", "lr"]
    assert sent == [(4, epoch), (5, step), (7, step), (8, epoch), (10, step), (12, epoch)]
    reader = EventAccumulator(str(tmp_path / "steps"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("step/lr")] == [2, 4, 6, 8]


def test_the_console_prints_the_steps_and_metrics_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = ConsoleLogging(every_n_epochs=2, every_n_steps=4, metrics=["*_mae", "lr"])
    run(StepMetrics(tmp_path), console)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:5:2] for line in lines if line[0] == "step"] == [
        ["step", "epoch", "train_mae"],
        ["step", "epoch", "train_mae"],
    ]
    assert [line[1] for line in lines if line[0] == "step"] == ["4/9", "8/9"]
    assert [line[2::2] for line in lines if line[0] == "epoch"] == [["train_mae", "val_mae", "lr"]] * 3
    with pytest.raises(ValueError, match="every_n_steps of the console is 4, and nothing records single steps"):
        run(ConsoleLogging(every_n_steps=4))


@pytest.mark.parametrize(("checkpoint_at", "printed_before"), [(2, 0), (5, 3)])
def test_the_console_prints_the_steps_that_waited_in_a_checkpoint(
    checkpoint_at: int, printed_before: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> list[Callback]:
        return [StepMetrics(tmp_path), ConsoleLogging(every_n_steps=1)]

    checkpoint = killed_after(checkpoint_at, checkpoint_at, *build())
    capsys.readouterr()
    run(*build(), checkpoint=checkpoint)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = range(printed_before + 1, STEPS + 1)
    assert [line[1] for line in lines if line[0] == "step"] == [f"{step}/{STEPS}" for step in steps]


def test_a_callback_may_add_to_the_records_before_the_file_is_written(tmp_path: Path) -> None:
    def add(trainer: Any, records: list[StepRecord]) -> None:
        for record in records:
            if record.step > 4:  # a column that comes later
                record.values["double"] = 2.0 * record.step

    run(StepMetrics(tmp_path, 1, 2, metrics=["lr"]), At("on_log_steps", add))
    assert [row.get("double") for row in rows(tmp_path / "steps.csv")] == [None] * 4 + [10.0, 12, 14, 16, 18]


def test_while_the_disk_refuses_steps_wait_and_a_checkpoint_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True
    add = StepLog._add

    def refuse(self: StepLog) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self)

    monkeypatch.setattr(StepLog, "_add", refuse)
    checkpoint = killed_after(7, 5, StepMetrics(tmp_path, 1, 2), Checkpoint(tmp_path / "checkpoints"))
    assert [r.levelno for r in caplog.records if "lacks steps until it can" in r.message] == [logging.WARNING]
    full = False
    run(StepMetrics(tmp_path, 1, 2), checkpoint=checkpoint)
    assert [row["step"] for row in rows(tmp_path / "steps.csv")] == list(range(1, STEPS + 1))


def test_each_optimizer_has_its_rate_in_each_step(tmp_path: Path) -> None:
    """Also in steps that do not update it; the rates are those with which the step was taken."""
    model = make_model()
    optimizers = {
        "first": torch.optim.SGD(model[:2].parameters(), lr=0.5),
        "last": torch.optim.SGD(model[2:].parameters(), lr=torch.tensor(0.25), foreach=False),
    }
    schedulers = {name: torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for name, each in optimizers.items()}
    trainer = make_trainer(
        [StepMetrics(tmp_path, metrics=["lr*"])],
        model=model,
        optimizer=optimizers,
        step=TwoUpdates(),
        scheduler=schedulers,
        scheduler_interval="step",
    )
    trainer.fit(regression(12))
    found = [(row["lr"], row["lr_first"], row["lr_last"]) for row in rows(tmp_path / "steps.csv")]
    first = [0.5, 0.25, 0.25, 0.125, 0.0625, 0.0625]  # updated in the batches 0 and 2 of three
    assert found == [(rate, rate, 0.25 * 0.5**step) for step, rate in enumerate(first)]
    assert trainer.state.history[-1].keys() >= {"lr", "lr_first", "lr_last"}


def test_steps_that_wait_for_a_full_disk_are_written_by_the_next_fit_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, full = StepLog._add, [True]

    def refuse(self: StepLog) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self)

    monkeypatch.setattr(StepLog, "_add", refuse)
    stop = At("on_train_batch_end", lambda t: t.state.stop("interrupted", now=True), lambda t: t.state.step == 5)
    trainer = run(StepMetrics(tmp_path, 1, 2), TensorBoardLogging(tmp_path / "tensorboard"), stop)
    checkpoint = through_file(trainer.state_dict())
    full.clear()
    trainer.fit(regression(11), regression(7, seed=8))
    steps = [(int(row["step"]), float(torch.tensor(row["train_loss"]))) for row in rows(tmp_path / "steps.csv")]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    assert shown_in_tensorboard(tmp_path) == steps
    full.append(True)
    trainer.load_state_dict(checkpoint)
    trainer.fit(regression(11), regression(7, seed=8))  # whose steps wait to its end
    full.clear()
    trainer.load_state_dict(checkpoint)
    trainer.fit(regression(11), regression(7, seed=8))
    assert [row["step"] for row in rows(tmp_path / "steps.csv")] == list(range(1, STEPS + 1))


def test_tensorboard_has_all_steps_again_in_the_fit_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def callbacks() -> list[Callback]:
        return [StepMetrics(tmp_path, 1, 2), TensorBoardLogging(tmp_path / "tensorboard")]

    def fill(trainer: Any) -> None:
        monkeypatch.setattr("trainer.callbacks.tensorboard_logging._add_steps", refuse)

    read = EventAccumulator(str(tmp_path / "tensorboard" / "steps"))  # one that is open all the time
    look = At("on_train_epoch_end", lambda trainer: read.Reload(), priority=99)
    full = At("on_train_batch_end", fill, lambda trainer: trainer.state.step == 5)
    end = At("on_train_batch_end", lambda t: t.state.stop("interrupted", now=True), lambda t: t.state.step == 7)
    stopped = run(*callbacks(), look, full, end)
    monkeypatch.undo()
    kept = [step for step, _ in shown_in_tensorboard(tmp_path)]
    assert kept == [1, 2, 3, 4], "what was written stays until then"
    time.sleep(1.1)  # a file's name begins with the second, by which the reader that is open knows the later one
    run(*callbacks(), checkpoint=through_file(stopped.state_dict()))
    steps = [(int(row["step"]), float(torch.tensor(row["train_loss"]))) for row in rows(tmp_path / "steps.csv")]
    assert len(steps) == STEPS
    assert shown_in_tensorboard(tmp_path) == steps
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("step/train_loss")] == steps
    assert not (tmp_path / "tensorboard" / "steps" / "incomplete").exists()


def test_lines_that_a_failed_write_has_left_are_not_there_twice_where_a_metric_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StepLog._write

    def break_off(self: StepLog, file: TextIO, *arguments: Any) -> None:
        write(self, file, *arguments)
        file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    log = StepLog(tmp_path / "steps.csv")
    log.cut(0)
    log.append([StepRecord(1, 1, {"lr": 1.0})])
    with monkeypatch.context() as full:
        full.setattr(StepLog, "_write", break_off)
        log.append([StepRecord(2, 1, {"lr": 0.5})])
    log.append([StepRecord(3, 1, {"lr": 0.25, "new": 1.0})])
    assert rows(log.path) == [
        {"step": 1, "epoch": 1, "lr": 1.0},
        {"step": 2, "epoch": 1, "lr": 0.5},
        {"step": 3, "epoch": 1, "lr": 0.25, "new": 1.0},
    ]


def test_a_file_that_was_removed_comes_back_with_its_header(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    remove = At("on_train_batch_end", lambda trainer: path.unlink(), lambda trainer: trainer.state.step == 5)
    run(StepMetrics(tmp_path, 1, 2), remove)
    assert [row["step"] for row in rows(path)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps is 0: give a whole number of at least 1"),
        ({"transfer_every_n_steps": 1.5}, "transfer_every_n_steps is 1.5"),
        ({"format": "xml"}, "format is 'xml': give 'csv' or 'json'"),
        ({"metrics": "lr"}, r"metrics is 'lr': give a list, \[lr\]"),
        ({"metrics": []}, "metrics is an empty list"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        StepMetrics(tmp_path, **arguments)


def test_a_metric_called_step_is_refused(tmp_path: Path) -> None:
    def add(trainer: Any, records: list[StepRecord]) -> None:
        records[0].values["step"] = 1.0

    with pytest.raises(ValueError, match="a metric is called 'step', as the number of the step is"):
        run(StepMetrics(tmp_path), At("on_log_steps", add))
