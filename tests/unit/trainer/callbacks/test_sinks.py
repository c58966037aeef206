"""What CSV, console and W&B do where things go wrong: full disks, resumed runs, odd metrics."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import wandb

from tests.support import wandb_file
from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    one_batch,
    regression,
    run_scripted,
    scripted_trainer,
    through_file,
)
from trainer import Callback
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.console_logging import ConsoleLogging
from trainer.callbacks.csv_logging import CSVLogging
from trainer.callbacks.json_logging import JSONLogging
from trainer.callbacks.wandb_logging import WandbLogging
from trainer.data.plan import Plan

pytestmark = pytest.mark.full

FILES: list[type[CSVLogging] | type[JSONLogging]] = [CSVLogging, JSONLogging]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def epochs(path: Path) -> int:
    lines = path.read_text().splitlines()
    return sum(not line.startswith("epoch,") for line in lines)


def set_metric(name: str, value: Any, when: Any = lambda trainer: True, **options: Any) -> At:
    return At(
        options.get("event", "on_epoch_end"),
        lambda trainer, *rest: trainer.state.metrics.update({name: value}),
        when,
        options.get("priority", 50),
    )


@pytest.mark.parametrize("kind", FILES)
class TestFilesOfTheHistory:
    def test_a_removed_file_comes_back_whole(self, kind: Any, tmp_path: Path) -> None:
        path = tmp_path / "metrics"
        lengths: list[int] = []
        remove = At("on_epoch_end", lambda trainer: path.unlink(), lambda trainer: trainer.state.epoch == 2)
        watch = At(
            "on_epoch_end",
            lambda trainer: lengths.append(epochs(path) if path.exists() else -1),
            priority=99,
        )
        run_scripted([kind(path), remove, watch], [4.0, 3.0, 2.0, 1.0])
        assert lengths == [1, -1, 3, 4]

    def test_a_metric_called_epoch_is_refused(self, kind: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="give it another name"):
            run_scripted([kind(tmp_path / "metrics"), set_metric("epoch", 7.0)], [3.0])

    def test_what_comes_before_and_after_the_log_is_in_it_and_what_is_dropped_is_not(
        self, kind: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "metrics"
        drop = At("on_before_log_metrics", lambda trainer, metrics: metrics.pop("lr"))
        add = set_metric("early", 1.5, event="on_before_log_metrics")
        late = set_metric("late", 2.5, priority=90)
        run_scripted([kind(path), drop, add, late], [3.0, 2.0])
        text = path.read_text()
        assert "lr" not in text
        assert text.count("1.5") == text.count("2.5") == 2

    def test_numbers_of_any_kind_read_the_same_before_and_after_a_resume(self, kind: Any, tmp_path: Path) -> None:
        def trainer(path: Path) -> Any:
            numbers = {"a": 3, "b": np.float64(0.1), "c": np.float32(0.5), "d": torch.tensor(0.25), "e": True}
            odd = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(numbers))
            return make_trainer([odd, kind(path)], max_epochs=2)

        before = trainer(tmp_path / "before")
        before.fit(regression(), regression())
        after = trainer(tmp_path / "after")
        after.load_state_dict(through_file(before.state_dict()))
        after.fit(regression(), regression())
        assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()
        assert "tensor" not in (tmp_path / "before").read_text()

    @pytest.mark.parametrize("stop", [1, 3, 4, 7])
    def test_an_interrupted_run_ends_with_the_same_file_and_the_same_weights(
        self, kind: Any, stop: int, tmp_path: Path
    ) -> None:
        def trainer(folder: str, *others: Callback) -> Any:
            checkpoint = Checkpoint(tmp_path / folder / "checkpoints")
            return make_trainer([kind(tmp_path / folder / "metrics"), checkpoint, *others], max_epochs=3)

        whole = trainer("whole")
        whole.fit(regression(), regression())
        first = trainer("parts", interrupt_at(stop))
        first.fit(regression(), regression())
        second = trainer("parts")
        second.load_state_dict(through_file(first.state_dict()))
        second.fit(regression(), regression())
        assert_same(frozen(second), frozen(whole))
        assert (tmp_path / "parts/metrics").read_bytes() == (tmp_path / "whole/metrics").read_bytes()

    def test_a_second_fit_goes_on_in_the_file(self, kind: Any, tmp_path: Path) -> None:
        trainer = make_trainer([kind(tmp_path / "metrics")], max_epochs=2)
        trainer.fit(regression(), regression())
        trainer.plan = Plan(max_epochs=3)
        trainer.fit(regression(), regression())
        assert epochs(tmp_path / "metrics") == 3
        trainer.test(regression())
        assert epochs(tmp_path / "metrics") == 3

    def test_a_fit_that_fails_before_it_starts_leaves_another_runs_file_alone(
        self, kind: Any, tmp_path: Path
    ) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        run_scripted([kind(tmp_path / "metrics")], [3.0, 2.0])
        with pytest.raises(ZeroDivisionError):
            run_scripted([kind(tmp_path / "metrics"), At("on_fit_start", fail)], [1.0])
        assert epochs(tmp_path / "metrics") == 2


class TestCSV:
    def test_an_epoch_without_a_metric_has_an_empty_field(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        gone = At(
            "on_before_log_metrics",
            lambda trainer, metrics: metrics.pop("val_loss"),
            lambda trainer: trainer.state.epoch == 2,
        )
        run_scripted([CSVLogging(path), gone], [3.0, 2.0, math.inf])
        assert [row["val_loss"] for row in rows(path)] == ["3.0", "", "inf"]

    def test_names_are_kept_whatever_is_in_them(self, tmp_path: Path) -> None:
        names = {'a,"b"': 1.0, "größe\n": 2.0}
        odd = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(names))
        run_scripted([CSVLogging(tmp_path / "metrics.csv"), odd], [3.0])
        with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
        assert {name: float(row[name]) for name in names} == names


class TestConsole:
    def printed(self, capsys: pytest.CaptureFixture[str]) -> list[str]:
        lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        return [line[0] for line in lines if line[0].startswith("epoch")]

    def test_the_last_epoch_is_printed_where_an_error_kept_it_from_being_logged(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        failing = At("on_epoch_end", fail, lambda trainer: trainer.state.epoch == 2, priority=5)
        with pytest.raises(ZeroDivisionError):
            run_scripted([ConsoleLogging(every_n_epochs=2), failing], [3.0, 2.0, 1.0])
        assert self.printed(capsys) == ["epoch 1/3", "epoch 2/3"]

    def test_each_of_two_fits_ends_with_its_last_epoch_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        callbacks = [ConsoleLogging(every_n_epochs=2), Checkpoint(tmp_path)]  # which refuses undeclared changes
        trainer = make_trainer(callbacks, max_epochs=3)
        trainer.fit(regression(), regression())
        trainer.plan = Plan(max_epochs=4)
        trainer.fit(regression(), regression())
        assert self.printed(capsys) == ["epoch 1/3", "epoch 2/3", "epoch 3/3", "epoch 4/4"]

    def test_what_was_dropped_from_the_log_is_not_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        drop = At("on_before_log_metrics", lambda trainer, metrics: metrics.pop("lr"))
        run_scripted([ConsoleLogging(), drop], [3.0, 2.0])
        assert " lr " not in capsys.readouterr().out


class TestWandb:
    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wandb_file.keep_offline(tmp_path, monkeypatch)

    def file(self, folder: Path) -> Path:
        wandb.teardown()  # the service has written everything once it has ended
        (file,) = folder.rglob("*.wandb")
        return file

    def test_a_resumed_run_holds_the_epochs_that_were_lost_with_the_process_before(self, tmp_path: Path) -> None:
        before = run_scripted([], [3.0, 2.0])
        after = scripted_trainer(
            [WandbLogging("p", run_id="one", folder=tmp_path / "second")], [1.0], max_epochs=3
        )
        after.load_state_dict(through_file(before.state_dict()))
        after.fit(one_batch(), one_batch())
        records = wandb_file.history(self.file(tmp_path / "second"))
        assert [(row["_step"], row["epoch"], row["val_loss"]) for row in records] == [
            (1, 1, 3.0),
            (2, 2, 2.0),
            (3, 3, 1.0),
        ]

    @pytest.mark.parametrize(("starting_step", "sent"), [(0, [1, 2, 3]), (2, [2, 3]), (3, [3]), (6, [3])])
    def test_a_run_that_the_server_has_gets_only_what_it_lacks(
        self, starting_step: int, sent: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[int] = []
        run = SimpleNamespace(
            starting_step=starting_step,
            url=None,
            log=lambda record, step: steps.append(step),
            finish=lambda exit_code: None,
        )
        monkeypatch.setattr(wandb, "init", lambda **options: run)
        before = run_scripted([], [3.0, 2.0])
        after = scripted_trainer([WandbLogging("p", run_id="one")], [1.0], max_epochs=3)
        after.load_state_dict(through_file(before.state_dict()))
        after.fit(one_batch(), one_batch())
        assert steps == sent

    def exit_code(self, folder: Path) -> int:
        (record,) = wandb_file.records(self.file(folder), "exit")
        return int(record.get("exit_code", 0))

    def test_a_run_that_raised_is_marked_as_failed(self, tmp_path: Path) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_scripted([WandbLogging("p", folder=tmp_path), At("on_train_batch_end", fail)], [1.0])
        assert self.exit_code(tmp_path) == 1

    def test_a_pruned_run_is_not(self, tmp_path: Path) -> None:
        def prune(trainer: Any) -> None:
            trainer.state.stop("pruned")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_scripted([WandbLogging("p", folder=tmp_path), At("on_epoch_end", prune, priority=85)], [1.0])
        assert self.exit_code(tmp_path) == 0

    def test_a_metric_called_epoch_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="give it another name"):
            run_scripted([WandbLogging("p", folder=tmp_path), set_metric("epoch", 7.0)], [1.0])
