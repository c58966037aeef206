"""LossPrediction: the end of a curve, foretold without bias, and never with more trust than it has earned."""

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.trainer.support import one_batch, quick, run_scripted, scripted_trainer
from trainer.callbacks import LossPrediction
from trainer.prediction.curve_families import FAMILIES, design
from trainer.prediction.final_loss import Prediction, predict_final_loss


def decay(epochs: int, rate: float = 0.1, end: float = 0.2, start: float = 1.0) -> list[float]:
    """The curve end + start·exp(-rate·t) at t = 1, 2, …, epochs."""
    return [end + start * math.exp(-rate * epoch) for epoch in range(1, epochs + 1)]


def power(epochs: int, exponent: float, end: float = 0.2) -> list[float]:
    """The curve end + t^-exponent at t = 1, 2, …, epochs."""
    return [end + epoch**-exponent for epoch in range(1, epochs + 1)]


def predicted(history: list[float], max_epochs: int = 50, **options: object) -> Prediction:
    """A prediction that is there."""
    prediction = predict_final_loss(history, max_epochs, **{"min_epochs": 1, **options})  # type: ignore[arg-type]
    assert prediction is not None
    return prediction


#: Multiples of 1/16: sums and products with powers of two are exact.
sixteenths = st.integers(-160, 160).map(lambda value: value / 16)


class TestShapes:
    @pytest.mark.parametrize("epochs", [(1, 2, 3), (2, 5, 9, 10), (1,)])
    def test_every_shape_but_the_constant_falls_from_one_to_zero(self, epochs: tuple[int, ...]) -> None:
        plan = design(epochs, 11)
        assert plan.family.max() == len(FAMILIES) - 1
        assert plan.shapes[-1].tolist() == [0.0] * len(epochs)
        inside = plan.shapes[:-1]
        assert (np.diff(inside, axis=1) < 0).all()
        assert ((inside >= 0) & (inside <= 1)).all()
        if epochs[0] == 1:
            assert inside[:, 0] == pytest.approx(1)

    def test_kriging_repeats_a_level_and_its_precision_does_not_see_it(self) -> None:
        plan = design((1, 2, 4, 7), 20)
        assert plan.weights.sum(axis=1) == pytest.approx(1)
        assert np.abs(plan.precision.sum(axis=2)).max() < 1e-6 * np.abs(plan.precision).max()

    def test_kriging_of_a_walk_leans_on_the_last_value(self) -> None:
        plan = design(tuple(range(1, 11)), 50)
        assert (plan.weights.argmax(axis=1) == 9).all()
        assert (plan.weights[:, -1] > 0.4).all()

    def test_all_shapes_together_weigh_at_first_as_much_as_the_constant(self) -> None:
        weights = np.exp(design((1, 2), 5).log_prior)
        assert weights[:-1].sum() == pytest.approx(weights[-1])


class TestPredictFinalLoss:
    @pytest.mark.parametrize("rate", [0.1, 0.15, 0.3, 0.6])
    @pytest.mark.parametrize("observed", [15, 20, 30])
    def test_a_noise_free_exponential_is_answered_near_its_true_end(self, rate: float, observed: int) -> None:
        curve = decay(60, rate)
        prediction = predicted(curve[:observed], 60)
        left = curve[observed - 1] - curve[-1]
        assert prediction.mean == pytest.approx(curve[-1], abs=0.15 * left + 0.02)

    @pytest.mark.parametrize("exponent", [0.3, 0.5, 0.8, 1.0, 1.5])
    @pytest.mark.parametrize("observed", [10, 15, 20])
    def test_a_noise_free_power_law_is_answered_near_its_true_end(self, exponent: float, observed: int) -> None:
        curve = power(60, exponent)
        prediction = predicted(curve[:observed], 60)
        left = curve[observed - 1] - curve[-1]
        assert prediction.mean == pytest.approx(curve[-1], abs=0.45 * left + 0.01)

    @pytest.mark.parametrize(
        ("curve", "family"),
        [(decay(60, 0.15), "exponential"), (power(60, 1.0), "power"), (power(60, 1.5), "power")],
        ids=["exponential", "power 1", "power 1.5"],
    )
    def test_names_the_family_that_explains_the_curve(self, curve: list[float], family: str) -> None:
        prediction = predicted(curve[:30], 60)
        assert prediction.family == family
        assert prediction.quality > 0.95

    @quick(60)
    @given(
        rate=st.floats(0.05, 0.6),
        end=st.floats(0, 2),
        start=st.floats(0.1, 10),
        observed=st.integers(10, 30),
    )
    def test_any_noise_free_decay_is_answered_better_than_with_its_last_value(
        self, rate: float, end: float, start: float, observed: int
    ) -> None:
        curve = decay(60, rate, end, start)
        prediction = predicted(curve[:observed], 60)
        left = curve[observed - 1] - curve[-1]
        assert abs(prediction.mean - curve[-1]) < 0.9 * left + 0.05 * start

    def test_noise_moves_the_answer_little(self) -> None:
        noise = np.random.default_rng(0).normal(0, 0.002, 30)
        prediction = predicted(list(decay(30) + noise), 60)
        assert prediction.mean == pytest.approx(decay(60)[-1], abs=0.03)

    def test_there_is_no_answer_before_ten_epochs(self) -> None:
        assert predict_final_loss(decay(9), 50) is None
        assert predict_final_loss(decay(10), 50) is not None
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
        prediction = predicted(history)
        assert (prediction.mean, prediction.family, prediction.quality) == (history[-1], "last", 0.0)

    @pytest.mark.parametrize("seed", range(8))
    def test_noise_alone_is_no_decay(self, seed: int) -> None:
        history = list(np.random.default_rng(seed).normal(1, 0.01, 12))
        prediction = predicted(history)
        assert prediction.quality < 0.75
        assert min(history) - 0.005 < prediction.mean <= history[-1]

    def test_a_curve_that_lost_its_best_value_goes_some_of_the_way_back(self) -> None:
        history = [1.0, 0.8, 0.6, 0.5, 0.4, 0.4, 0.6, 0.8, 0.9, 1.0]
        prediction = predicted(history)
        assert (prediction.family, prediction.quality) == ("best", 0.0)
        assert 0.4 < prediction.mean < 1.0
        late = predicted(history, 11)
        assert late.mean > prediction.mean

    def test_epochs_that_are_not_finite_are_left_out_in_their_places(self) -> None:
        history = power(20, 1.0)
        holed = [value if epoch % 2 else math.nan for epoch, value in enumerate(history)]
        holed[0], holed[9], holed[13] = history[0], math.inf, -math.inf
        squeezed = [value for value in holed if math.isfinite(value)]
        whole = predicted(history).mean
        assert predicted(holed).mean == pytest.approx(whole, abs=0.005)
        assert abs(predicted(squeezed).mean - whole) > 0.015

    def test_epochs_at_the_end_that_are_not_finite_leave_the_prediction_as_it_was(self) -> None:
        assert predicted([*decay(12), math.nan, math.inf]) == predicted(decay(12))

    def test_few_finite_epochs_are_enough(self) -> None:
        prediction = predicted([math.nan] * 9 + [3.0, 2.0, math.nan])
        assert prediction.lower <= prediction.mean <= 2.0 <= prediction.upper

    def test_no_finite_epoch_has_no_answer(self) -> None:
        assert predict_final_loss([math.nan, math.inf] * 6, 50) is None

    @pytest.mark.parametrize("observed", [50, 51, 70])
    def test_a_run_at_its_end_is_answered_with_its_last_value(self, observed: int) -> None:
        last = decay(observed)[-1]
        assert predicted(decay(observed)) == Prediction(last, 0.0, last, last, "last", 0.0)

    def test_a_spike_changes_little(self) -> None:
        plain, spiked = decay(15), decay(15)
        spiked[6] = 50.0
        assert predicted(spiked).mean == pytest.approx(predicted(plain).mean, abs=0.1)

    def test_a_start_far_off_does_not_make_the_rest_look_flat(self) -> None:
        assert predicted([6e4, 1e3, *decay(15)[2:]]).mean == pytest.approx(predicted(decay(15)).mean, abs=0.1)

    def test_a_drop_that_stays_is_no_spike(self) -> None:
        prediction = predicted([1.0, 0.99, 0.985, 0.98, 0.978, 0.4, 0.39, 0.385, 0.38, 0.378])
        assert prediction.mean <= 0.378

    @quick(100)
    @given(st.lists(sixteenths, min_size=12, max_size=12))
    def test_nothing_falls_further_than_it_did_lately(self, history: list[float]) -> None:
        # A fall to the very end, so that there is no way back to a better value.
        history.append(min(history) - 1)
        lately = max(history[-6:]) - history[-1]
        assert history[-1] - predicted(history).mean <= lately * (50 - 13) / 5 / 3 + 1e-9

    def test_a_tail_that_has_gone_flat_is_believed(self) -> None:
        prediction = predicted([9.0, 6.0, 4.0, 3.0, 2.5, *(2.3 - 1e-6 * epoch for epoch in range(7))])
        assert prediction.mean == pytest.approx(2.3, abs=1e-4)

    def test_a_long_history_is_thinned_and_keeps_its_end(self) -> None:
        curve = decay(1000, rate=0.004)
        assert predicted(curve[:600], 1000).mean == pytest.approx(curve[-1], abs=0.04)

    def test_a_loss_that_was_always_positive_is_not_foretold_below_zero(self) -> None:
        falling = [2.0 - 0.19 * epoch for epoch in range(1, 11)]
        prediction = predicted(falling, 30)
        assert prediction.lower == 0
        assert 0 <= prediction.mean < falling[-1]
        assert predicted([value - 5 for value in falling], 30).lower < -5

    def test_the_metric_of_other_sign_is_answered_with_the_other_sign(self) -> None:
        loss = [value - 3 for value in decay(15)]
        down, up = predicted(loss), predicted([-value for value in loss], mode="max")
        assert (up.mean, up.lower, up.upper) == (-down.mean, -down.upper, -down.lower)
        assert (up.std, up.family, up.quality) == (down.std, down.family, down.quality)
        assert up.mean > -loss[-1]

    def test_a_mode_that_is_neither_is_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="mode is 'minimize': give 'min' or 'max'"):
            predict_final_loss([], 50, mode="minimize")  # type: ignore[arg-type]


class TestUncertainty:
    def test_one_epoch_knows_only_its_magnitude(self) -> None:
        prediction = predicted([0.7])
        assert (prediction.mean, prediction.family) == (0.7, "last")
        assert prediction.lower == 0
        assert 0.5 < prediction.std <= 0.7

    def test_a_constant_is_the_surer_the_longer_it_lasts(self) -> None:
        stds = [predicted([-0.7] * epochs).std for epochs in (1, 2, 5, 20)]
        assert stds == pytest.approx([0.7, 0.35, 0.14, 0.035], rel=1e-3)

    def test_is_less_near_the_end(self) -> None:
        history = list(decay(10) + np.random.default_rng(1).normal(0, 0.01, 10))
        assert predicted(history, 12).std < predicted(history, 50).std / 2

    def test_most_ends_of_noisy_decays_lie_in_the_interval(self) -> None:
        rng = np.random.default_rng(5)
        inside = []
        for _ in range(200):
            walk = rng.normal(0, 0.01, 50).cumsum() + rng.normal(0, 0.005, 50)
            curve = 3 + np.arange(1.0, 51) ** -rng.uniform(0.3, 1.5) + walk
            prediction = predicted(list(curve[:10]))
            inside.append(prediction.lower <= curve[-1] <= prediction.upper)
        assert 0.55 < np.mean(inside) < 0.97

    @quick(300)
    @given(
        history=st.lists(st.floats(), max_size=25) | st.lists(st.floats(-1e3, 1e3), max_size=80),
        max_epochs=st.integers(-1, 10_000),
    )
    def test_any_history_has_a_finite_answer_or_none(self, history: list[float], max_epochs: int) -> None:
        prediction = predict_final_loss(history, max_epochs, min_epochs=1)
        if not any(map(math.isfinite, history)):
            assert prediction is None
            return
        assert prediction is not None
        assert math.isfinite(prediction.std)
        assert prediction.std >= 0
        assert -math.inf < prediction.lower <= prediction.mean <= prediction.upper < math.inf
        assert 0 <= prediction.quality <= 1
        assert prediction.family in {*FAMILIES, "last", "best"}
        assert prediction.neg_log10 is None or math.isfinite(prediction.neg_log10)

    @quick(150)
    @given(
        history=st.lists(sixteenths, min_size=2, max_size=20),
        shift=st.integers(-1000, 1000),
        scale=st.sampled_from([2.0**-27, 2.0**-3, 1.0, 2.0**27]),
    )
    def test_another_scale_and_level_are_answered_likewise(
        self, history: list[float], shift: int, scale: float
    ) -> None:
        # Below zero throughout, where no sign is kept; a constant has no scale of its own.
        base = [value - 2000 for value in history]
        assume(len(set(history)) > 1)
        first = predicted(base)
        second = predicted([(value + shift) * scale for value in base])
        near: Callable[[float], object] = lambda value: pytest.approx(value, rel=1e-6, abs=1e-6 * scale)  # noqa: E731
        assert second.mean == near((first.mean + shift) * scale)
        assert second.lower == near((first.lower + shift) * scale)
        assert second.upper == near((first.upper + shift) * scale)
        assert second.std == near(first.std * scale)

    def test_a_start_before_a_constant_is_the_scale_that_it_has(self) -> None:
        level = predicted([0.0625 - 2000, *[-2000.0] * 4])
        moved = predicted([0.0625 - 1000, *[-1000.0] * 4])
        assert level.std == pytest.approx(moved.std)
        assert level.std < 10

    @pytest.mark.parametrize("scale", [1e-8, 1e8])
    def test_a_positive_curve_of_any_scale_is_answered_likewise(self, scale: float) -> None:
        base, scaled = predicted(decay(15)), predicted([scale * value for value in decay(15)])
        assert scaled.mean == pytest.approx(scale * base.mean, rel=1e-6)
        assert scaled.std == pytest.approx(scale * base.std, rel=1e-6)


class TestLossPrediction:
    def test_is_recorded_from_the_tenth_epoch_on_in_units_of_the_loss_and_as_neg_log10(self) -> None:
        history = run_scripted([LossPrediction()], decay(50)).state.history
        assert all("predicted_final_loss" not in metrics for metrics in history[:9])
        for number, metrics in enumerate(history[9:], start=10):
            expected = predicted(decay(number))
            assert metrics["predicted_final_loss"] == pytest.approx(expected.mean, rel=1e-4)
            assert metrics["predicted_final_loss_std"] == pytest.approx(expected.std, rel=1e-3)
            assert metrics["predicted_final_neg_log10"] == -math.log10(metrics["predicted_final_loss"])
        assert history[-1]["predicted_final_loss"] == history[-1]["val_loss"]

    def test_a_negative_prediction_has_no_logarithm(self) -> None:
        metrics = run_scripted([LossPrediction()], decay(12, end=-3.0)).state.metrics
        assert metrics["predicted_final_loss"] < 0
        assert metrics["predicted_final_loss_std"] == 0
        assert "predicted_final_neg_log10" not in metrics

    def test_a_loss_that_ends_in_nan_is_answered_with_the_last_finite_one(self) -> None:
        losses = [float(epoch) for epoch in range(1, 12)]
        metrics = run_scripted([LossPrediction()], [*losses, math.nan, math.inf]).state.metrics
        assert metrics["predicted_final_loss"] == 11.0

    def test_follows_the_metric_it_was_given(self) -> None:
        trainer = run_scripted([LossPrediction("train_loss", min_epochs=5)], [1.0] * 8, train=decay(8))
        assert trainer.state.metrics["predicted_final_loss"] == pytest.approx(decay(8)[-1], abs=1e-6)

    def test_an_epoch_without_the_metric_keeps_its_place_in_time(self) -> None:
        trainer = scripted_trainer([callback := LossPrediction(min_epochs=4)], [1.0] * 20)
        trainer.state.history = [{"val_loss": 2.0}, {}, {"val_loss": 1.0}, {"val_loss": 0.8}]
        trainer.state.metrics = trainer.state.history[-1]
        callback.on_epoch_end(trainer)
        expected = predicted([2.0, math.nan, 1.0, 0.8], 20)
        assert trainer.state.metrics["predicted_final_loss"] == expected.mean

    def test_follows_a_metric_that_should_rise(self) -> None:
        rising = [-value for value in decay(12)]
        script = [*rising, *[0.0] * 20]
        history = run_scripted([LossPrediction(mode="max")], script).state.history
        assert history[11]["predicted_final_loss"] > rising[-1]

    def test_a_mode_that_is_neither_is_refused(self) -> None:
        with pytest.raises(ValueError, match="mode is 'up': give 'min' or 'max'"):
            LossPrediction(mode="up")  # type: ignore[arg-type]

    def test_without_the_metric_nothing_is_recorded(self, caplog: pytest.LogCaptureFixture) -> None:
        trainer = scripted_trainer([LossPrediction(min_epochs=1)], [1.0] * 3)
        with caplog.at_level(logging.WARNING):
            trainer.fit(one_batch())
        assert list(trainer.state.metrics) == ["train_loss", "lr"]
