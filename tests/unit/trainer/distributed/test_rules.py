"""What several processes refuse, and what they share."""

import pytest
import torch

from tests.unit.trainer.distributed.ranks import Ranks
from tests.unit.trainer.distributed.runs import (
    defaults_before_the_group,
    evaluated_untrained,
    lazy,
    learned_by_the_loss,
    looked_at_by_one,
    numbered_elsewhere,
    refused,
    scaled,
    statistics,
    with_a_loss_of_its_own,
)

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ready loader", "the data is a DataLoader, of which each of the 2 processes would get the same batches"),
        ("wrapped model", "the model is wrapped in DataParallel"),
        ("metric", "metric spread (Spread) has seen only a part of the data"),
        ("sparse", "build the embedding with sparse=False"),
        ("cuda_graph", "cuda_graph needs a CUDA device"),
    ],
)
def test_what_can_not_be_done_together_is_refused(two: Ranks, what: str, said: str) -> None:
    assert all(said in text for text in two.values(refused, what))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("action", ["fit", "validate"])
def test_weights_that_each_would_draw_for_itself_are_refused(two: Ranks, action: str, strategy: str) -> None:
    for text in two.values(lazy, action, strategy):
        assert text.startswith("parameter 0.weight has no shape yet: call the model once with a batch before ")
    for text in two.values(lazy, action, strategy, "loss"):
        assert text.startswith("parameter layer.weight has no shape yet: call the loss once with a batch before ")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_not_trained_is_that_of_rank_0(two: Ranks, strategy: str) -> None:
    (first, own), (second, other) = two.values(with_a_loss_of_its_own, strategy)
    assert first == second
    # Its mean is that of the samples of rank 0.
    assert first[0] == pytest.approx(with_a_loss_of_its_own("ddp")[0][0], rel=0.01)
    assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))


def test_default_callbacks_know_of_a_group_that_is_to_come() -> None:
    ranks = Ranks(2)
    try:
        assert ranks.values(defaults_before_the_group) == [True, True]
    finally:
        ranks.close()


def test_what_overflows_in_one_is_no_step_in_any(two: Ranks) -> None:
    (steps, scale, weights), other = two.values(scaled)
    assert (steps, scale) == other[:2]
    assert steps < 6
    assert all(torch.equal(*pair) for pair in zip(weights, other[2], strict=True))


def test_a_loss_that_is_trained_begins_as_that_of_rank_0(two: Ranks) -> None:
    first, second = two.values(learned_by_the_loss)
    for own, other, expected in zip(first, second, learned_by_the_loss(), strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, expected, atol=2e-6, rtol=1e-5)


def test_an_evaluation_before_the_first_fit_has_the_weights_of_rank_0(two: Ranks) -> None:
    first, second = two.values(evaluated_untrained)
    for own, other, expected in zip(first[:2], second[:2], evaluated_untrained(), strict=False):
        assert own == other == pytest.approx(expected)
    assert torch.equal(first[2], second[2])


@pytest.mark.parametrize("sync_batchnorm", [True, False])
def test_statistics_are_equal_at_the_end_and_classes_as_before(two: Ranks, sync_batchnorm: bool) -> None:
    (mean, kinds), (other, _) = two.values(statistics, sync_batchnorm)
    expected, classes = statistics(sync_batchnorm)
    assert torch.equal(mean, other)
    assert torch.allclose(mean, expected, atol=1e-6) == sync_batchnorm
    assert kinds == classes


def test_one_process_may_look_at_a_model_with_batch_norm_without_gradients(two: Ranks) -> None:
    assert two.values(looked_at_by_one) == [looked_at_by_one()] * 2


@pytest.mark.parametrize("place", ["another container", None])
def test_a_process_whose_number_says_nothing_here_is_not_taken_for_dead(two: Ranks, place: str | None) -> None:
    first, second = two.values(numbered_elsewhere, place)
    assert first == second
