"""What freeze_thaw learns from an earlier study, and what it does not let itself be told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from optuna.distributions import FloatDistribution
from scipy.stats import spearmanr

from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.curves import curves_of, earlier_curves
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.earlier import earlier_of, prior_after
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.freeze_thaw.model import CurveModel
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.freeze_thaw.study_view import StudyView
from hpo.search.schedulers.freeze_thaw.table import Warp, table_of
from hpo.search.schedulers.scheduler import New, Resume, Standing
from hpo.search.schedulers.seen import Seen
from tests.support.standings import grown, seen

pytestmark = pytest.mark.full

SPACE = {"x": FloatDistribution(0.0, 1.0), "y": FloatDistribution(0.0, 1.0)}
Loss = Callable[[Mapping[str, Any], int], float]


def bowl(params: Mapping[str, Any], epoch: int) -> float:
    return (params["x"] - 0.7) ** 2 + 0.3 * (params["y"] - 0.2) ** 2 + 0.3 / epoch


def far(params: Mapping[str, Any], epoch: int) -> float:
    """The same of other data: another level and spread."""
    return 1000 + 50 * bowl(params, epoch)


def upside_down(params: Mapping[str, Any], epoch: int) -> float:
    return -bowl(params, epoch)


def trials(loss: Loss, count: int, source: str | None, seed: int = 0) -> list[Seen]:
    """Trials at even points; those of a source are imported."""
    points = np.random.default_rng(seed).random((count, 2))
    return [
        seen(
            number,
            [loss({"x": x, "y": y}, epoch) for epoch in range(1, 10)],
            "ended",
            params={"x": float(x), "y": float(y)},
            whole=True,
            imported=source is not None,
            source=source,
        )
        for number, (x, y) in enumerate(points)
    ]


def study(found: list[Seen], **more: Any) -> Standing:
    return Standing(read=lambda: found, space=SPACE, horizon=9, **more)


def predicted(own: list[Seen], past: list[Seen]) -> tuple[Any, Any]:
    """What a model expects at even points, and what the loss there is."""
    now = study([*past, *own])
    encoding, curves = Encoding(SPACE, {}), curves_of(now)
    learnt = earlier_of(earlier_curves(now), encoding, 9, {})
    table = table_of(curves, encoding, Warp(curves), 9, 300)
    theta = prior_after(learnt, encoding.lengths)[0]
    model = CurveModel(theta, encoding.groups, table.rows, table.z, learnt.known)
    points = np.random.default_rng(7).random((200, 2))
    at = Rows.each(encoding.features(points), np.ones(200), np.full(200, -1, dtype=np.int64))
    return model.predict(at)[0], [bowl({"x": x, "y": y}, 9) for x, y in points]


@pytest.mark.parametrize("loss", [bowl, far])
def test_few_trials_and_an_earlier_study_know_the_space(loss: Loss) -> None:
    own = trials(bowl, 3, None, seed=1)
    warm, true = predicted(own, trials(loss, 30, "pilot"))
    cold, _ = predicted(own, [])
    assert spearmanr(warm, true).statistic > 0.85
    assert spearmanr(warm, true).statistic > spearmanr(cold, true).statistic + 0.1


def test_an_earlier_study_that_contradicts_is_read_the_other_way_round() -> None:
    own = trials(bowl, 8, None, seed=1)
    warm, true = predicted(own, trials(upside_down, 30, "pilot"))
    assert spearmanr(warm, true).statistic > 0.8


def test_the_level_of_other_data_does_not_enter() -> None:
    own = trials(bowl, 8, None, seed=1)
    one, _ = predicted(own, trials(bowl, 30, "pilot"))
    other, _ = predicted(own, trials(far, 30, "pilot"))
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_scales_are_expected_where_those_of_earlier_studies_are() -> None:
    now = study([*trials(bowl, 30, "pilot"), *trials(far, 20, "older", seed=3)])
    encoding = Encoding(SPACE, {})
    learnt = earlier_of(earlier_curves(now), encoding, 9, {})
    assert sorted(learnt.scales) == ["older", "pilot"]
    json.dumps(learnt.scales, allow_nan=False)
    mean, std = prior_after(learnt, 2)
    np.testing.assert_allclose(mean, (np.array(learnt.scales["pilot"]) + learnt.scales["older"]) / 2)
    np.testing.assert_array_equal(std, kernel.prior(2)[1])
    again = earlier_of(earlier_curves(now), encoding, 9, {"pilot": kernel.prior(2)[0].tolist()})
    assert again.scales["pilot"] == kernel.prior(2)[0].tolist(), "what is stored is not fitted again"
    assert again.scales["older"] == learnt.scales["older"]
    assert (learnt.known.mean, learnt.known.std) == (0.3, pytest.approx(0.6 / math.sqrt(2)))


def test_the_best_of_an_earlier_study_are_tried_first() -> None:
    past = trials(far, 30, "pilot")
    end, answers = grown(FreezeThaw(), study(past, n_epochs=60), bowl)
    first, second, third = answers[:3]
    assert isinstance(first, New)
    assert isinstance(second, New)
    assert [each.why.kind for each in (first, second, third)] == ["earlier", "earlier", "initial"]
    ranked = sorted(past, key=lambda trial: trial.values[9])
    assert first.params == ranked[0].params
    assert second.params in [trial.params for trial in ranked[:10]]
    assert set(end.state) == {"scales", "rows", "earlier"}
    assert sum(trial.epochs for trial in end.own) == 60


def test_an_earlier_study_makes_a_short_search_better() -> None:
    past = trials(far, 30, "pilot")
    finds = {
        name: np.mean(
            [
                min(
                    min(trial.values.values())
                    for trial in grown(FreezeThaw(), replace(start, seed=seed), bowl)[0].own
                )
                for seed in range(4)
            ]
        )
        for name, start in (("warm", study(past, n_epochs=40)), ("cold", study([], n_epochs=40)))
    }
    assert finds["warm"] < finds["cold"]


def test_no_trial_of_other_data_is_in_the_way_of_a_promotion() -> None:
    own = [seen(40 + k, [1.0 + k], params={"x": 0.1 * k, "y": 0.5}) for k in range(3)]
    better = trials(lambda *_: 0.0, 30, "pilot")
    for past in ([], better):
        answer = Asha().next(study([*past, *own]))
        assert isinstance(answer, Resume)
        assert answer.number == 40
    assert len(StudyView(study([*better, *own])).curves) == 3


def test_an_earlier_study_without_a_finite_value_is_no_trouble() -> None:
    past = trials(lambda *_: math.nan, 5, "pilot")
    end, _ = grown(FreezeThaw(), study(past, n_epochs=40), bowl)
    assert sum(trial.epochs for trial in end.own) == 40
