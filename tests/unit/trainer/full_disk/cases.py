"""Tests under a limit of the size of files, as on a full disk, for a process of their own: `test_full_disk`."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.callbacks.test_sinks import FILES, epochs
from tests.unit.trainer.checkpoint.test_checkpoint import CONTENT, hidden
from tests.unit.trainer.checkpoint.test_checkpoint_writing import asides, blow_up, fit, in_background, on_disk
from tests.unit.trainer.support import (
    At,
    assert_same,
    make_trainer,
    one_batch,
    regression,
    run_scripted,
    scripted_trainer,
    through_file,
)
from trainer import Callback
from trainer.callbacks import Checkpoint
from trainer.checkpoint.files import Progress
from trainer.checkpoint.manager import CheckpointManager, CheckpointWriteError, load_checkpoint


class FullDisk:
    """A disk that takes five bytes more and then no others, while it is on: the limit of this process's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def switch(self, on: bool) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        soft = size + 5 if on else self.limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self.limits[1]))

    def during(self, *epochs: int) -> list[Callback]:
        """Full while these epochs are logged."""
        return [
            At("on_epoch_end", lambda trainer: self.switch(True), lambda trainer: trainer.state.epoch in epochs),
            At("on_epoch_end", lambda trainer: self.switch(False), priority=99),
        ]

    def at(self, event: str) -> list[Callback]:
        """Full from this event on."""
        return [At(event, lambda trainer: self.switch(True))]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FullDisk]:
    disk = FullDisk(tmp_path / "metrics")
    yield disk
    disk.switch(False)


@pytest.mark.parametrize("kind", FILES)
class TestHistory:
    def test_a_disk_that_is_full_for_a_while_leaves_no_gap_and_no_torn_line(
        self, kind: Any, disk: FullDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_scripted([kind(tmp_path / "twin")], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
        lengths: list[int] = []
        watch = At("on_epoch_end", lambda trainer: lengths.append(epochs(disk.path)), priority=99)
        callbacks = [kind(disk.path), *disk.during(2, 3, 5), watch]
        trainer = run_scripted(callbacks, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
        assert trainer.state.epoch == 6
        assert disk.path.read_bytes() == (tmp_path / "twin").read_bytes()
        assert (lengths[0], lengths[3], lengths[5]) == (1, 4, 6)
        assert sum("File too large" in record.message for record in caplog.records) == 2
        assert {item.name for item in tmp_path.iterdir()} == {"metrics", "twin"}

    def test_a_disk_that_refuses_the_last_epoch_only_is_caught_up_with_at_the_end(
        self, kind: Any, disk: FullDisk
    ) -> None:
        run_scripted([kind(disk.path), *disk.during(3)], [3.0, 2.0, 1.0])
        assert epochs(disk.path) == 3

    def test_a_disk_that_stays_full_is_said_at_the_end(
        self, kind: Any, disk: FullDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_scripted([kind(disk.path), *disk.during(2, 3), *disk.at("on_fit_end")], [3.0, 2.0, 1.0])
        assert [record.message.split("metrics ")[1] for record in caplog.records] == [
            "can't be written, and lacks epochs until it can: [Errno 27] File too large",
            "lacks epochs of the run, which has ended",
        ]
        assert [item.name for item in tmp_path.iterdir()] == ["metrics"]

    def test_a_disk_that_is_full_at_the_start_is_an_error(self, kind: Any, disk: FullDisk, tmp_path: Path) -> None:
        before = run_scripted([], [3.0, 2.0])
        disk.path.write_text("kept")
        after = scripted_trainer([kind(disk.path), *disk.at("setup")], [2.0], max_epochs=3)
        after.load_state_dict(through_file(before.state_dict()))
        with pytest.raises(OSError, match="File too large"):
            after.fit(one_batch(), one_batch())
        assert disk.path.read_text() == "kept"
        assert [item.name for item in tmp_path.iterdir()] == ["metrics"]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A file system on which no file may grow above ``size``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestCheckpoints:
    @pytest.mark.parametrize("size", [100, 5_000, 100_000])
    def test_a_full_disk_raises_oserror_and_leaves_the_older_files(self, tmp_path: Path, size: int) -> None:
        manager = CheckpointManager(tmp_path)
        manager.write(CONTENT, 1)
        with file_size_limit(size), pytest.raises(OSError, match="File too large"):
            manager.write({"tensor": torch.zeros(100_000)}, 2)
        assert on_disk(tmp_path) == [(1, 0)]
        assert hidden(tmp_path) == []
        assert_same(load_checkpoint(manager.path(1)), CONTENT)

    @pytest.mark.parametrize("background", [False, True])
    def test_stop_ends_the_run_with_a_word_on_what_to_do(self, tmp_path: Path, background: bool) -> None:
        made = (
            in_background(tmp_path, keep_last=5)
            if background
            else Checkpoint(tmp_path, max_overhead=1, keep_last=5)
        )
        trainer = make_trainer([made, blow_up(3)], max_epochs=6)
        with file_size_limit(500_000), pytest.raises(CheckpointWriteError) as caught:
            trainer.fit(regression(16), regression())
        assert caught.value.errno == errno.EFBIG
        message = str(caught.value)
        for part in (
            str(tmp_path),
            "epoch-00003.pt can't be written: File too large",
            "MiB are free",
            "2 untouched",
        ):
            assert part in message
        assert "the newest epoch-00002.pt" in message
        assert "free some room" in message
        assert trainer.state.stop_reason == "error"
        assert trainer.state.epoch == (4 if background else 3)
        assert on_disk(tmp_path) == [(1, 0), (2, 0)]
        assert asides(tmp_path) == []

    def test_a_failed_save_removes_nothing(self, tmp_path: Path) -> None:
        made = Checkpoint(tmp_path, "missing", keep_last=1, max_overhead=1, on_write_error="continue")
        there: list[list[Progress]] = []
        watch = At("on_train_epoch_start", lambda t: there.append(on_disk(tmp_path)))
        with file_size_limit(500_000):
            fit(made, watch, blow_up(2), max_epochs=3)
        assert there == [[], [(1, 0)], [(1, 0)]]
        assert on_disk(tmp_path) == [(3, 0)]
