"""Several processes learn what one does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.trainer.distributed.ranks import Ranks
from tests.unit.trainer.distributed.runs import VARIANTS, fitted, fitted_by_ready_loader, overfitted

pytestmark = pytest.mark.full

#: What strategy "fsdp" refuses, or torch's FSDP2.
WHOLE = {"closure", "closure of a sum", "updates of its own", "channels last", "complex"}
RUNS = [(name, "ddp") for name in VARIANTS] + [(name, "fsdp") for name in VARIANTS if name not in WHOLE]
#: What four may do otherwise than two: uneven parts, statistics over all, the weights of their sums.
OF_FOUR = [
    (name, "ddp")
    for name in (
        "mlp",
        "weighted",
        "cnn, accumulation, weighted",
        "clipping",
        "ema",
        "merged metric",
        "tiny batches",
    )
] + [(name, "fsdp") for name in ("mlp", "accumulation", "clipping", "ema", "blocks")]


def assert_near(found: object, expected: object) -> None:
    history, weights = found
    expected_history, expected_weights = expected
    assert [metrics.keys() for metrics in history] == [metrics.keys() for metrics in expected_history]
    for metrics, others in zip(history, expected_history, strict=True):
        assert metrics == pytest.approx(others, abs=1e-6, rel=1e-6, nan_ok=True)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_two_processes_learn_what_one_does(two: Ranks, name: str, strategy: str) -> None:
    first, second = two.values(fitted, name, strategy)
    assert_near(first, fitted(name))
    assert first[0] == second[0]
    assert all(torch.equal(weight, second[1][key]) for key, weight in first[1].items())


@pytest.mark.parametrize(("name", "strategy"), OF_FOUR)
def test_four_processes_learn_what_one_does(four: Ranks, name: str, strategy: str) -> None:
    found = four.values(fitted, name, strategy)
    assert_near(found[0], fitted(name))
    assert all(each[0] == found[0][0] for each in found)


@pytest.mark.parametrize("run", [fitted_by_ready_loader, overfitted])
def test_a_batch_without_a_sample_for_a_process_says_nothing_of_others(two: Ranks, run: Callable[[], Any]) -> None:
    first, second = two.values(run)
    assert_near(first, run())
    assert first[0] == second[0]


@pytest.mark.parametrize("name", ["mlp", "cnn, accumulation, weighted", "merged metric"])
def test_those_that_share_no_memory_learn_the_same_bits(two: Ranks, two_apart: Ranks, name: str) -> None:
    (history, weights), _ = two.values(fitted, name)
    (others, other_weights), _ = two_apart.values(fitted, name)
    assert history == others
    assert all(torch.equal(weight, other_weights[key]) for key, weight in weights.items())
