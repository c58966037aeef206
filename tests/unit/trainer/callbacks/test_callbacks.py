"""What each of the first callbacks is for; the contract of all is in test_contract.py."""

import csv
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import nn

from tests.unit.trainer.callbacks.reads import no_reads_inside_a_step
from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    one_batch,
    quick,
    regression,
    run_scripted,
    scripted_trainer,
    splus,
    through_file,
)
from trainer import Callback, Trainer
from trainer.callbacks import (
    Checkpoint,
    ConsoleLogging,
    CSVLogging,
    EarlyStopping,
    GradientMonitor,
    NaNDetection,
    OptimizerMode,
    OverfitDetection,
    nan_detection,
)
from trainer.checkpoint.manager import load_checkpoint
from trainer.metrics import epoch as epoch_metrics


class TestNaNDetection:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", ["train", "val"])
    def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(self, bad: float, where: str) -> None:
        losses = {"train": [1.0] * 4, "val": [1.0] * 4}
        losses[where] = [1.0, bad, 1.0, 1.0]
        trainer = run_scripted([NaNDetection()], **losses)
        assert (trainer.state.epoch, trainer.state.stop_reason) == (2, "diverged")

    def test_further_metrics_can_be_watched(self) -> None:
        bad = At("on_epoch_end", lambda t: t.state.metrics.update(score=math.nan), priority=1)
        assert run_scripted([NaNDetection(), bad], [1.0, 1.0]).state.stop_reason is None
        watching = run_scripted([NaNDetection(["score", "absent"]), bad], [1.0, 1.0])
        assert (watching.state.epoch, watching.state.stop_reason) == (1, "diverged")

    def test_diverged_outranks_early_stopping_and_pruning(self) -> None:
        def prune(trainer: Any) -> None:
            trainer.state.stop("pruned")

        early = run_scripted([At("on_epoch_end", prune, priority=1), NaNDetection()], [math.nan])
        late = run_scripted([NaNDetection(), EarlyStopping(patience=1)], [math.nan])
        assert early.state.stop_reason == late.state.stop_reason == "diverged"

    def test_metrics_that_diverge_together_are_named_in_the_plural(self, caplog: pytest.LogCaptureFixture) -> None:
        both = At("on_epoch_end", lambda t: t.state.metrics.update(a=math.nan, b=math.nan), priority=1)
        with caplog.at_level(logging.WARNING):
            run_scripted([NaNDetection(["a", "b"]), both], [1.0])
            run_scripted([NaNDetection(["a"]), both], [1.0])
        assert "epoch 1: a, b are not finite: diverged" in caplog.text
        assert "epoch 1: a is not finite: diverged" in caplog.text

    def test_a_run_that_really_diverges_is_noticed(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
        trainer = make_trainer([NaNDetection()], model=model, optimizer=optimizer, max_epochs=50)
        with caplog.at_level(logging.WARNING):
            trainer.fit(regression(), regression())
        assert trainer.state.stop_reason == "diverged"
        assert trainer.state.epoch < 50
        assert "is not finite: diverged" in caplog.text

    @pytest.mark.parametrize(
        ("late", "bad", "weight", "ended"),
        [
            (False, 6, 1.0, (8, "train_loss of batch 6")),
            (False, 8, 1.0, (8, "train_loss of batch 8")),
            (False, 6, 0.0, None),  # one that counts for nothing is NaN where all its targets are ignored
            (False, 10, 1.0, None),  # the epoch's end finds it first
            (True, 3, 1.0, (8, "train_loss of batch 3")),
        ],
    )
    def test_a_batch_that_is_not_finite_ends_the_run_inside_the_epoch(
        self,
        late: bool,
        bad: int,
        weight: float,
        ended: tuple[int, str] | None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(nan_detection, "answers_late", lambda device: late)
        monkeypatch.setattr(epoch_metrics, "_FOLD", 7)  # between two looks

        def step(model: nn.Module, batch: Any) -> dict[str, Any]:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            is_bad = model.training and trainer.state.batch_index + 1 == bad
            return {"loss": loss * math.nan, "weight": weight} if is_bad else {"loss": loss}

        skip = At("on_before_backward", lambda t: t.state.skip("backward"))  # so that the weights stay numbers
        trainer = make_trainer([NaNDetection(every_n_batches=4), skip], step=step, max_epochs=1)
        state = trainer.fit(regression(43), regression())
        diverged = weight > 0
        assert state.stop_reason == ("diverged" if diverged else None)
        assert (state.batch_index, state.epoch) == ((ended[0], 0) if ended else (0, 1))
        assert (ended[1] in caplog.text) if ended else "of batch" not in caplog.text

    def test_looking_reads_nothing_inside_a_step_that_is_not_due(self) -> None:
        make_trainer([NaNDetection(), *no_reads_inside_a_step()]).fit(regression())
        with pytest.raises(ValueError, match="every_n_batches is 129: give 1 to 128"):
            NaNDetection(every_n_batches=129)


AVERAGING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "schedule-free": lambda parameters: AdamWScheduleFree(parameters, lr=0.1),
    "schedule-free SGD": lambda parameters: SGDScheduleFree(parameters, lr=0.1, momentum=0.9),
    "splus": lambda parameters: splus(parameters, lr=0.1),
}


@pytest.mark.parametrize("kind", AVERAGING)
class TestOptimizerMode:
    def run(self, kind: str, *callbacks: Callback, epochs: int = 3) -> Trainer:
        model = nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.zero_()
        return make_trainer(
            [OptimizerMode(), *callbacks],
            model=model,
            optimizer=AVERAGING[kind](model.parameters()),
            max_epochs=epochs,
        )

    def test_training_uses_one_set_of_weights_and_validation_the_other(self, kind: str) -> None:
        modes: list[tuple[str, bool]] = []
        weights: dict[str, torch.Tensor] = {}

        def look(event: str) -> At:
            def action(trainer: Any) -> None:
                modes.append((event, trainer.optimizer.param_groups[0]["train_mode"]))
                weights[event] = trainer.model.weight.detach().clone()

            return At(event, action)

        events = ["on_train_batch_end", "on_validation_batch_end", "on_epoch_end"]
        self.run(kind, *map(look, events)).fit(regression(), regression())
        assert set(modes) == {(events[0], True), (events[1], False), (events[2], False)}
        assert not torch.equal(weights[events[0]], weights[events[1]])
        assert torch.equal(weights[events[1]], weights[events[2]])

    def test_a_checkpoint_evaluates_to_exactly_the_recorded_loss(self, kind: str, tmp_path: Path) -> None:
        data = regression(9, seed=8)
        trainer = self.run(kind, Checkpoint(tmp_path, keep_last=3, max_overhead=1))
        trainer.fit(regression(), data)
        for epoch, metrics in enumerate(trainer.state.history, start=1):
            checkpoint = load_checkpoint(tmp_path / f"epoch-{epoch:05d}.pt")
            model = nn.Linear(4, 1)
            model.load_state_dict(checkpoint["model"])
            assert nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).item() == metrics["val_loss"]
            whole = self.run(kind)
            whole.load_state_dict(checkpoint)
            assert whole.validate(data) == {"val_loss": metrics["val_loss"]}

    def test_writing_checkpoints_does_not_change_training(self, kind: str, tmp_path: Path) -> None:
        plain, watched = self.run(kind), self.run(kind, Checkpoint(tmp_path, max_overhead=1))
        assert plain.fit(regression(), regression()).history == watched.fit(regression(), regression()).history

    def test_a_run_stopped_at_an_epochs_start_saves_what_was_evaluated(self, kind: str, tmp_path: Path) -> None:
        def stop(trainer: Any) -> None:
            trainer.state.stop("interrupted", now=True)

        stop_second = At("on_train_epoch_start", stop, lambda trainer: trainer.state.epoch == 1)
        stopped, whole, resumed = self.run(kind, Checkpoint(tmp_path), stop_second), self.run(kind), self.run(kind)
        data = regression(9, seed=8)
        stopped.fit(regression(), data)
        checkpoint = load_checkpoint(tmp_path / "epoch-00001.pt")
        for weights in (checkpoint["model"], stopped.model.state_dict()):
            model = nn.Linear(4, 1)
            model.load_state_dict(weights)
            loss = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1])
            assert loss.item() == stopped.state.metrics["val_loss"]
        resumed.load_state_dict(checkpoint)
        for trainer in (whole, resumed):
            trainer.fit(regression(), data)
        assert_same(frozen(resumed), frozen(whole))

    def test_the_test_set_is_evaluated_on_the_averaged_weights(self, kind: str) -> None:
        trainer = self.run(kind)
        trainer.fit(regression(), regression())
        expected = trainer.state.metrics["val_loss"]
        trainer.optimizer.train()
        assert trainer.test(regression()) == {"test_loss": expected}

    def test_evaluating_before_any_training_works(self, kind: str) -> None:
        assert self.run(kind).validate(regression())["val_loss"] > 0


def test_optimizer_mode_leaves_other_optimizers_alone() -> None:
    with_mode, without = make_trainer([OptimizerMode()]), make_trainer()
    assert with_mode.fit(regression(), regression()).history == without.fit(regression(), regression()).history


class TestGradientMonitor:
    def test_records_the_largest_global_norm_of_the_epoch(self) -> None:
        norms: dict[int, list[float]] = {}

        def by_hand(trainer: Any) -> None:
            square = sum(
                float(value) ** 2
                for p in trainer.model.parameters()
                for value in p.grad.double().flatten().tolist()
            )
            norms.setdefault(trainer.state.epoch + 1, []).append(math.sqrt(square))

        trainer = make_trainer([GradientMonitor(), At("on_before_optimizer_step", by_hand)], max_epochs=3)
        trainer.fit(regression(), regression())
        for epoch, metrics in enumerate(trainer.state.history, start=1):
            assert len(norms[epoch]) == 3
            assert metrics["max_grad_norm"] == pytest.approx(max(norms[epoch]), rel=1e-5)

    def test_passes_over_parameters_without_a_gradient(self) -> None:
        model = make_model()
        next(model.parameters()).requires_grad_(False)
        assert make_trainer([GradientMonitor()], model=model).fit(regression()).metrics["max_grad_norm"] > 0

    @pytest.mark.parametrize(("threshold", "warnings"), [(1e-9, 2), (1e9, 0)])
    def test_warns_of_an_explosion(
        self, threshold: float, warnings: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            make_trainer([GradientMonitor(threshold)]).fit(regression())
        assert sum("gradient norm" in record.message for record in caplog.records) == warnings

    def test_the_warning_names_the_first_batch_and_step_above_the_threshold(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def run(threshold: float, *others: Callback) -> Trainer:
            return make_trainer([GradientMonitor(threshold), *others])

        norms: list[float] = []
        watch = At("on_train_batch_end", lambda t: norms.append(t.state.grad_norm.item()))
        run(1e9, watch).fit(regression())
        second = norms[3:]  # of the second epoch, steps 4 to 6
        threshold = sorted(second)[0] * 1.0001
        first = next(place for place, norm in enumerate(second) if norm > threshold)
        above = f"epoch 2: gradient norm {max(second):.3g} is above {threshold:.3g}"
        for stop in (0, 4, 5):
            caplog.clear()
            trainer = run(threshold, interrupt_at(stop))
            trainer.fit(regression())
            if stop:
                checkpoint = through_file(trainer.state_dict())
                trainer = run(threshold)
                trainer.load_state_dict(checkpoint)
                trainer.fit(regression())
            assert f"{above}, first in batch {first + 1}, step {first + 4}" in caplog.text

    def test_a_gradient_that_is_nan_is_shown(self) -> None:
        trainer = make_trainer([GradientMonitor()], loss=lambda outputs, targets: outputs.sum() * math.nan)
        assert math.isnan(trainer.fit(regression()).metrics["max_grad_norm"])


class TestOverfitDetection:
    def ratios(self, train: list[float], val: list[float], **options: Any) -> list[float | None]:
        trainer = run_scripted([OverfitDetection(**options)], val, train=train)
        return [metrics.get("overfit_gap_ratio") for metrics in trainer.state.history]

    def test_the_whole_window_must_move_apart(self) -> None:
        train = [9.0, 8, 7, 6, 5, 4]
        rising = [1.0, 2, 3, 4, 5, 6]
        assert self.ratios(train, rising, warmup_epochs=0, window_size=3) == [None, None, None, 4 / 6, 1.0, 6 / 4]
        dip = [1.0, 2, 3, 2.5, 3.5, 4.5]
        assert self.ratios(train, dip, warmup_epochs=0, window_size=3) == [None] * 6
        assert self.ratios([9.0, 8, 7, 7, 5, 4], rising, warmup_epochs=0, window_size=3) == [None] * 6

    def test_the_warm_up_is_not_looked_at(self) -> None:
        train = [9.0, 8, 7, 6, 5]
        val = [1.0, 2, 3, 4, 5]
        assert self.ratios(train, val, warmup_epochs=2, window_size=2) == [None, None, None, None, 1.0]

    def test_a_window_of_one_fires_at_any_single_divergence(self) -> None:
        ratios = self.ratios([4.0, 2, 3, 2], [1.0, 2, 1, 5], warmup_epochs=0, window_size=1)
        assert ratios == [None, 1.0, None, 2.5]

    def test_by_default_nothing_fires_before_the_eleventh_epoch(self) -> None:
        ratios = self.ratios([float(20 - epoch) for epoch in range(12)], [float(epoch) for epoch in range(12)])
        assert [ratio is not None for ratio in ratios] == [False] * 10 + [True] * 2

    def test_warns_once_when_a_divergence_begins(self, caplog: pytest.LogCaptureFixture) -> None:
        val = [1.0, 2, 3, 4, 3, 4, 5]
        with caplog.at_level(logging.WARNING):
            self.ratios([9.0, 8, 7, 6, 5, 4, 3], val, warmup_epochs=0, window_size=2)
        epochs = [record.args[0] for record in caplog.records if "overfitting" in record.message]
        assert epochs == [3, 7]

    def test_a_training_loss_that_is_not_positive_has_no_ratio(self) -> None:
        assert self.ratios([1.0, 0, -1], [1.0, 2, 3], warmup_epochs=0, window_size=1) == [None, None, None]

    def test_nan_is_no_divergence(self) -> None:
        assert self.ratios([3.0, 2, 1], [1.0, math.nan, 3], warmup_epochs=0, window_size=1) == [None] * 3

    @pytest.mark.parametrize("options", [{"window_size": 0}, {"warmup_epochs": -1}], ids=str)
    def test_settings_that_make_no_sense_are_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="at least"):
            OverfitDetection(**options)


class TestEarlyStopping:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"patience": 0}, "patience is 0"),
            ({"patience": 2.5}, "patience is 2.5"),
            ({"patience": True}, "patience is True"),
            ({"min_delta": -0.1}, "min_delta is -0.1"),
            ({"min_delta": 1.0}, "min_delta is 1.0"),
            ({"min_delta": math.nan}, "min_delta is nan"),
            ({"mode": "lower"}, "mode is 'lower'"),
        ],
        ids=str,
    )
    def test_settings_that_are_none_are_refused_by_name(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            EarlyStopping(**options)

    def test_a_numpy_number_among_the_metrics_does_not_spoil_the_checkpoint(self) -> None:
        number = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(score=np.float64(1.5)))
        trainer = make_trainer([number, EarlyStopping("score")])
        trainer.fit(regression())
        assert through_file(trainer.state_dict())["callbacks"]["EarlyStopping"]["best"] == 1.5

    def test_a_fork_has_all_of_its_patience_and_a_best_of_its_own(self) -> None:
        parent = run_scripted([EarlyStopping(patience=3)], [1.0, 2.0, 2.0])
        fork = scripted_trainer([EarlyStopping(patience=3)], [2.0, 3.0, 1.9, 2.0, 2.0, 2.0, 2.0], max_epochs=10)
        fork.load_state_dict(through_file(parent.state_dict()), fork=True)
        fork.fit(one_batch(), one_batch())
        assert (fork.state.epoch, fork.state.stop_reason) == (3 + 6, "early_stopping")

    def stops_after(self, values: list[float], **options: Any) -> int:
        return run_scripted([EarlyStopping(**options)], values).state.epoch

    def test_stops_after_patience_epochs_without_improvement(self) -> None:
        trainer = run_scripted([EarlyStopping(patience=3)], [3.0, 2.0, 2.0, 2.5, 2.0, 1.0])
        assert (trainer.state.epoch, trainer.state.stop_reason) == (5, "early_stopping")

    def test_an_improvement_starts_the_wait_anew(self) -> None:
        assert self.stops_after([3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5], patience=2) == 7

    def test_for_a_negative_loss_a_rise_is_no_improvement(self) -> None:
        callback = EarlyStopping(patience=2, min_delta=0.01)
        assert run_scripted([callback], [-1.0, -0.992, -0.995, -2.0]).state.epoch == 3
        assert callback.best == -1.0

    @pytest.mark.parametrize(
        ("best", "value", "improves"),
        [
            (-1.0, -0.992, False),
            (-1.0, -1.005, False),
            (-1.0, -1.02, True),
            (1.0, 0.995, False),
            (1.0, 0.98, True),
        ],
    )
    def test_the_margin_is_relative_to_the_magnitude_of_the_best(
        self, best: float, value: float, improves: bool
    ) -> None:
        callback = EarlyStopping(min_delta=0.01, patience=9)
        run_scripted([callback], [best, value])
        assert (callback.best == value) is improves
        mirrored = EarlyStopping(min_delta=0.01, patience=9, mode="max")
        run_scripted([mirrored], [-best, -value])
        assert (mirrored.best == -value) is improves

    @pytest.mark.parametrize("mode", ["min", "max"])
    @quick(12)
    @given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=12), delta=st.sampled_from([0.0, 0.01, 0.5]))
    def test_never_takes_a_worse_value_for_better(self, mode: str, values: list[float], delta: float) -> None:
        callback = EarlyStopping(mode=mode, min_delta=delta, patience=100)
        run_scripted([callback], values)
        best = min(values) if mode == "min" else max(values)
        assert callback.best in values
        assert abs(callback.best - best) <= delta * abs(callback.best)

    def test_maximising_stops_when_nothing_rises(self) -> None:
        assert self.stops_after([1.0, 2.0, 3.0, 2.0, 1.0, 0.0], mode="max", patience=2) == 5

    @pytest.mark.parametrize("mode", ["min", "max"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_value_that_is_not_finite_is_no_improvement(self, mode: str, bad: float) -> None:
        assert self.stops_after([bad, bad, 1.0], mode=mode, patience=2) == 2
        callback = EarlyStopping(mode=mode, patience=9)
        run_scripted([callback], [1.0, bad])
        assert (callback.best, callback.wait) == (1.0, 1)

    def test_waiting_goes_on_after_a_resume(self) -> None:
        before = run_scripted([EarlyStopping(patience=3)], [1.0, 2.0, 2.0])
        checkpoint = through_file(before.state_dict())
        callback = EarlyStopping(patience=3)
        after = scripted_trainer([callback], [2.0, 2.0], max_epochs=9)
        after.load_state_dict(checkpoint)
        after.fit(one_batch(), one_batch())
        assert (after.state.epoch, callback.best) == (4, 1.0)

    def test_a_metric_that_nothing_records_is_an_error(self) -> None:
        with pytest.raises(KeyError, match="absent"):
            run_scripted([EarlyStopping("absent")], [1.0])

    @pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -1}, {"mode": "up"}], ids=str)
    def test_settings_that_make_no_sense_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            EarlyStopping(**options)


class TestCSVLogging:
    def rows(self, path: Path) -> list[dict[str, str]]:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def test_holds_the_history_to_the_last_digit(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "metrics.csv"
        trainer = make_trainer([CSVLogging(path), GradientMonitor()], max_epochs=3)
        trainer.fit(regression(), regression())
        rows = self.rows(path)
        assert [row.pop("epoch") for row in rows] == ["1", "2", "3"]
        assert [{name: float(value) for name, value in row.items()} for row in rows] == trainer.state.history

    def test_is_written_epoch_by_epoch(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        lengths: list[int] = []
        watch = At("on_epoch_end", lambda trainer: lengths.append(len(self.rows(path))), priority=99)
        run_scripted([CSVLogging(path), watch], [3.0, 2.0, 1.0])
        assert lengths == [1, 2, 3]

    def test_a_resumed_run_keeps_the_history(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        before = run_scripted([CSVLogging(path)], [3.0, 2.0])
        after = scripted_trainer([CSVLogging(path)], [1.0], max_epochs=3)
        after.load_state_dict(through_file(before.state_dict()))
        after.fit(one_batch(), one_batch())
        assert [row["val_loss"] for row in self.rows(path)] == ["3.0", "2.0", "1.0"]

    def test_a_resumed_run_cuts_the_file_to_its_history(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        early: list[dict] = []
        keep = At(
            "on_epoch_end",
            lambda trainer: early.append(through_file(trainer.state_dict())),
            lambda trainer: trainer.state.epoch == 1,
            priority=99,
        )
        run_scripted([CSVLogging(path), keep], [3.0, 2.0, 1.0])
        with path.open("a") as file:
            file.write("4,0.")  # a row that a crash cut off
        after = scripted_trainer([CSVLogging(path)], [7.0], max_epochs=2)
        after.load_state_dict(early[0])
        after.fit(one_batch(), one_batch())
        assert [(row["epoch"], row["val_loss"]) for row in self.rows(path)] == [("1", "3.0"), ("2", "7.0")]

    def test_a_metric_that_comes_later_adds_a_column(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.csv"
        late = At("on_epoch_end", lambda t: t.state.metrics.update(late=5.0), lambda t: t.state.epoch == 2)
        run_scripted([CSVLogging(path), late], [3.0, 2.0, 1.0])
        assert [row["late"] for row in self.rows(path)] == ["", "5.0", ""]
        assert [row["val_loss"] for row in self.rows(path)] == ["3.0", "2.0", "1.0"]
        assert [item.name for item in tmp_path.iterdir()] == ["metrics.csv"]

    def test_before_the_first_epoch_there_is_a_header_only(self, tmp_path: Path) -> None:
        run_scripted([CSVLogging(tmp_path / "metrics.csv")], [], max_epochs=0)
        assert (tmp_path / "metrics.csv").read_text().split() == ["epoch"]

    def test_the_last_epoch_of_a_pruned_run_is_in_it(self, tmp_path: Path) -> None:
        def prune(trainer: Any) -> None:
            raise KeyboardInterrupt

        pruning = At("on_epoch_end", prune, lambda trainer: trainer.state.epoch == 2, priority=85)
        with pytest.raises(KeyboardInterrupt):
            run_scripted([CSVLogging(tmp_path / "metrics.csv"), pruning], [3.0, 2.0, 1.0])
        assert [row["val_loss"] for row in self.rows(tmp_path / "metrics.csv")] == ["3.0", "2.0"]


class TestConsoleLogging:
    def lines(
        self, capsys: pytest.CaptureFixture[str], epochs: int, *callbacks: Callback, every: int = 10
    ) -> list[str]:
        run_scripted([ConsoleLogging(every), *callbacks], [float(epoch) for epoch in range(1, epochs + 1)])
        return capsys.readouterr().out.splitlines()

    def test_leaves_the_numbers_of_single_tensors_to_the_files(self, capsys: pytest.CaptureFixture[str]) -> None:
        single = At("on_epoch_end", lambda trainer: trainer.state.metrics.update({"grad_norm/0.weight": 1.0}))
        assert all("grad_norm" not in line for line in self.lines(capsys, 2, single))

    def test_prints_the_first_every_tenth_and_the_last_epoch(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = self.lines(capsys, 23)
        assert [line.split("  train_loss")[0] for line in lines] == [
            "epoch  1/23",
            "epoch 10/23",
            "epoch 20/23",
            "epoch 23/23",
            "training ended after epoch 23 of 23",
        ]
        assert lines[1] == "epoch 10/23  train_loss 1  val_loss 10  lr 0.05"

    @pytest.mark.parametrize("epochs", [1, 20])
    def test_the_last_epoch_is_printed_once(self, capsys: pytest.CaptureFixture[str], epochs: int) -> None:
        lines = self.lines(capsys, epochs)
        assert sum(line.startswith(f"epoch {epochs}/") for line in lines) == 1

    def test_says_why_the_run_ended(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = self.lines(capsys, 9, EarlyStopping(patience=2))
        assert lines[-2].startswith("epoch 3/9")
        assert lines[-1] == "training ended after epoch 3 of 9 (early_stopping)"

    def test_zero_epochs_are_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.lines(capsys, 0) == ["training ended after epoch 0 of 0"]

    def test_an_interval_below_one_is_refused(self) -> None:
        with pytest.raises(ValueError, match="every_n_epochs"):
            ConsoleLogging(0)
