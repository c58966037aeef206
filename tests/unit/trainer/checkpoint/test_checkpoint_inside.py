"""Checkpoints inside epochs: when they are written, which stay, and that runs resume to the same bits."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
)
from tests.unit.trainer.test_resume import Augmented, Run, resumed, uninterrupted
from trainer import Trainer
from trainer.callbacks import Checkpoint
from trainer.checkpoint.files import CheckpointError, Progress, list_checkpoints
from trainer.checkpoint.manager import is_permanent, load_checkpoint, newest_checkpoint, snapshot


def on_disk(folder: Path) -> list[Progress]:
    return [file.progress for file in list_checkpoints([folder])]


def trainer_with(*callbacks: Any, samples: int = 16, **options: Any) -> Trainer:
    """Epochs of four steps, unless ``samples`` says otherwise."""
    trainer = make_trainer(callbacks, **options)
    trainer.fit(regression(samples), regression())
    return trainer


def saves(log: list[Progress]) -> At:
    """Notes the progress at which files are written."""

    def note(trainer: Any, path: Path) -> None:
        log.append(next(file.progress for file in list_checkpoints([path.parent]) if file.path == path))

    return At("on_after_save_checkpoint", note)


def copies(to: Path) -> At:
    """Keeps all that is ever written."""
    to.mkdir()
    return At("on_after_save_checkpoint", lambda trainer, path: shutil.copy(path, to))


class TestResuming:
    @pytest.mark.parametrize(
        ("run", "background"),
        [
            (Run("augmented", "one cycle"), False),
            (Run("augmented", "one cycle", "sgd"), True),
            (Run("stream", "plateau", "schedule-free"), False),
            (Run("shuffling loader", "multi-step", "splus"), True),
        ],
        ids=str,
    )
    def test_a_run_goes_on_from_any_of_its_files_to_the_same_bits(
        self, tmp_path: Path, run: Run, background: bool
    ) -> None:
        checkpoint = Checkpoint(tmp_path / "run", every_n_steps=1, max_overhead=1, background=background)
        checkpoint._affordable = lambda: True
        watched = run.fit(run.build(checkpoint, copies(tmp_path / "all")))
        assert_same(frozen(watched), uninterrupted(run))
        files = list_checkpoints([tmp_path / "all"])
        assert {(epoch, batch) for epoch in range(3) for batch in (1, 2, 3)} <= {file.progress for file in files}
        for file in files:
            assert_same(frozen(resumed(run, load_checkpoint(file.path))), uninterrupted(run))

    @pytest.mark.parametrize("validate_every", [2, 3, 0.5])
    def test_so_does_one_whose_epochs_are_not_passes(self, tmp_path: Path, validate_every: float) -> None:
        def fit(*callbacks: Any, start: dict[str, Any] | None = None) -> dict[str, Any]:
            trainer = make_trainer(callbacks, validate_every=validate_every, max_epochs=3)
            if start is not None:
                trainer.load_state_dict(start)
            trainer.fit(Augmented(), regression(9, seed=8))
            return frozen(trainer)

        plain = fit()
        assert_same(
            fit(Checkpoint(tmp_path / "run", every_n_steps=1, max_overhead=1), copies(tmp_path / "all")), plain
        )
        files = list_checkpoints([tmp_path / "all"])
        assert len({load_checkpoint(file.path)["state"]["step"] for file in files}) == plain["state"]["step"]
        for file in files:
            assert_same(fit(start=load_checkpoint(file.path)), plain)

    def test_a_damaged_newest_is_passed_over_for_the_one_before_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run("augmented", "one cycle")
        run.fit(run.build(Checkpoint(tmp_path, every_n_steps=1, max_overhead=1), interrupt_at(7)))
        assert on_disk(tmp_path) == [(1, 0), (1, 2), (1, 3)]
        newest = tmp_path / "epoch-00001-batch-000003.pt"
        newest.write_bytes(newest.read_bytes()[:-1000])
        with caplog.at_level(logging.WARNING):
            file, checkpoint = newest_checkpoint([tmp_path])
            after = resumed(run, checkpoint, Checkpoint(tmp_path, max_overhead=1))
        assert file.progress == (1, 2)
        assert "epoch-00001-batch-000003.pt" in caplog.text
        assert_same(frozen(after), uninterrupted(run))
        assert on_disk(tmp_path) == [(2, 0), (3, 0)]

    def test_a_file_says_whether_it_is_permanent(self, tmp_path: Path) -> None:
        trainer_with(Checkpoint(tmp_path, at_steps=[2]), interrupt_at(3))
        assert is_permanent(tmp_path / "epoch-00000-batch-000002.pt")
        assert not is_permanent(tmp_path / "epoch-00000-batch-000003.pt")
        (tmp_path / "epoch-00001.pt").write_bytes(b"no zip")
        with pytest.raises(CheckpointError, match=r"epoch-00001\.pt"):
            is_permanent(tmp_path / "epoch-00001.pt")


class TestEveryNSteps:
    def test_they_are_written_and_give_way_to_the_end_of_their_epoch(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        callback = Checkpoint(tmp_path, every_n_steps=3, max_overhead=1)
        trainer_with(callback, saves(log), samples=28)
        assert log == [(0, 3), (0, 6), (1, 0), (1, 2), (1, 5), (2, 0)]
        assert on_disk(tmp_path) == [(1, 0), (2, 0)]

    def test_the_latest_of_the_running_epoch_stay(self, tmp_path: Path) -> None:
        trainer_with(
            Checkpoint(tmp_path, every_n_steps=1, keep_last=2, max_overhead=1), interrupt_at(12), samples=28
        )
        assert on_disk(tmp_path) == [(1, 0), (1, 4), (1, 5)]

    def test_what_is_due_with_the_last_batch_is_written_evaluated(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        trainer_with(
            Checkpoint(tmp_path, "missing", every_n_steps=4, every_n_epochs=100, max_overhead=1), saves(log)
        )
        assert log == [(1, 0), (2, 0)]
        assert "val_loss" in load_checkpoint(tmp_path / "epoch-00001.pt")["state"]["history"][-1]

    def test_they_keep_to_their_share_of_the_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Checkpoint, "_affordable", lambda self: False)
        log: list[Progress] = []
        trainer_with(Checkpoint(tmp_path, every_n_steps=1, at_steps=[2, 7]), saves(log))
        assert [progress for progress in log if progress[1]] == [(0, 2), (1, 3)]

    def test_a_batch_without_a_step_is_not_due_again(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        skipping = At(
            "on_train_batch_start",
            lambda trainer: trainer.state.skip("optimizer_step"),
            lambda trainer: trainer.state.batch_index % 3 != 2,
        )
        trainer_with(
            Checkpoint(tmp_path, every_n_steps=1, max_overhead=1), skipping, saves(log), samples=32, max_epochs=1
        )
        assert log == [(0, 3), (0, 6), (1, 0)]

    @pytest.mark.parametrize("how", ["stop", "stop_epoch"])
    def test_no_batch_of_an_epoch_that_is_to_end_is_written(self, tmp_path: Path, how: str) -> None:
        """A run that resumed there would have forgotten that."""
        log: list[Progress] = []
        asking = At(
            "on_train_batch_end",
            lambda trainer: trainer.state.stop("enough") if how == "stop" else trainer.state.stop_epoch(),
            lambda trainer: trainer.state.step == 2,
        )
        trainer_with(Checkpoint(tmp_path, every_n_steps=1, max_overhead=1), asking, saves(log), max_epochs=1)
        assert log == [(0, 1), (1, 0)]

    def test_no_batch_after_which_weights_are_nan_is_written(self, tmp_path: Path) -> None:
        def poison(trainer: Any) -> None:
            with torch.no_grad():
                next(trainer.model.parameters()).fill_(torch.nan)

        log: list[Progress] = []
        trainer_with(
            Checkpoint(tmp_path, every_n_steps=1, at_steps=[3], max_overhead=1),
            At("on_after_optimizer_step", poison, lambda trainer: trainer.state.step == 1),
            saves(log),
            model=nn.Linear(4, 1),
        )
        assert log == [(0, 1)]


class TestAtSteps:
    def test_they_stay_for_ever_and_after_a_restart(self, tmp_path: Path) -> None:
        def rules(*steps: int) -> Checkpoint:
            return Checkpoint(tmp_path, "missing", keep_last=1, at_steps=steps, max_overhead=1)

        def go_on(callback: Checkpoint, epochs: int) -> None:
            trainer = make_trainer([callback], max_epochs=epochs)
            trainer.load_state_dict(newest_checkpoint([tmp_path])[1])
            trainer.fit(regression(16), regression())

        # Step 8 is an epoch's last: there it is the end of the epoch that stays.
        trainer_with(rules(9, 2, 8, 14), max_epochs=3)
        assert on_disk(tmp_path) == [(0, 2), (2, 0), (2, 1), (3, 0)]
        go_on(rules(9, 2, 8, 14), 5)
        assert on_disk(tmp_path) == [(0, 2), (2, 0), (2, 1), (3, 2), (5, 0)]
        assert load_checkpoint(tmp_path / "epoch-00003-batch-000002.pt")["state"]["step"] == 14
        go_on(rules(), 6)  # whose rules know nothing of them
        assert on_disk(tmp_path) == [(0, 2), (2, 0), (2, 1), (3, 2), (6, 0)]

    def test_an_interruption_right_at_one_stays_too(self, tmp_path: Path) -> None:
        trainer = trainer_with(Checkpoint(tmp_path, "missing", keep_last=1, at_steps=[2]), interrupt_at(2))
        trainer.fit(regression(16))
        assert on_disk(tmp_path) == [(0, 2), (2, 0)]

    def test_a_damaged_one_is_not_kept(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        trainer = trainer_with(Checkpoint(tmp_path, "missing", keep_last=1, at_steps=[2], max_overhead=1))
        (tmp_path / "epoch-00000-batch-000002.pt").write_bytes(b"")
        again = make_trainer([Checkpoint(tmp_path, "missing", keep_last=1, at_steps=[2])], max_epochs=3)
        again.load_state_dict(snapshot(trainer.state_dict()))
        with caplog.at_level(logging.WARNING):
            again.fit(regression(16))
        assert "epoch-00000-batch-000002.pt" in caplog.text
        assert on_disk(tmp_path) == [(3, 0)]


class TestPermanentBesideEphemeral:
    def test_both_intervals_hold_side_by_side(self, tmp_path: Path) -> None:
        """Steps 1 to 12 in epochs of six; every second one may go, every fifth stays, in a restarted run too."""
        log: list[Progress] = []

        def rules() -> Checkpoint:
            return Checkpoint(
                tmp_path, "missing", every_n_steps=2, keep_every_n_steps=5, keep_last=1, max_overhead=1
            )

        stopped = trainer_with(rules(), saves(log), interrupt_at(8), samples=24)
        assert log == [(0, 2), (0, 4), (0, 5), (1, 0), (1, 2)]
        assert on_disk(tmp_path) == [(0, 5), (1, 0), (1, 2)]
        resumed = make_trainer([rules(), saves(log)])
        resumed.load_state_dict(newest_checkpoint([tmp_path])[1])
        resumed.fit(regression(24), regression())
        assert log[5:] == [(1, 4), (2, 0)]  # step 10 is both
        assert on_disk(tmp_path) == [(0, 5), (1, 4), (2, 0)]
        assert_same(frozen(resumed)["model"], frozen(trainer_with(samples=24))["model"])
        assert stopped.state.step == 8

    def test_epochs_that_stay(self, tmp_path: Path) -> None:
        trainer_with(
            Checkpoint(tmp_path, "missing", keep_every_n_epochs=2, every_n_epochs=99, keep_last=1), max_epochs=5
        )
        assert on_disk(tmp_path) == [(2, 0), (4, 0), (5, 0)]

    def test_none_that_may_go_in_the_cooldown_after_any(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        trainer_with(
            Checkpoint(tmp_path, every_n_steps=2, keep_every_n_steps=5, cooldown_steps=2, max_overhead=1),
            saves(log),
            samples=48,
            max_epochs=1,
        )
        # Step 6 comes one step after the permanent one.
        assert log == [(0, 2), (0, 4), (0, 5), (0, 8), (0, 10), (1, 0)]

    def test_one_before_training_resumes_to_the_same_bits_and_stays(self, tmp_path: Path) -> None:
        whole = trainer_with(Checkpoint(tmp_path, "missing", before_training=True, keep_last=1, max_overhead=1))
        assert on_disk(tmp_path) == [(0, 0), (2, 0)]
        again = make_trainer(seed=99, model=make_model(seed=8))
        again.load_state_dict(load_checkpoint(tmp_path / "epoch-00000.pt"))
        again.fit(regression(16), regression())
        one, other = frozen(again), frozen(whole)
        assert_same(one, {**other, "callbacks": one["callbacks"]})

    def test_a_resumed_run_writes_none_before_training(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        trainer = trainer_with(max_epochs=1)
        resumed = make_trainer([Checkpoint(tmp_path, before_training=True), saves(log)])
        resumed.load_state_dict(snapshot(trainer.state_dict()))
        resumed.fit(regression(16), regression())
        assert log == [(2, 0)]

    @pytest.mark.parametrize(
        ("remove", "stay"),
        [
            ("all_non_permanent", [(1, 2), (2, 0)]),
            ("ephemeral_only", [(1, 0), (1, 2), (2, 0)]),
            ("never", [(0, 3), (1, 0), (1, 2), (2, 0)]),
        ],
    )
    def test_the_strategy_says_what_is_removed(self, tmp_path: Path, remove: Any, stay: list[Progress]) -> None:
        rules = {"every_n_steps": 3, "keep_last": 1, "at_steps": [6], "remove": remove, "max_overhead": 1}
        trainer_with(Checkpoint(tmp_path, "missing", **rules))
        assert on_disk(tmp_path) == stay

    def test_a_run_that_may_remove_nothing_refuses_files_of_another_course(self, tmp_path: Path) -> None:
        trainer_with(Checkpoint(tmp_path, remove="never"))
        with pytest.raises(ValueError, match=r"remove is 'never': give another folder"):
            trainer_with(Checkpoint(tmp_path, remove="never"))


class TestAskedByCallbacks:
    def asking(self, step: int, action: Any) -> At:
        return At("on_after_backward", action, lambda trainer: trainer.state.step == step)

    def test_a_request_is_written_by_each_of_two_whatever_their_rules(self, tmp_path: Path) -> None:
        trainer_with(
            Checkpoint(tmp_path / "a", "missing", keep_last=1),
            Checkpoint(tmp_path / "b", "missing", keep_last=1),
            self.asking(1, lambda trainer: trainer.state.request_checkpoint(permanent=True)),
            self.asking(2, lambda trainer: trainer.state.request_checkpoint()),
        )
        assert on_disk(tmp_path / "a") == on_disk(tmp_path / "b") == [(0, 2), (2, 0)]

    def test_asked_in_an_epochs_last_batch_the_epoch_is_written(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        trainer_with(
            Checkpoint(tmp_path, "missing", every_n_epochs=9),
            self.asking(3, lambda trainer: trainer.state.request_checkpoint()),
            saves(log),
            max_epochs=3,
        )
        assert log == [(1, 0), (3, 0)]

    def test_blocks_hold_back_what_may_go_until_all_are_taken_back(self, tmp_path: Path) -> None:
        log: list[Progress] = []
        trainer_with(
            Checkpoint(tmp_path, every_n_steps=1, keep_every_n_steps=3, max_overhead=1),
            self.asking(0, lambda trainer: trainer.state.block_checkpoints("one")),
            self.asking(0, lambda trainer: trainer.state.block_checkpoints("other")),
            self.asking(5, lambda trainer: trainer.state.unblock_checkpoints("one")),
            self.asking(6, lambda trainer: trainer.state.unblock_checkpoints("other")),
            saves(log),
            max_epochs=2,
        )
        # The best epoch, the first one, waits in memory until there is a write.
        assert [progress for progress in log if progress <= (1, 3)] == [(0, 3), (1, 0), (1, 2), (1, 3)]

    def test_the_end_of_training_is_written_and_ends_the_blocks(self, tmp_path: Path) -> None:
        blocking = self.asking(0, lambda trainer: trainer.state.block_checkpoints("one"))
        trainer = trainer_with(Checkpoint(tmp_path), blocking, interrupt_at(2))
        assert on_disk(tmp_path) == [(0, 2)]
        assert trainer.state.checkpoint_blocks == set()


class TestEverySeconds:
    @pytest.mark.parametrize(
        ("seconds", "epochs", "expected"),
        [
            (2.5, 1, [(0, 3), (1, 0), (1, 3), (2, 0)]),
            # The first epoch is the best and waits in memory.
            (5.0, 100, [(1, 0), (1, 1), (2, 0)]),
            (100.0, 100, [(1, 0), (2, 0)]),
        ],
    )
    def test_counts_from_the_last_checkpoint(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        seconds: float,
        epochs: int,
        expected: list[Progress],
    ) -> None:
        """Batches of one second, and metrics of which the first is the best."""
        now = 1000.0

        def one_second(trainer: Any) -> None:
            nonlocal now
            now += 1

        monkeypatch.setattr("trainer.callbacks.checkpoint.time.monotonic", lambda: now)
        log: list[Progress] = []
        trainer_with(
            Checkpoint(tmp_path, "score", "max", every_n_epochs=epochs, every_seconds=seconds),
            At("on_train_batch_end", one_second),
            At("on_epoch_end", lambda trainer: trainer.state.metrics.update(score=-float(trainer.state.epoch))),
            saves(log),
        )
        assert log == expected

    def test_no_rule_looks_at_no_clock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = make_trainer([Checkpoint(tmp_path)], max_epochs=1)
        calls = []
        monkeypatch.setattr("trainer.callbacks.checkpoint.time.monotonic", lambda: calls.append(1) or 0.0)
        trainer.fit(regression(400))
        assert len(calls) < 10


def test_two_in_one_trainer_keep_their_own_rules(tmp_path: Path) -> None:
    trainer_with(
        Checkpoint(tmp_path / "a", keep_last=1, max_overhead=1, every_n_steps=3),
        Checkpoint(tmp_path / "b", "lr", "max", keep_last=2, max_overhead=1),
        interrupt_at(11),
        max_epochs=3,
    )
    assert on_disk(tmp_path / "a")[-1] == (2, 3)
    assert on_disk(tmp_path / "b") == [(1, 0), (2, 0), (2, 3)]


def test_it_survives_evaluation_alone_two_fits_and_two_teardowns(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path, every_n_steps=2, max_overhead=1, background=True)
    trainer = make_trainer([callback], model=make_model())
    trainer.validate(regression())
    assert not list(tmp_path.iterdir())
    trainer.fit(regression(16), regression())
    trainer.fit(regression(16), regression())
    callback.teardown(trainer)
    assert on_disk(tmp_path)[-1] == (2, 0)
