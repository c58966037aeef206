"""Checkpoints: whole or not there, verified, kept by rule, and always of an evaluated epoch."""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.trainer.support import (
    At,
    assert_same,
    make_trainer,
    one_batch,
    quick,
    regression,
    run_scripted,
    scripted_trainer,
)
from trainer import Trainer
from trainer.callbacks import Checkpoint, NaNDetection
from trainer.checkpoint.files import CheckpointError, list_checkpoints
from trainer.checkpoint.manager import (
    CheckpointManager,
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    snapshot,
    verified_checkpoint,
)
from trainer.checkpoint.readable import UnreadableError
from trainer.data.plan import Plan

CONTENT = {"tensor": torch.arange(50.0), "number": 1.5, "nested": {"list": [1, "two", None]}}


def epochs(folder: Path) -> list[int]:
    return [file.epoch for file in list_checkpoints([folder])]


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its first write, a checkpoint costs more than any share of the time allows."""
    monkeypatch.setattr(Checkpoint, "_affordable", lambda self: not self._on_disk(), raising=True)


class TestWriting:
    def test_what_was_written_is_read_back(self, tmp_path: Path) -> None:
        path = CheckpointManager(tmp_path / "a" / "b").write(CONTENT, 3)
        assert path.name == "epoch-00003.pt"
        assert_same(load_checkpoint(path), CONTENT)

    def test_a_failure_before_the_rename_leaves_the_older_file_of_the_same_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager = CheckpointManager(tmp_path)
        manager.write(CONTENT, 1)

        def fail(descriptor: int) -> None:
            raise OSError("no fsync")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no fsync"):
            manager.write({"other": 1}, 1)
        assert hidden(tmp_path) == []
        assert_same(load_checkpoint(manager.path(1)), CONTENT)

    def test_the_file_and_its_folder_are_on_the_disk_before_it_returns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        original = os.fsync

        def watch(descriptor: int) -> None:
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
            original(descriptor)

        monkeypatch.setattr(os, "fsync", watch)
        CheckpointManager(tmp_path / "run").write(CONTENT, 1)
        aside, folder = synced
        assert re.fullmatch(r"\.epoch-00001\.pt\.[0-9a-f]{8}", aside)
        assert folder == "run"

    def test_a_value_that_cannot_be_saved_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(UnreadableError, match=r"^function is a function, which can't be read back"):
            CheckpointManager(tmp_path).write({"function": lambda: None}, 1)
        assert list(tmp_path.iterdir()) == []


class TestReading:
    @pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, keep: float) -> None:
        path = CheckpointManager(tmp_path).write(CONTENT, 1)
        data = path.read_bytes()
        path.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
        with pytest.raises(CheckpointError, match="epoch-00001"):
            load_checkpoint(path)

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="missing"):
            load_checkpoint(tmp_path / "missing.pt")

    def test_a_flipped_byte_in_a_tensor_is_detected(self, tmp_path: Path) -> None:
        path = CheckpointManager(tmp_path).write(CONTENT, 1)
        data = bytearray(path.read_bytes())
        place = data.find(CONTENT["tensor"].numpy().tobytes()[40:80])
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="corrupted"):
            load_checkpoint(path)

    @quick(50)
    @given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def test_a_flipped_bit_anywhere_is_detected_or_harmless(
        self, tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
    ) -> None:
        path = CheckpointManager(tmp_path_factory.getbasetemp() / "bits").write(CONTENT, 1)
        data = bytearray(path.read_bytes())
        data[int(place * len(data))] ^= 1 << bit
        path.write_bytes(data)
        try:
            loaded = load_checkpoint(path)
        except CheckpointError:
            return
        assert_same(loaded, CONTENT)

    def test_nothing_but_tensors_and_plain_values_is_unpickled(self, tmp_path: Path) -> None:
        path = tmp_path / "epoch-00001.pt"
        mark = tmp_path / "executed"

        class Evil:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(mark),)

        torch.save({"model": Evil()}, path)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
        assert not mark.exists()

    def test_something_else_than_a_checkpoint_is_refused_by_its_type(self, tmp_path: Path) -> None:
        torch.save([1, 2], tmp_path / "epoch-00001.pt")
        with pytest.raises(CheckpointError, match="holds list"):
            load_checkpoint(tmp_path / "epoch-00001.pt")

    def test_a_damaged_newest_is_passed_over_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        manager = CheckpointManager(tmp_path)
        manager.write(CONTENT, 1)
        newest = manager.write(CONTENT, 2)
        newest.write_bytes(newest.read_bytes()[:-200])
        with caplog.at_level(logging.WARNING):
            found = newest_checkpoint([tmp_path])
        assert found is not None
        assert found[0].epoch == 1
        assert "epoch-00002" in caplog.text

    def test_no_readable_checkpoint_is_none(self, tmp_path: Path) -> None:
        assert newest_checkpoint([tmp_path, tmp_path / "missing"]) is None
        (tmp_path / "epoch-00001.pt").write_bytes(b"")
        assert newest_checkpoint([tmp_path]) is None

    def test_the_most_progress_wins_over_folders_and_the_last_folder_between_equals(self, tmp_path: Path) -> None:
        one, other = CheckpointManager(tmp_path / "attempt-1"), CheckpointManager(tmp_path / "attempt-2")
        one.write({"from": 1}, 2)
        other.write({"from": 2}, 2)
        folders = [one.folder, other.folder]
        assert newest_checkpoint(folders)[1] == {"from": 2}
        one.write({"from": 1}, 2, batch=5)
        assert newest_checkpoint(folders)[1] == {"from": 1}
        assert find_checkpoint(folders, 2)[1] == {"from": 2}
        other.path(2).write_bytes(b"")
        assert find_checkpoint(folders, 2)[1] == {"from": 1}
        assert find_checkpoint(folders, 7) is None

    def test_a_file_is_verified_without_being_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        managers = [CheckpointManager(tmp_path / name) for name in ("attempt-1", "attempt-2")]
        folders = [manager.folder for manager in managers]
        paths = [manager.write(CONTENT, 2) for manager in managers]
        managers[1].write(CONTENT, 2, batch=5)
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a checkpoint was loaded"))
        assert verified_checkpoint(folders, 2).path == paths[1]
        damaged = bytearray(paths[1].read_bytes())
        damaged[damaged.index(CONTENT["tensor"].numpy().tobytes()) + 3] ^= 1
        paths[1].write_bytes(damaged)
        assert verified_checkpoint(folders, 2).path == paths[0]
        paths[0].write_bytes(paths[0].read_bytes()[:-200])
        assert verified_checkpoint(folders, 2) is None
        assert verified_checkpoint(folders, 7) is None


class TestRetention:
    @pytest.mark.parametrize("name", ["run", "study[1]", "a*b?"])
    def test_goes_by_number_in_folders_of_any_name(self, tmp_path: Path, name: str) -> None:
        manager = CheckpointManager(tmp_path / name)
        for epoch in (9, 79, 100_000, 109):
            manager.write({"epoch": epoch}, epoch)
        assert epochs(manager.folder) == [9, 79, 109, 100_000]
        manager.retain({(79, 0), (100_000, 0)})
        assert epochs(manager.folder) == [79, 100_000]

    def test_ends_and_insides_of_epochs_are_different_files(self, tmp_path: Path) -> None:
        manager = CheckpointManager(tmp_path)
        for batch in (0, 2, 10):
            manager.write({}, 3, batch)
        manager.retain({(3, 0), (3, 10)})
        assert [file.progress for file in list_checkpoints([tmp_path])] == [(3, 0), (3, 10)]

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        others = [tmp_path / name for name in ("metrics.csv", "epoch-1.txt", "epoch-x.pt", "best.pt")]
        for path in others:
            path.write_text("mine")
        manager = CheckpointManager(tmp_path)
        manager.write({}, 1)
        manager.write({}, 2)
        manager.retain({(2, 0)})
        assert epochs(tmp_path) == [2]
        assert all(path.exists() for path in others)

    def test_the_latest_and_the_best_are_kept(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path, max_overhead=1)], [3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
        assert epochs(tmp_path) == [2, 5, 6]

    def test_the_best_is_the_highest_when_maximising(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path, mode="max", keep_last=1, max_overhead=1)], [3.0, 9.0, 2.0, 4.0])
        assert epochs(tmp_path) == [2, 4]

    def test_numbers_past_one_hundred_are_later_than_seventy_nine(self, tmp_path: Path) -> None:
        losses = [float(200 - epoch) for epoch in range(109)]
        # The training loss stays as it is: the first epoch is the best.
        run_scripted([Checkpoint(tmp_path, "train_loss", every_n_epochs=15, keep_last=3, max_overhead=1)], losses)
        assert epochs(tmp_path) == [1, 90, 105, 109]

    def test_a_resumed_run_still_keeps_as_many(self, tmp_path: Path) -> None:
        losses = [5.0, 4.0, 3.0, 2.0]
        run_scripted([Checkpoint(tmp_path, keep_last=3, max_overhead=1)], losses)
        assert epochs(tmp_path) == [2, 3, 4]
        resumed = scripted_trainer([Checkpoint(tmp_path, keep_last=3, max_overhead=1)], [1.0], max_epochs=5)
        resumed.load_state_dict(newest_checkpoint([tmp_path])[1])
        resumed.fit(one_batch(), one_batch())
        assert epochs(tmp_path) == [3, 4, 5]


class TestWhen:
    @pytest.mark.parametrize(
        ("share", "expected"),
        [(1, list(range(1, 71))), (0.5, [1, 11, 21, 31, 41, 51, 61, 70]), (0.25, [1, 31, 61, 70])],
    )
    def test_writing_takes_no_more_than_its_share_of_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: list[int]
    ) -> None:
        """Epochs of one second, writes of ten, no best but the first."""
        now = 0.0
        original = CheckpointManager.write

        def ten_seconds(self: CheckpointManager, *arguments: Any) -> Path:
            nonlocal now
            now += 10
            return original(self, *arguments)

        def one_second(trainer: Any) -> None:
            nonlocal now
            now += 1

        saved: list[int] = []
        monkeypatch.setattr("trainer.callbacks.checkpoint.time.monotonic", lambda: now)
        monkeypatch.setattr(CheckpointManager, "write", ten_seconds)
        run_scripted(
            [
                Checkpoint(tmp_path, max_overhead=share),
                At("on_train_batch_end", one_second),
                At("on_after_save_checkpoint", lambda trainer, path: saved.append(trainer.state.epoch)),
            ],
            [float(epoch) for epoch in range(70)],
        )
        assert saved == expected

    def test_it_holds_the_stepped_scheduler_and_all_of_the_epochs_metrics(self, tmp_path: Path) -> None:
        trainer = make_trainer(
            [
                Checkpoint(tmp_path, max_overhead=1),
                At("on_epoch_end", lambda t: t.state.metrics.update(mine=1.0), priority=94),
            ],
            max_epochs=1,
        )
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        trainer.fit(regression(), regression())
        checkpoint = load_checkpoint(tmp_path / "epoch-00001.pt")
        assert checkpoint["scheduler"]["last_epoch"] == 1
        assert checkpoint["optimizer"]["param_groups"][0]["lr"] == 0.025
        assert checkpoint["state"]["history"][-1].keys() >= {"val_loss", "mine", "lr"}

    def test_callbacks_may_add_to_it(self, tmp_path: Path) -> None:
        trainer = make_trainer(
            [
                Checkpoint(tmp_path, max_overhead=1),
                At("on_save_checkpoint", lambda trainer, checkpoint: checkpoint.update(note="here")),
            ],
            max_epochs=1,
        )
        trainer.fit(regression())
        assert load_checkpoint(tmp_path / "epoch-00001.pt")["note"] == "here"

    def test_a_best_epoch_that_waits_is_written_before_a_later_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_disk(monkeypatch)
        trainer = run_scripted([Checkpoint(tmp_path)], [3.0, 1.0, 2.0, 2.0])
        assert epochs(tmp_path) == [2, 4]
        best = load_checkpoint(tmp_path / "epoch-00002.pt")
        assert len(best["state"]["history"]) == 2
        assert trainer.state.epoch == 4

    def test_a_best_epoch_that_waits_holds_the_weights_of_its_own_epoch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_disk(monkeypatch)
        weights: dict[int, Any] = {}
        trainer = make_trainer(
            [
                Checkpoint(tmp_path, monitor="score", mode="max"),
                At("on_epoch_end", lambda t: t.state.metrics.update(score=float(t.state.epoch == 3))),
                At("on_epoch_end", lambda t: weights.update({t.state.epoch: snapshot(t.model.state_dict())})),
            ],
            max_epochs=5,
        )
        trainer.fit(regression(), regression())
        assert_same(load_checkpoint(tmp_path / "epoch-00003.pt")["model"], weights[3])
        assert_same(load_checkpoint(tmp_path / "epoch-00005.pt")["model"], weights[5])

    def test_a_best_epoch_that_waits_is_written_when_training_raises(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        slow_disk(monkeypatch)
        failing = At("on_train_batch_end", fail, lambda trainer: trainer.state.step == 4)
        with pytest.raises(ZeroDivisionError):
            run_scripted([Checkpoint(tmp_path), failing], [3.0, 1.0, 2.0, 2.0])
        assert epochs(tmp_path) == [1, 2]

    def test_a_best_epoch_that_waits_survives_a_failed_write_of_a_better_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Checkpoint, "_affordable", lambda self: not self._on_disk() or full)
        full = False
        original = CheckpointManager.write

        def write(self: CheckpointManager, checkpoint: Any, epoch: int, batch: int = 0) -> Path:
            if epoch == 3:
                raise OSError("disk full")
            return original(self, checkpoint, epoch, batch)

        def fill(trainer: Any) -> None:
            nonlocal full
            full = trainer.state.epoch == 3

        monkeypatch.setattr(CheckpointManager, "write", write)
        with pytest.raises(OSError, match="disk full"):
            run_scripted([Checkpoint(tmp_path), At("on_epoch_end", fill)], [3.0, 2.0, 1.0])
        assert epochs(tmp_path) == [1, 2]

    def test_the_last_epoch_of_a_pruned_run_is_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class PrunedError(Exception):
            pass

        def prune(trainer: Any) -> None:
            trainer.state.stop("pruned")
            raise PrunedError

        slow_disk(monkeypatch)
        pruning = At("on_epoch_end", prune, lambda trainer: trainer.state.epoch == 3, priority=85)
        with pytest.raises(PrunedError):
            run_scripted([Checkpoint(tmp_path), pruning], [1.0, 2.0, 3.0, 4.0])
        assert epochs(tmp_path) == [1, 3]
        assert load_checkpoint(tmp_path / "epoch-00003.pt")["state"]["stop_reason"] == "pruned"

    def test_the_last_epoch_is_saved_whatever_the_interval(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path, every_n_epochs=10)], [1.0, 2.0, 3.0])
        assert epochs(tmp_path) == [1, 3]

    def test_no_epoch_is_no_file(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path / "run")], [], max_epochs=0)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        "options",
        [
            {"every_n_epochs": 0},
            {"keep_last": 0},
            {"keep_last": 1.5},
            {"keep_best": 0},
            {"keep_best": True},
            {"every_n_steps": 0},
            {"at_steps": [3, 0]},
            {"keep_every_n_epochs": 0},
            {"keep_every_n_steps": 1.5},
            {"cooldown_steps": -1},
            {"remove": "always"},
            {"every_seconds": 0.0},
            {"every_seconds": math.inf},
            {"max_overhead": 0.0},
            {"max_overhead": 1.5},
            {"mode": "least"},
            {"on_write_error": "ignore"},
        ],
        ids=str,
    )
    def test_settings_that_make_no_sense_are_refused_by_name(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        (name,) = options
        with pytest.raises(ValueError, match=rf"{name} is .*: give "):
            Checkpoint(tmp_path, **options)


class TestNothingNonFinite:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_diverged_epoch_is_not_written_and_the_waiting_best_is(
        self, tmp_path: Path, bad: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_disk(monkeypatch)
        trainer = run_scripted([NaNDetection(), Checkpoint(tmp_path)], [3.0, 2.0, bad, 1.0])
        assert trainer.state.stop_reason == "diverged"
        assert epochs(tmp_path) == [1, 2]

    @pytest.mark.parametrize("watched", [True, False])
    @pytest.mark.parametrize("validated", [True, False])
    def test_weights_that_became_nan_in_the_last_step_are_not_written(
        self, tmp_path: Path, watched: bool, validated: bool
    ) -> None:
        trainer = poisoned([NaNDetection()] if watched else [], tmp_path, epoch=2)
        trainer.fit(regression(), regression() if validated else None)
        assert epochs(tmp_path) == [1]

    def test_an_interruption_with_nan_weights_is_not_written(self, tmp_path: Path) -> None:
        trainer = poisoned(
            [
                At(
                    "on_train_batch_end",
                    lambda t: t.state.stop("interrupted", now=True),
                    lambda t: t.state.step == 6,
                )
            ],
            tmp_path,
            epoch=2,
        )
        trainer.fit(regression(), regression())
        assert [(file.epoch, file.batch) for file in list_checkpoints([tmp_path])] == [(1, 0)]


def poisoned(callbacks: list[Any], folder: Path, epoch: int) -> Trainer:
    """A run of three batches an epoch whose weights become NaN in the last step of ``epoch``."""

    def poison(trainer: Any) -> None:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(math.nan)

    poisoning = At("on_after_optimizer_step", poison, lambda trainer: trainer.state.step == 3 * epoch - 1)
    return make_trainer(
        [Checkpoint(folder, max_overhead=1), poisoning, *callbacks], model=nn.Linear(4, 1), max_epochs=epoch
    )


def test_a_snapshot_does_not_follow_further_training() -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(regression())
    taken = snapshot(trainer.state_dict())
    before = taken["model"]["0.weight"].clone()
    trainer.plan = Plan(max_epochs=2)
    trainer.fit(regression())
    assert torch.equal(taken["model"]["0.weight"], before)
    assert len(taken["state"]["history"]) == 1


def test_what_lazy_modules_had_before_training_is_refused(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, before_training=True)
    with pytest.raises(ValueError, match=r"parameter weight has no shape yet.* has before_training$"):
        make_trainer([callback], model=nn.LazyLinear(1)).fit(regression())
