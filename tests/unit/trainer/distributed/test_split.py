"""A model that is split over the processes learns what a whole one does, or is refused with a reason."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.trainer.distributed.ranks import Ranks
from tests.unit.trainer.distributed.runs import Blocks, fitted, scaled, under_contract
from tests.unit.trainer.distributed.split_runs import (
    VARIANTS,
    Parted,
    after_an_error,
    learned,
    loaded,
    pruned,
    refused,
    rehearsed,
    split_by_hand,
)
from tests.unit.trainer.distributed.test_curves import assert_near
from tests.unit.trainer.test_contract import ALL
from trainer.checkpoint.weights import load_weights
from trainer.distributed.splitting import LARGE, units


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_split_learns_what_is_whole(two: Ranks, name: str) -> None:
    found = two.values(learned, name, "fsdp")
    # In bf16 the sums of two halves are rounded otherwise than that of the whole.
    expected = two.values(learned, name, "ddp")[0] if name == "bf16" else learned(name, "ddp")
    assert_near(found[0][:2], expected[:2])
    for each in found:
        torch.testing.assert_close(each[2], expected[2], atol=1e-5, rtol=1e-4)


@pytest.mark.full
def test_what_overflows_in_one_is_no_step_of_a_split_model(two: Ranks) -> None:
    (steps, scale, weights), other = two.values(scaled, "fsdp")
    expected = two.values(scaled, "ddp")[0]
    assert (steps, scale) == other[:2] == expected[:2]
    for found, whole in zip(weights, expected[2], strict=True):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("precision", "event"), [("fp32", "on_before_backward"), ("fp16", "on_after_backward")])
def test_a_run_begins_again_after_an_error_in_one(two: Ranks, precision: str, event: str) -> None:
    first, second = two.values(after_an_error, "fsdp", precision, event)
    expected = two.values(after_an_error, "ddp", precision, event)[0]
    assert (first[0], second[0]) == ("RankError", "ZeroDivisionError")
    assert first[1:3] == second[1:3] == expected[1:3]
    for name, weight in expected[3].items():
        torch.testing.assert_close(first[3][name], weight, atol=2e-6, rtol=1e-5)
        assert torch.equal(first[3][name], second[3][name])


@pytest.mark.full
def test_a_batch_that_an_error_kept_from_its_forward_pass_is_trained_again(two: Ranks) -> None:
    first, second = two.values(after_an_error, "fsdp", "fp32", "on_train_batch_start")
    assert first[1:3] == second[1:3] == (5, 30)
    for name, weight in fitted("mlp")[1].items():
        torch.testing.assert_close(first[3][name], weight, atol=2e-6, rtol=1e-5)


@pytest.mark.full
def test_processes_that_stand_at_different_batches_do_not_begin_again(two: Ranks) -> None:
    found = two.call(after_an_error, "ddp", "fp32", "on_train_batch_start")
    assert all("an error has left the processes at different batches (rank 0" in each.error for each in found)


@pytest.mark.full
@pytest.mark.parametrize("name", ["blocks", "ema", "accumulation"])
def test_a_rehearsal_leaves_no_trace_in_a_model_that_it_has_split(two: Ranks, name: str) -> None:
    for found in two.values(rehearsed, name):
        assert_near(found, fitted(name))


@pytest.mark.full
def test_what_rank_0_ends_by_an_error_keeps_the_checkpoints_before(two: Ranks, tmp_path: Path) -> None:
    first, second = two.values(pruned, str(tmp_path))
    assert first[:2] == ("no more", "pruned")
    assert second[:2] == ("rank 0 failed: PrunedError: no more", "pruned")
    assert {"epoch-00002.pt"} <= set(first[2]) <= {"epoch-00001.pt", "epoch-00002.pt"}
    model = Blocks()
    load_weights(model, tmp_path / "epoch-00002.pt")  # whole, for one device
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.full
def test_who_splits_by_hand_chooses_what_is_gathered(two: Ranks) -> None:
    assert two.values(split_by_hand, "whole") == pytest.approx([fitted("mlp")[0][-1]["val_loss"]] * 2, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("in columns", "is not split along its first dimension: leave out shard_placement_fn"),
        ("in part", "2.weight is not split over all 2 processes alone: hand over the whole model"),
        ("for ddp", "give strategy='fsdp', or hand over the whole model"),
    ],
)
def test_what_is_split_otherwise_is_refused(two: Ranks, how: str, said: str) -> None:
    assert all(said in text for text in two.values(split_by_hand, how))


@pytest.mark.full
def test_a_file_of_weights_is_loaded_into_a_split_model(two: Ranks, tmp_path: Path) -> None:
    assert two.values(loaded, str(tmp_path)) == [True, True]


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("scalar", "parameter scale is a scalar, which strategy 'fsdp' can't split: give it shape [1]"),
        ("closure", "LBFGS takes a closure and works on all parameters at once"),
        ("kept", "keeps the parameters in 'all' too"),
        ("other parameters", "holds parameters that are not the model's"),
        ("callback", "_Whole looks at all weights at once, and with strategy 'fsdp' each process has a part"),
        ("norm", "norm_type is 1.0: with strategy 'fsdp' only the norm 2 is known"),
        ("means", "Adafactor works on the rows and columns of whole matrices"),
        ("updates", "a step that makes its own updates takes gradients of chosen parameters"),
    ],
)
def test_what_can_not_be_split_is_refused(two: Ranks, what: str, said: str) -> None:
    assert all(said in text for text in two.values(refused, what))


#: Shipped callbacks that need the whole model.
WHOLE = {"LRFinder", "ModelSummary", "SavePretrained", "WeightMerging", "GradientDump"}


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_every_callback_is_right_or_refused(two: Ranks, name: str, tmp_path: Path) -> None:
    found = two.call(under_contract, name, str(tmp_path / "split"), "fsdp")
    if name in WHOLE:
        assert all(
            f"ValueError: {name} " in each.error and "each process has a part" in each.error for each in found
        )
        return
    assert not any(each.error for each in found), found
    (history, weights, reason, _), second = found[0].value, found[1].value
    whole = two.values(under_contract, name, str(tmp_path / "whole"), "ddp")[0]
    assert reason == second[2] == whole[2]
    for key, weight in weights.items():
        assert torch.equal(weight, second[1][key])
        torch.testing.assert_close(weight, whole[1][key], atol=2e-6, rtol=1e-5)
    for metrics, others in zip(history, whole[0], strict=True):
        assert metrics == pytest.approx(others, abs=1e-6, rel=1e-5, nan_ok=True)


class TestUnits:
    def test_blocks_in_a_list_are_gathered_by_themselves(self) -> None:
        model = nn.ModuleDict({"blocks": nn.ModuleList([Parted(), Parted()]), "last": nn.Linear(2, 2)})
        assert units(model) == list(model["blocks"])

    def test_of_lists_in_lists_the_outer_one_counts(self) -> None:
        block = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
        assert units(nn.Sequential(nn.ModuleList([block]))) == [block]
        inner = nn.ModuleList([nn.Linear(2, 2)])  # is never called itself
        assert units(nn.ModuleList([inner])) == [inner[0]]

    def test_large_layers_are_too(self) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(LARGE, 1), nn.ReLU(), nn.Linear(1, 1))
        assert units(model) == [model[0]]

    def test_what_shares_its_weights_with_another_belongs_to_the_rest(self) -> None:
        model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2))
        model[1].weight = model[0][0].weight
        assert units(model) == [model[0][1]]
