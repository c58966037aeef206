"""However a run of several processes ends, all of them end, at the same batch and with the same reason."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.unit.trainer.distributed.ranks import Ranks
from tests.unit.trainer.distributed.runs import (
    PrunedError,
    computing_alone,
    diverged,
    failing,
    failing_as_it_evaluates,
    failing_as_on_devices,
    failing_at_its_end,
    fitted,
    killed,
    killed_and_tested,
    routed,
    skipping,
    stopped,
    stopped_before_an_epoch,
    validated,
    waiting_on_devices,
)

pytestmark = pytest.mark.full

both = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])

#: Batches an epoch: 85 samples in batches of 16.
BATCHES = 6


@both
@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("batch", [1, BATCHES])
@pytest.mark.parametrize(
    ("how", "epochs"),
    [("now", lambda batch: (1, batch, BATCHES + batch, 1)), ("epoch", lambda batch: (2, 0, BATCHES + batch, 2))],
)
def test_what_one_asks_for_all_do_at_once(
    two: Ranks, asking: int, batch: int, how: str, epochs, strategy: str
) -> None:
    assert two.values(stopped, asking, batch, how, strategy) == [("enough", *epochs(batch))] * 2


@both
@pytest.mark.parametrize("asking", [0, 1])
def test_what_one_asks_for_while_another_writes_all_do(
    two: Ranks, asking: int, tmp_path: Path, strategy: str
) -> None:
    found = two.values(stopped, asking, 2, "now", strategy, str(tmp_path))
    assert found == [("enough", 1, 2, BATCHES + 2, 1)] * 2


@both
def test_what_one_asks_for_at_an_epochs_end_all_do(four: Ranks, strategy: str) -> None:
    assert four.values(stopped, 3, 2, "end", strategy) == [("enough", 2, 0, 2 * BATCHES, 2)] * 4


@both
@pytest.mark.parametrize("asking", [0, 1])
def test_what_one_asks_for_before_an_epochs_first_batch_all_do(two: Ranks, asking: int, strategy: str) -> None:
    never = two.values(stopped_before_an_epoch, 2, strategy)[0][-1]
    assert two.values(stopped_before_an_epoch, asking, strategy) == [(1, 0, BATCHES, 1, never)] * 2


@both
@pytest.mark.parametrize("asking", [0, 1])
def test_a_loss_that_is_no_number_in_one_ends_all_at_its_batch(two: Ranks, asking: int, strategy: str) -> None:
    assert two.values(diverged, asking, strategy) == [("diverged", 1, 2, 8)] * 2


@both
@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize(
    ("event", "place"),
    [
        ("on_fit_start", (0, 0)),
        ("on_train_batch_start", (1, 2)),
        ("on_before_backward", (1, 2)),
        ("on_train_batch_end", (1, 2)),
        ("on_validation_batch_end", (1, BATCHES)),
        ("on_epoch_end", (2, 0)),
        ("on_fit_end", (5, 0)),
    ],
)
def test_an_error_of_one_is_told_by_all(
    two: Ranks, asking: int, event: str, place: tuple[int, int], strategy: str
) -> None:
    found = two.values(failing, asking, event, ZeroDivisionError, place, strategy)
    assert found[asking].startswith("ZeroDivisionError: no more")
    assert found[1 - asking].startswith(f"RankError: rank {asking} failed: ZeroDivisionError: no more")


@both
@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize(("kind", "reason"), [(ZeroDivisionError, "error"), (KeyboardInterrupt, "interrupted")])
def test_an_error_at_the_end_of_one_leaves_all_with_the_last_weights(
    two: Ranks, asking: int, kind: type[BaseException], reason: str, strategy: str, tmp_path: Path
) -> None:
    found = two.values(failing_at_its_end, asking, strategy, kind, str(tmp_path))
    last = fitted("mlp")[1]
    for number, (error, ended, weights) in enumerate(found):
        told = f"{kind.__name__}: no more"
        assert error == (told if number == asking else f"RankError: rank {asking} failed: {told}")
        assert ended == reason
        for name, weight in last.items():
            torch.testing.assert_close(weights[name], weight, atol=2e-6, rtol=1e-5)
    # The best, and the last, which waited; parts of it are lost where rank 0 is broken off as all evaluate.
    written = {path.name for path in tmp_path.glob("epoch-*.pt")}
    assert written == {"epoch-00001.pt"} | ({"epoch-00005.pt"} if (strategy, asking) != ("fsdp", 1) else set())


@both
@pytest.mark.parametrize("asking", [0, 1])
def test_an_error_of_one_as_all_evaluate_at_the_end_is_told_by_all(two: Ranks, asking: int, strategy: str) -> None:
    found = two.values(failing_as_it_evaluates, [asking], strategy)
    assert found[asking] == ("ZeroDivisionError: no more", "error")
    assert found[1 - asking] == (f"RankError: rank {asking} failed: ZeroDivisionError: no more", "error")


@both
def test_an_error_of_all_as_they_evaluate_may_be_caught(two: Ranks, strategy: str) -> None:
    assert two.values(partial(failing_as_it_evaluates, caught=True), [0, 1], strategy) == [("no error", None)] * 2


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("event", ["on_before_forward", "on_train_batch_end"])
def test_what_one_computes_alone_with_a_split_model_ends_all(two: Ranks, asking: int, event: str) -> None:
    for text in two.values(computing_alone, asking, event):
        assert "the processes are at different places of the run: in one of them a hook has skipped" in text
        assert text.endswith("(error, 1)")


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("event", ["on_train_batch_end", "on_epoch_end"])
def test_an_evaluation_of_one_alone_ends_all(two: Ranks, asking: int, event: str) -> None:
    for text in two.values(computing_alone, asking, event, "ddp"):
        assert "the processes are at different places of the run: in one of them a hook has skipped" in text
        assert "(error, " in text


def test_a_split_model_that_uses_other_parameters_in_each_process_is_an_error_in_all() -> None:
    ranks = Ranks(2)
    try:
        for text in ranks.values(routed):
            assert text.startswith("the processes use different parameters of a split model in the same batch")
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("event", "action"),
    [
        ("on_train_batch_start", "batch"),
        ("on_train_batch_start", "optimizer_step"),
        ("on_train_epoch_start", "epoch"),
    ],
)
def test_what_one_alone_skips_ends_all(two: Ranks, event: str, action: str) -> None:
    for text in two.values(skipping, event, action):
        assert "the processes are at different places of the run: in one of them a hook has skipped" in text
        assert text.endswith("(error, 1)")


@pytest.mark.parametrize("asking", [0, 1])
def test_a_validation_that_one_skips_just_before_it_all_skip(two: Ranks, asking: int) -> None:
    assert two.values(validated, asking) == [[True, False, True]] * 2


def test_those_that_share_no_memory_end_together_too(two_apart: Ranks) -> None:
    assert two_apart.values(stopped, 1, 2, "now") == [("enough", 1, 2, BATCHES + 2, 1)] * 2
    assert two_apart.values(diverged, 0) == [("diverged", 1, 2, 8)] * 2
    first, second = two_apart.values(failing, 1, "on_before_backward", ZeroDivisionError)
    assert first.startswith("RankError: rank 1 failed: ZeroDivisionError: no more")
    assert second.startswith("ZeroDivisionError: no more")
    first, second = two_apart.values(failing_as_it_evaluates, [1], "fsdp")
    assert first == ("RankError: rank 1 failed: ZeroDivisionError: no more", "error")
    assert second == ("ZeroDivisionError: no more", "error")
    for strategy in ("fsdp", "ddp"):
        first, second = two_apart.values(computing_alone, 0, "on_train_batch_end", strategy)
        assert first == second
        assert "the processes are at different places of the run" in first


@both
def test_a_trial_that_is_pruned_by_one_is_pruned_in_all(two: Ranks, strategy: str) -> None:
    first, second = two.values(failing, 0, "on_epoch_end", PrunedError, (2, 0), strategy)
    assert first == "PrunedError: no more (pruned)"
    assert second == "RankError: rank 0 failed: PrunedError: no more (pruned)"


@both
def test_of_four_all_name_the_one_that_failed(four: Ranks, strategy: str) -> None:
    found = four.values(failing, 2, "on_before_backward", ZeroDivisionError, (1, 2), strategy)
    assert [text.split(" (")[0] for text in found] == [
        "ZeroDivisionError: no more" if rank == 2 else "RankError: rank 2 failed: ZeroDivisionError: no more"
        for rank in range(4)
    ]


@pytest.fixture(params=[False, True], ids=["together", "apart"])
def mortal(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(2, apart=request.param)
    yield ranks
    ranks.close()


#: What is said where processes may have come apart without its being seen.
APART = (
    "; as these processes share no memory, it may also be that the processes are at different places of the run: "
    "in one of them a hook has skipped something that it did not skip in another one, or asked all for something; "
    "let hooks do the same in all processes"
)


def death_of(rank: int, ranks: Ranks) -> str:
    """What the others say of a process that was killed."""
    return f"rank {rank} died without a word, as a process that is killed does{APART if ranks.apart else ''}"


@both
@pytest.mark.parametrize(
    ("asking", "event"), [(0, "on_before_backward"), (1, "on_before_backward"), (1, "on_train_batch_end")]
)
def test_the_death_of_one_ends_all(mortal: Ranks, asking: int, event: str, strategy: str) -> None:
    found = mortal.call(killed, asking, event, strategy)
    assert found[asking].error == "killed"
    assert found[1 - asking].value == death_of(asking, mortal)


def test_a_hook_that_evaluates_after_the_death_of_one_does_not_wait_for_it(mortal: Ranks) -> None:
    found = mortal.call(killed_and_tested)
    assert found[0].value == ", ".join(2 * [death_of(1, mortal)])


def test_an_error_on_devices_which_ends_the_process_group_is_told_by_all_and_another_fit_begins_anew() -> None:
    ranks = Ranks(2)
    try:
        (first, left), (second, also_left) = ranks.values(failing_as_on_devices)
    finally:
        ranks.close()
    told = "RankError: rank 1 failed: ZeroDivisionError: no more"
    assert first == [told] * 2
    assert second == [told, "ZeroDivisionError: no more"]
    assert not left
    assert not also_left


@pytest.mark.parametrize(("event", "waits"), [("on_before_backward", 0), ("on_validation_batch_end", 1)])
def test_no_process_waits_on_its_device_for_one_that_has_failed(event: str, waits: int) -> None:
    ranks = Ranks(2)
    try:
        first, second = ranks.values(waiting_on_devices, event)
    finally:
        ranks.close()
    assert first == ("RankError: rank 1 failed: ZeroDivisionError: no more", waits)
    assert second == ("ZeroDivisionError: no more", waits)


@pytest.mark.parametrize("action", ["batch", "optimizer_step"])
def test_those_that_share_no_memory_say_that_they_may_have_come_apart(action: str) -> None:
    ranks = Ranks(2, apart=True)
    found = ranks.call(skipping, "on_train_batch_start", action)
    ranks.close()
    said = [ended.value for ended in found if ended.value]
    assert said
    assert all(text.endswith(f"{APART} (error, 1)") for text in said)
