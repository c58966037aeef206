"""Writing in a thread, disks that fail, and processes that are killed: only whole files, and a clear word."""

import errno
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import PATIENCE
from tests.unit.trainer.support import At, assert_same, frozen, make_trainer, regression, run_scripted
from tests.unit.trainer.test_resume import Run, resumed, uninterrupted
from trainer import Trainer
from trainer.callbacks import Checkpoint
from trainer.checkpoint.files import CheckpointError, Progress, list_checkpoints
from trainer.checkpoint.manager import (
    CheckpointManager,
    CheckpointWriteError,
    load_checkpoint,
    newest_checkpoint,
    snapshot,
    verify_checkpoint,
)

ROOT = Path(__file__).parents[4]
RUN = Run("augmented", "one cycle")


def on_disk(folder: Path) -> list[Progress]:
    return [file.progress for file in list_checkpoints([folder])]


def asides(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def fit(*callbacks: Any, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, **options)
    trainer.fit(regression(16), regression())
    return trainer


def in_background(folder: Path, **options: Any) -> Checkpoint:
    """One that writes whenever it is due, in a thread."""
    checkpoint = Checkpoint(folder, background=True, **options)
    checkpoint._affordable = lambda: True
    return checkpoint


def blow_up(epoch: int) -> At:
    """Makes the checkpoint of an epoch large."""
    return At(
        "on_save_checkpoint",
        lambda trainer, checkpoint: checkpoint.update(padding=torch.ones(1_000_000, dtype=torch.uint8)),
        lambda trainer: trainer.state.epoch == epoch,
    )


class Gate:
    """Lets writes begin only once it is open; notes who writes, and how many at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun = threading.Event()
        self.threads: list[str] = []
        self.inside = self.most = 0
        original = CheckpointManager.write

        def write(manager: CheckpointManager, *arguments: Any) -> Path:
            self.threads.append(threading.current_thread().name)
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.begun.set()
            assert self.open.wait(PATIENCE)
            path = original(manager, *arguments)
            self.inside -= 1
            return path

        monkeypatch.setattr(CheckpointManager, "write", write)

    def opens(self, event: str, when: Callable[[Any], bool] = lambda trainer: True) -> At:
        return At(event, lambda trainer: self.open.set(), when)


class TestInTheBackground:
    def test_training_goes_on_while_a_thread_writes_the_state_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        weights: dict[int, Any] = {}
        seen: list[list[Progress]] = []
        # Epoch 1 is the only one that is due; the gate opens in the last batch of epoch 3.
        trainer = fit(
            in_background(tmp_path, monitor="missing", at_steps=[4], every_n_epochs=100),
            At("on_epoch_end", lambda t: weights.update({t.state.epoch: snapshot(t.model.state_dict())})),
            At("on_train_batch_end", lambda t: seen.append(on_disk(tmp_path))),
            gate.opens("on_train_batch_end", lambda t: t.state.step == 12),
            max_epochs=3,
        )
        assert seen == [[]] * 12
        assert gate.threads == ["checkpoint_0", "checkpoint_0"]
        assert_same(load_checkpoint(tmp_path / "epoch-00001.pt")["model"], weights[1])
        assert trainer.state.epoch == 3

    def test_the_files_are_those_of_the_foreground(self, tmp_path: Path) -> None:
        for name in ("here", "there"):
            checkpoint = in_background(tmp_path / name, every_n_steps=3)
            checkpoint = (
                checkpoint if name == "there" else Checkpoint(tmp_path / name, max_overhead=1, every_n_steps=3)
            )
            fit(
                checkpoint,
                At("on_train_batch_end", lambda t: t.state.stop("x", now=True), lambda t: t.state.step == 8),
            )
        assert on_disk(tmp_path / "here") == on_disk(tmp_path / "there") != []
        for file in list_checkpoints([tmp_path / "here"]):
            other = load_checkpoint(tmp_path / "there" / file.path.name)
            assert_same(snapshot(load_checkpoint(file.path)), other)

    def test_a_later_save_waits_for_the_one_before_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        late = threading.Timer(0.3, gate.open.set)
        starting = At("on_train_batch_end", lambda t: late.start(), lambda t: t.state.step == 2)
        fit(in_background(tmp_path, every_n_steps=1), starting, max_epochs=1)
        assert gate.most == 1
        assert len(gate.threads) == 4
        assert on_disk(tmp_path) == [(1, 0)]

    @pytest.mark.parametrize("crash", [False, True])
    def test_the_end_of_training_waits_also_after_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
    ) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        gate = Gate(monkeypatch)
        order: list[str] = []
        callbacks = [
            in_background(tmp_path, every_n_steps=3, every_n_epochs=100),
            gate.opens("on_fit_end"),
            At("on_fit_end", lambda t: order.append("fit end")),
            At("on_after_save_checkpoint", lambda t, path: order.append(path.name)),
            At("teardown", lambda t: order.append("teardown")),
            At("on_train_batch_end", fail, lambda t: crash and t.state.step == 4, priority=99),
        ]
        if crash:
            with pytest.raises(ZeroDivisionError):
                fit(*callbacks, max_epochs=1)
            assert on_disk(tmp_path) == [(0, 3)]
            assert order == ["fit end", "epoch-00000-batch-000003.pt", "teardown"]
        else:
            # At the epoch's end nothing is due but the best, which waits in memory, and is written last, once.
            trainer = fit(*callbacks, max_epochs=1)
            assert on_disk(tmp_path) == [(1, 0)]
            assert order == ["fit end", "epoch-00000-batch-000003.pt", "epoch-00001.pt", "teardown"]
            assert load_checkpoint(tmp_path / "epoch-00001.pt")["state"]["step"] == trainer.state.step

    def test_after_save_fires_in_the_training_thread_when_the_file_is_whole(self, tmp_path: Path) -> None:
        seen: list[Progress] = []

        def look(trainer: Any, path: Path) -> None:
            assert threading.current_thread() is threading.main_thread()
            state = load_checkpoint(path)["state"]
            seen.append((state["epoch"], state["batch_index"]))

        fit(in_background(tmp_path, every_n_steps=3), At("on_after_save_checkpoint", look))
        assert seen == [(0, 3), (1, 0), (1, 2), (2, 0)]

    def test_the_end_of_an_epoch_takes_up_a_write_that_is_done(self, tmp_path: Path) -> None:
        log: list[str] = []
        checkpoint = in_background(tmp_path, monitor="missing", at_steps=[2], every_n_epochs=100)

        def until_done(trainer: Any) -> None:
            deadline = time.monotonic() + PATIENCE
            while not checkpoint._writer.done:
                assert time.monotonic() < deadline
                time.sleep(0.005)

        fit(
            checkpoint,
            At("on_train_epoch_end", until_done),
            At("on_after_save_checkpoint", lambda t, path: log.append(path.name)),
            At("on_epoch_end", lambda t: log.append("end of the epoch"), priority=99),
            max_epochs=1,
        )
        assert log == ["epoch-00000-batch-000002.pt", "end of the epoch", "epoch-00001.pt"]

    def test_a_run_that_crashes_goes_on_from_what_the_thread_wrote(self, tmp_path: Path) -> None:
        def fail(trainer: Any) -> None:
            raise RuntimeError("crash")

        crash = At("on_train_batch_start", fail, lambda t: t.state.step == 7)
        with pytest.raises(RuntimeError, match="crash"):
            RUN.fit(RUN.build(in_background(tmp_path, every_n_steps=1), crash))
        file, checkpoint = newest_checkpoint([tmp_path])
        assert file.progress == (1, 3)
        assert_same(frozen(resumed(RUN, checkpoint)), uninterrupted(RUN))

    def test_an_interrupted_wait_is_taken_up_again_at_teardown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import concurrent.futures

        interrupted: list[bool] = []

        def wait(futures: Any) -> Any:
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return concurrent.futures.wait(futures)

        monkeypatch.setattr("trainer.checkpoint.writer.wait", wait)
        with pytest.raises(KeyboardInterrupt):
            fit(in_background(tmp_path, every_n_epochs=100, monitor="missing"), max_epochs=1)
        assert on_disk(tmp_path) == [(1, 0)]
        assert asides(tmp_path) == []

    @pytest.mark.parametrize("event", ["on_after_forward", "on_after_optimizer_step", "on_validation_batch_end"])
    def test_ctrl_c_inside_an_epoch_writes_no_half_batch(self, event: str, tmp_path: Path) -> None:
        def interrupt(trainer: Any) -> None:
            raise KeyboardInterrupt

        ctrl_c = At(event, interrupt, lambda t: t.state.epoch == 1)
        with pytest.raises(KeyboardInterrupt):
            fit(Checkpoint(tmp_path, max_overhead=1), ctrl_c)
        assert on_disk(tmp_path) == [(1, 0)]

    def test_what_cannot_be_saved_at_all_is_an_error_of_its_own_type(self, tmp_path: Path) -> None:
        lock = At("on_save_checkpoint", lambda t, checkpoint: checkpoint.update(lock=lambda: 0))
        for callback in (in_background(tmp_path), Checkpoint(tmp_path, on_write_error="continue")):
            with pytest.raises((AttributeError, TypeError)) as caught:
                fit(callback, lock)
            assert not isinstance(caught.value, OSError)
            assert not tmp_path.is_dir() or (on_disk(tmp_path) == [] and asides(tmp_path) == [])


class TestADiskThatFails:
    @pytest.mark.parametrize("background", [False, True])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_continue_is_a_warning_and_the_next_save_brings_the_best_along(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        background: bool,
        code: int,
    ) -> None:
        """The epochs 2 and 3 find no room, and 2 is the best: 1, 2, 4 and 5 are there in the end."""
        original = os.fsync
        failing = {"epoch-00002", "epoch-00003"}

        def fsync(descriptor: int) -> None:
            name = Path(f"/proc/self/fd/{descriptor}").readlink().name
            if name[1:12] in failing:
                failing.discard(name[1:12])
                raise OSError(code, os.strerror(code))
            original(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        log: list[list[Progress]] = []
        values = [5.0, 1.0, 4.0, 3.0, 2.0]
        options = {"keep_last": 3, "on_write_error": "continue"}
        made = (
            in_background(tmp_path, **options) if background else Checkpoint(tmp_path, max_overhead=1, **options)
        )
        with caplog.at_level(logging.WARNING):
            trainer = run_scripted(
                [made, At("on_after_save_checkpoint", lambda t, path: log.append(on_disk(tmp_path)))], values
            )
        assert trainer.state.stop_reason is None
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
        assert caplog.text.count(os.strerror(code)) == 2
        assert log[0] == [(1, 0)]
        assert on_disk(tmp_path)[-2:] == [(4, 0), (5, 0)]
        assert (2, 0) in on_disk(tmp_path)
        assert load_checkpoint(tmp_path / "epoch-00002.pt")["state"]["history"][-1]["val_loss"] == 1.0
        assert asides(tmp_path) == []

    def test_a_file_that_cannot_be_removed_is_such_an_error_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def retain(manager: CheckpointManager, keep: Any) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(CheckpointManager, "retain", retain)
        with pytest.raises(OSError, match="Read-only"):
            fit(Checkpoint(tmp_path))
        with caplog.at_level(logging.WARNING):
            fit(Checkpoint(tmp_path, max_overhead=1, on_write_error="continue"))
        assert caplog.text.count("Read-only") == 2

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(
            CheckpointWriteError, match=r"file/run/epoch-0000\d\.pt can't be written: Not a directory"
        ):
            fit(Checkpoint(tmp_path / "file" / "run"))

    def test_what_a_killed_process_left_makes_room_before_the_next_write(self, tmp_path: Path) -> None:
        left = tmp_path / ".epoch-00007.pt.4711"
        left.write_bytes(b"half")
        manager = CheckpointManager(tmp_path)
        present: list[bool] = []

        class Looks:
            def __reduce__(self) -> Any:
                present.append(left.exists())
                return dict, ()

        with torch.serialization.safe_globals([Looks]):
            manager.write({"looks": Looks()}, 1)
        assert present == [False]

    @pytest.mark.full
    def test_a_really_full_disk(self, tmp_path: Path) -> None:
        """A file system of 3 MiB in a name space of its own, where the machine allows that to a user."""
        small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        mount = f"mount -t tmpfs -o size=3m tmpfs {tmp_path}"
        try:
            allowed = subprocess.run([*small, mount], capture_output=True, timeout=60, check=False).returncode == 0
        except FileNotFoundError:
            allowed = False
        if not allowed:
            pytest.skip("this machine lets no user mount a file system")
        code = f"from {__name__} import on_three_mebibytes; on_three_mebibytes({str(tmp_path)!r})"
        command = f'{mount} && exec {sys.executable} -c "{code}"'
        done = subprocess.run(
            [*small, command], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr
        stopped, went_on = json.loads(done.stdout)
        assert stopped["errno"] == errno.ENOSPC
        assert "No space left on device" in stopped["message"]
        assert "3 untouched there" in stopped["message"]
        assert stopped["files"] == [[1, 0], [2, 0], [3, 0]]
        # Epochs 2 and 3 found no room; then some was made, and the best that waited came along.
        assert went_on["before"] == [[1, 0]]
        assert went_on["files"] == [[2, 0], [4, 0]]
        assert stopped["asides"] == went_on["asides"] == []


def on_three_mebibytes(root: str) -> None:
    """Run in a process of its own: every checkpoint takes about 0.8 MiB."""
    torch.set_num_threads(1)
    disk = Path(root)
    large = At(
        "on_save_checkpoint",
        lambda t, checkpoint: checkpoint.update(padding=torch.ones(800 << 10, dtype=torch.uint8)),
    )
    stopped: dict[str, Any] = {}
    try:
        run_scripted([Checkpoint(disk / "a", max_overhead=1, keep_last=9), large], [1.0, 2.0, 3.0, 4.0])
    except CheckpointWriteError as error:
        files = on_disk(disk / "a")
        assert all(load_checkpoint(file.path) for file in list_checkpoints([disk / "a"]))
        stopped = {"errno": error.errno, "message": str(error), "files": files, "asides": asides(disk / "a")}
    for file in list_checkpoints([disk / "a"]):
        file.path.unlink()

    ballast = disk / "ballast"
    went_on: dict[str, Any] = {}

    def fill(trainer: Any) -> None:
        ballast.write_bytes(bytes(2 << 20))

    def make_room(trainer: Any) -> None:
        went_on["before"] = on_disk(disk / "b")
        ballast.unlink()

    run_scripted(
        [
            Checkpoint(disk / "b", max_overhead=1, keep_last=1, on_write_error="continue"),
            large,
            At("on_train_batch_end", fill, lambda t: t.state.epoch == 1),
            At("on_train_batch_end", make_room, lambda t: t.state.epoch == 3),
        ],
        [3.0, 1.0, 2.0, 2.0],
    )
    print(json.dumps([stopped, went_on | {"files": on_disk(disk / "b"), "asides": asides(disk / "b")}]))


def killed_in_the_eighth_file(folder: Path) -> None:
    """A run in a process of its own that gets SIGKILL when half of that file's bytes are written."""
    code = f"from {__name__} import train_until_half_written as train; train({str(folder)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + PATIENCE
    while not (folder / "half").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -9


def train_until_half_written(root: str) -> None:
    """Run in a process of its own: hangs when half of the eighth checkpoint's bytes are written."""
    import trainer.checkpoint.manager

    torch.set_num_threads(1)
    folder, original, begun = Path(root), trainer.checkpoint.manager._save, []

    def save(checkpoint: Any, file: Any) -> None:
        begun.append(True)
        if len(begun) < 8:
            return original(checkpoint, file)
        whole = io.BytesIO()
        torch.save(checkpoint, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        (folder / "half").touch()
        time.sleep(600)
        return None

    trainer.checkpoint.manager._save = save
    RUN.fit(RUN.build(in_background(folder, every_n_steps=1)))


@pytest.mark.full
def test_a_process_killed_while_it_writes_leaves_whole_files_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path
    killed_in_the_eighth_file(folder)
    assert len(asides(folder)) == 1
    assert on_disk(folder)[-1] == (1, 3)
    for file in list_checkpoints([folder]):
        load_checkpoint(file.path)
    _, checkpoint = newest_checkpoint([folder])
    run = resumed(RUN, checkpoint, Checkpoint(folder, max_overhead=1))
    assert_same(frozen(run), uninterrupted(RUN))
    assert asides(folder) == []
    assert on_disk(folder) == [(2, 0), (3, 0)]


def test_a_file_is_read_again_only_where_it_is_not_as_this_process_has_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.write({"weights": torch.ones(100)}, 1)
    read: list[Path] = []
    whole = zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda file: read.append(path) or whole(file))
    verify_checkpoint(path)
    assert not read
    content = bytearray(path.read_bytes())
    content[content.find(torch.ones(100).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="corrupted"):
            verify_checkpoint(path)
    assert len(read) == 2
    manager.retain([])
    with pytest.raises(CheckpointError, match="No such file"):
        verify_checkpoint(path)
