"""LossPrediction: the end of a curve, foretold without bias."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.support import quick, run_scripted
from trainer.callbacks import LossPrediction
from trainer.prediction import predict_final_loss


def decay(epochs: int, rate: float = 0.1, end: float = 0.2, start: float = 1.0) -> list[float]:
    """The curve end + start·exp(-rate·t) at t = 1, 2, …, epochs."""
    return [end + start * math.exp(-rate * epoch) for epoch in range(1, epochs + 1)]


class TestPredictFinalLoss:
    @pytest.mark.parametrize("observed", [10, 11, 20])
    def test_a_noise_free_decay_is_answered_with_its_true_end(self, observed: int) -> None:
        prediction = predict_final_loss(decay(observed), 50)
        assert prediction is not None
        assert prediction.family == "exponential"
        assert prediction.mean == pytest.approx(decay(50)[-1], abs=1e-6)

    @quick(60)
    @given(
        rate=st.floats(0.05, 0.6),
        end=st.floats(0, 2),
        start=st.floats(0.1, 10),
        observed=st.integers(10, 30),
    )
    def test_any_noise_free_decay_is_answered_closely(
        self, rate: float, end: float, start: float, observed: int
    ) -> None:
        prediction = predict_final_loss(decay(observed, rate, end, start), 60)
        assert prediction is not None
        assert prediction.mean == pytest.approx(decay(60, rate, end, start)[-1], abs=1e-5 * start)

    def test_noise_moves_the_answer_little(self) -> None:
        noise = np.random.default_rng(0).normal(0, 0.002, 30)
        prediction = predict_final_loss(decay(30) + noise, 60)
        assert prediction is not None
        assert prediction.mean == pytest.approx(decay(60)[-1], abs=0.02)

    def test_there_is_no_answer_before_ten_epochs(self) -> None:
        assert predict_final_loss(decay(9), 50) is None
        assert predict_final_loss([], 50, min_epochs=0) is None

    @pytest.mark.parametrize(
        "history",
        [
            [0.1 * epoch for epoch in range(1, 13)],
            [float(epoch) ** 2 for epoch in range(12)],
            [0.5] * 12,
            [0.0] * 12,
        ],
        ids=["rising", "rising faster", "flat", "zero"],
    )
    def test_a_curve_that_does_not_fall_is_answered_with_its_last_value(self, history: list[float]) -> None:
        prediction = predict_final_loss(history, 50)
        assert prediction is not None
        assert (prediction.mean, prediction.family) == (history[-1], "last")

    def test_epochs_that_are_not_finite_are_left_out_in_their_places(self) -> None:
        history = decay(20)
        history[3], history[8], history[15] = math.nan, math.inf, -math.inf
        prediction = predict_final_loss(history, 50)
        assert prediction is not None
        assert prediction.mean == pytest.approx(decay(50)[-1], abs=1e-6)

    def test_too_few_finite_epochs_are_answered_with_the_last_finite_one(self) -> None:
        history = [math.nan] * 9 + [3.0, 2.0, math.nan]
        prediction = predict_final_loss(history, 50)
        assert prediction is not None
        assert (prediction.mean, prediction.family) == (2.0, "last")

    def test_no_finite_epoch_has_no_answer(self) -> None:
        assert predict_final_loss([math.nan, math.inf] * 6, 50) is None

    def test_scale_and_offset_do_not_matter(self) -> None:
        base = predict_final_loss(decay(15), 50)
        moved = predict_final_loss([1e-6 * value for value in decay(15)], 50)
        assert base is not None
        assert moved is not None
        assert moved.mean == pytest.approx(1e-6 * base.mean, rel=1e-6)

    @quick(150)
    @given(
        history=st.lists(st.floats(), max_size=25),
        max_epochs=st.integers(1, 10_000),
    )
    def test_any_history_has_a_finite_answer_or_none(self, history: list[float], max_epochs: int) -> None:
        prediction = predict_final_loss(history, max_epochs)
        if len(history) < 10 or not any(map(math.isfinite, history)):
            assert prediction is None
        else:
            assert prediction is not None
            assert math.isfinite(prediction.mean)
            assert prediction.neg_log10 is None or math.isfinite(prediction.neg_log10)


class TestLossPrediction:
    def test_is_recorded_from_the_tenth_epoch_on_in_units_of_the_loss_and_as_neg_log10(self) -> None:
        history = run_scripted([LossPrediction()], decay(50)).state.history
        assert all("predicted_final_loss" not in metrics for metrics in history[:9])
        for metrics in history[9:]:
            assert metrics["predicted_final_loss"] == pytest.approx(decay(50)[-1], abs=1e-6)
            assert metrics["predicted_final_neg_log10"] == -math.log10(metrics["predicted_final_loss"])

    def test_a_negative_prediction_has_no_logarithm(self) -> None:
        metrics = run_scripted([LossPrediction()], decay(12, end=-3.0)).state.metrics
        assert metrics["predicted_final_loss"] < 0
        assert "predicted_final_neg_log10" not in metrics

    def test_a_loss_that_ends_in_nan_is_answered_with_the_last_finite_one(self) -> None:
        losses = [float(epoch) for epoch in range(1, 12)]
        metrics = run_scripted([LossPrediction()], [*losses, math.nan, math.inf]).state.metrics
        assert metrics["predicted_final_loss"] == 11.0

    def test_follows_the_metric_it_was_given(self) -> None:
        trainer = run_scripted([LossPrediction("train_loss", min_epochs=5)], [1.0] * 8, train=decay(8))
        assert trainer.state.metrics["predicted_final_loss"] == pytest.approx(decay(8)[-1], abs=1e-6)

    def test_without_the_metric_nothing_is_recorded(self, caplog: pytest.LogCaptureFixture) -> None:
        from tests.trainer.support import one_batch, scripted_trainer

        trainer = scripted_trainer([LossPrediction(min_epochs=1)], [1.0] * 3)
        with caplog.at_level(logging.WARNING):
            trainer.fit(one_batch())
        assert list(trainer.state.metrics) == ["train_loss", "lr"]


def test_a_loss_that_was_always_positive_is_not_foretold_below_zero() -> None:
    falling = [2.0 - 0.19 * epoch for epoch in range(1, 11)]
    prediction = predict_final_loss(falling, 30)
    assert prediction is not None
    assert prediction.family == "exponential"
    assert 0 <= prediction.mean < falling[-1]
