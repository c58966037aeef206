"""TrainState: reasons, best epochs, and what of it is saved."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.support import (
    At,
    make_trainer,
    one_batch,
    quick,
    regression,
    run_scripted,
    scripted_trainer,
    through_file,
)
from trainer import TrainState
from trainer.callbacks import EarlyStopping
from trainer.data.random_state import rng_state, seed_all, set_rng_state
from trainer.data.seeding import derive_seed
from trainer.distributed.agreement import agreed, wishes
from trainer.state import best_epoch, is_better


def history(*values: float) -> list[dict[str, float]]:
    return [{"val_loss": value} for value in values]


class TestBestEpoch:
    @pytest.mark.parametrize(
        ("values", "mode", "expected"),
        [
            ([3.0, 1.0, 2.0], "min", 2),
            ([3.0, 1.0, 2.0], "max", 1),
            ([2.0, 1.0, 1.0], "min", 2),
            ([2.0, 2.0, 1.0], "max", 1),
            ([math.nan, 1.0], "min", 2),
            ([1.0, math.nan], "min", 1),
            ([math.inf, 5.0], "max", 2),
            ([-math.inf, 5.0], "min", 2),
            ([math.nan, math.inf, -math.inf], "min", None),
            ([-1.0, -2.0], "min", 2),
            ([], "min", None),
        ],
    )
    def test_is_the_first_best_finite_one(self, values: list[float], mode: str, expected: int | None) -> None:
        assert best_epoch(history(*values), "val_loss", mode) == expected

    def test_passes_over_epochs_without_the_metric(self) -> None:
        assert best_epoch([{}, {"val_loss": 1.0}, {"train_loss": 0.0}], "val_loss", "min") == 2

    @quick(60)
    @given(st.lists(st.floats(), max_size=20))
    def test_equals_a_reference(self, values: list[float]) -> None:
        finite = [value for value in values if math.isfinite(value)]
        expected = values.index(min(finite)) + 1 if finite else None
        assert best_epoch(history(*values), "val_loss", "min") == expected

    def test_nothing_beats_with_nan(self) -> None:
        assert not is_better(math.nan, math.inf, "min")
        assert not is_better(math.inf, 1.0, "max")


class TestStop:
    def test_the_first_reason_stays(self) -> None:
        state = TrainState(1)
        state.stop("early_stopping")
        state.stop("pruned")
        assert state.stop_reason == "early_stopping"

    @pytest.mark.parametrize(
        "order", [["pruned", "diverged"], ["diverged", "pruned"], ["diverged", "interrupted"]]
    )
    def test_diverged_outranks_every_other(self, order: list[str]) -> None:
        state = TrainState(1)
        for reason in order:
            state.stop(reason)
        assert state.stop_reason == "diverged"

    @pytest.mark.parametrize("order", [["interrupted", "early_stopping"], ["early_stopping", "interrupted"]])
    def test_a_reason_of_the_runs_own_outranks_an_interruption_in_the_same_epoch(self, order: list[str]) -> None:
        state = TrainState(9, epoch=3)
        for reason in order:
            state.stop(reason)
        assert state.stop_reason == "early_stopping"
        assert state.state_dict()["stop_reason"] == "early_stopping"

    def test_an_interruption_that_has_cut_an_epoch_off_stays(self) -> None:
        state = TrainState(9, batch_index=1)
        state.stop("interrupted", now=True)
        state.stop("time_limit")
        assert state.stop_reason == "interrupted"
        state.stop("diverged")
        assert state.stop_reason == "diverged"

    def test_an_interruption_outranks_a_pause(self) -> None:
        state = TrainState(9, epoch=3)
        state.stop("paused")
        state.stop("interrupted")
        state.stop("paused")
        assert state.stop_reason == "interrupted"

    def test_of_several_processes_a_reason_of_the_runs_own_outranks_an_interruption_of_another(self) -> None:
        states = [TrainState(9, epoch=3), TrainState(9, epoch=3)]
        states[0].stop("interrupted", now=True)
        states[1].stop("early_stopping")
        asked = [wishes(state) for state in states]
        for state, mine in zip(states, asked, strict=True):
            agreed(state, asked, mine)
        assert [state.stop_reason for state in states] == ["early_stopping"] * 2

    @pytest.mark.parametrize("asked", [True, False])
    def test_a_run_that_stops_early_stops_there_with_a_request_to_interrupt_it_and_without(
        self, asked: bool
    ) -> None:
        """A checkpoint of that epoch must not be one to continue from."""
        losses = [1.0, 2.0, 3.0, 4.0, 5.0]
        ask = At("on_epoch_end", lambda t: t.state.stop("interrupted"), lambda t: asked and t.state.epoch == 3)
        stopped = run_scripted([ask, EarlyStopping(patience=2)], losses)
        again = scripted_trainer([EarlyStopping(patience=2)], losses)
        again.load_state_dict(through_file(stopped.state_dict()))
        assert again.fit(one_batch(), one_batch()).epoch == 3

    def test_without_now_the_epoch_is_finished_and_validated(self) -> None:
        trainer = make_trainer([At("on_train_batch_end", lambda t: t.state.stop("enough"))], max_epochs=5)
        state = trainer.fit(regression(), regression())
        assert (state.epoch, state.batch_index, state.stop_reason) == (1, 0, "enough")
        assert "val_loss" in state.history[0]

    def test_with_now_the_batch_is_the_last(self) -> None:
        trainer = make_trainer(
            [At("on_train_batch_end", lambda t: t.state.stop("enough", now=True))], max_epochs=5
        )
        state = trainer.fit(regression(), regression())
        assert (state.epoch, state.batch_index, state.step, state.stop_reason) == (0, 1, 1, "enough")
        assert state.history == []

    def test_a_request_before_training_trains_nothing(self) -> None:
        trainer = make_trainer([At("on_fit_start", lambda t: t.state.stop("enough"))])
        assert trainer.fit(regression()).step == 0


class TestSaved:
    def test_an_interruption_is_not_saved_other_reasons_are(self) -> None:
        state = TrainState(3, stop_reason="interrupted")
        assert state.state_dict()["stop_reason"] is None
        state.stop_reason = "early_stopping"
        assert state.state_dict()["stop_reason"] == "early_stopping"

    def test_the_round_trip_keeps_progress_and_the_new_max_epochs(self) -> None:
        state = TrainState(3, epoch=2, step=8, batch_index=1, user_state={"temperature": 0.5}, stop_now=True)
        state.history = history(2.0, math.nan)
        loaded = TrainState(10)
        loaded.load_state_dict(through_file(state.state_dict()))
        assert (loaded.max_epochs, loaded.epoch, loaded.step, loaded.batch_index) == (10, 2, 8, 1)
        assert loaded.user_state == {"temperature": 0.5}
        assert loaded.metrics is loaded.history[-1]
        assert loaded.stop_now is False

    def test_the_metrics_are_the_latest_of_the_history(self) -> None:
        trainer = make_trainer([At("on_epoch_end", lambda t: t.state.metrics.update(mine=t.state.epoch))])
        state = trainer.fit(regression())
        assert [metrics["mine"] for metrics in state.history] == [1, 2]

    def test_a_metric_that_is_a_numpy_number_can_be_saved(self) -> None:
        trainer = make_trainer([At("on_epoch_end", lambda t: t.state.metrics.update(mine=np.float64(0.5)))])
        trainer.fit(regression())
        assert through_file(trainer.state_dict())["state"]["history"][0]["mine"] == 0.5

    def test_an_early_stopped_run_stays_stopped_when_it_is_loaded(self) -> None:
        trainer = make_trainer([At("on_epoch_end", lambda t: t.state.stop("early_stopping"))], max_epochs=4)
        trainer.fit(regression())
        again = make_trainer(max_epochs=4)
        again.load_state_dict(through_file(trainer.state_dict()))
        assert again.fit(regression()).epoch == 1

    def test_a_checkpoint_of_another_version_is_refused(self) -> None:
        checkpoint = make_trainer().state_dict() | {"version": 99}
        with pytest.raises(ValueError, match="version 99, expected 8"):
            make_trainer().load_state_dict(checkpoint)


class TestSeeding:
    def test_generator_states_survive_a_file(self) -> None:
        import random

        def draw() -> tuple[float, ...]:
            return random.random(), random.gauss(), np.random.normal(), np.random.rand(), torch.rand(1).item()

        seed_all(3)
        random.gauss()
        np.random.normal()
        state = through_file(rng_state())
        expected = draw()
        seed_all(4)
        set_rng_state(state)
        assert draw() == expected

    @quick(40)
    @given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
    def test_derived_seeds_are_valid_and_repeatable(self, parts: list[int]) -> None:
        seed = derive_seed(*parts)
        assert 0 <= seed < 2**63
        assert seed == derive_seed(*parts)

    def test_derived_seeds_of_neighbours_differ(self) -> None:
        assert len({derive_seed(seed, epoch) for seed in range(40) for epoch in range(40)}) == 1600
