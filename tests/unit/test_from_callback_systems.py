"""The examples of other callback systems, as the page prints them, do what they do there."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.callback import global_callbacks
from trainer.checkpoint.files import list_checkpoints

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "from-callback-systems.md").read_text()
#: Samples of the page's data, and of its batches.
BATCHES, EPOCHS, LR = 5, 2, 0.05


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the page's Python leaves; what it printed but for the console's lines, and the folder it ran in."""
    names: dict[str, Any] = {"folder": tmp_path_factory.mktemp("page")}
    printed = io.StringIO()
    with contextlib.chdir(names["folder"]), contextlib.redirect_stdout(printed):
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            exec(block, names)
    console = ("epoch ", "training ended")
    names["printed"] = [each for each in printed.getvalue().splitlines() if not each.startswith(console)]
    yield names
    assert global_callbacks() == ()


def weights(trainer: Any) -> Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def test_the_best_loss_is_tracked_logged_and_printed(page: dict[str, Any]) -> None:
    history = page["tracked"].state.history
    losses = [epoch["val_loss"] for epoch in history]
    assert [epoch["best_val_loss"] for epoch in history] == [losses[0], min(losses)]
    assert page["printed"][0] == f"Training complete. Best val_loss: {min(losses):.4e} at epoch 2"


def test_the_runner_is_in_order_and_taken_over(page: dict[str, Any]) -> None:
    assert [line.split() for line in page["printed"][1:6]] == [
        ["5", "NaNDetection"],
        ["10", "OptimizerMode"],
        ["12", "GradientMonitor"],
        ["60", "BestLossTracker"],
        ["80", "ConsoleLogging"],
    ]
    assert page["printed"][6].startswith("Training complete.")


def test_the_wrapper_is_called_and_gone_afterwards(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = page["make_trainer"]()
    plain.fit(page["data"], page["data"])
    assert torch.equal(weights(page["parallel"]), weights(plain))
    calls: list[type] = []
    forward = torch.nn.DataParallel.forward

    def counted(self: Any, *inputs: Any, **more: Any) -> Any:
        calls.append(type(self.module))
        return forward(self, *inputs, **more)

    monkeypatch.setattr(torch.nn.DataParallel, "forward", counted)
    trainer = page["make_trainer"]([page["ParallelTrainer"]()], max_epochs=1)
    trainer.fit(page["data"])
    assert calls == [torch.nn.Linear] * BATCHES
    assert type(trainer.model) is torch.nn.Linear
    assert trainer.state_dict()["model"].keys() == {"weight", "bias"}


@pytest.mark.parametrize("drop_last", [False, True])
def test_gradients_add_up_as_in_the_shipped_callback(page: dict[str, Any], drop_last: bool) -> None:
    assert page["by_hand"].state.step == page["shipped"].state.step == 3 * EPOCHS
    torch.testing.assert_close(weights(page["by_hand"]), weights(page["shipped"]))
    trainer = page["make_trainer"]([page["AccumulateScheduler"](2, drop_last)])
    trainer.fit(page["data"])
    assert trainer.state.step == (3 - drop_last) * EPOCHS


def test_the_rate_rises_and_the_run_ends_for_its_reason(page: dict[str, Any]) -> None:
    state = page["stopped"].state
    assert (state.stop_reason, state.metrics["val_loss"] < 0.5) == ("good enough", True)
    assert 1 < state.epoch < 50
    assert [epoch["lr"] for epoch in state.history[:2]] == [LR * 5 / 8, LR]


def test_permanent_and_ephemeral_checkpoints_lie_side_by_side(page: dict[str, Any]) -> None:
    files = list_checkpoints([page["folder"] / "checkpoints"])
    # Before training, fixed, permanent, permanent, the end: each ephemeral one is gone with the next.
    assert [file.epoch * BATCHES + file.batch for file in files] == [0, 2, 4, 8, 10]


def test_batches_grow_and_the_rate_with_their_root(page: dict[str, Any]) -> None:
    state = page["growing"].state
    assert state.step == (3 + 1) + 3  # 3 x 4 + 8 samples, then 8 + 8 + 4
    assert [epoch["lr"] for epoch in state.history] == pytest.approx([LR * math.sqrt(8 / 4)] * EPOCHS)


def test_the_loss_is_scaled_for_the_gradients_only(page: dict[str, Any]) -> None:
    doubled = page["make_trainer"]()
    for group in doubled.optimizer.param_groups:
        group["lr"] = 2 * LR
    doubled.fit(page["data"], page["data"])
    torch.testing.assert_close(weights(page["scaled"]), weights(doubled))
    assert page["scaled"].state.metrics["val_loss"] == pytest.approx(doubled.state.metrics["val_loss"])


def test_a_loss_is_checked_inside_the_block_only(page: dict[str, Any]) -> None:
    assert (page["diverged"].epoch, page["diverged"].stop_reason) == (1, "diverged")
    assert (page["unchecked"].epoch, page["unchecked"].stop_reason) == (2, None)


def test_user_state_is_shared_and_checkpointed(page: dict[str, Any]) -> None:
    assert page["timed"].state_dict()["state"]["user_state"]["steps"] == BATCHES * EPOCHS
    assert any(re.fullmatch(r"10 steps in \d+\.\d\d s", line) for line in page["printed"])


def test_functions_see_the_norm_and_which_step_was_skipped(page: dict[str, Any]) -> None:
    assert [(step, skipped) for step, _, _, skipped in page["steps"]] == [
        (1, False),
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    ]
    assert page["printed"][-6] == "Evaluation complete!"
    assert [line.split()[2] == "skipped" for line in page["printed"][-5:]] == [False, True, False, False, False]
    norms = [norm for _, _, norm, skipped in page["steps"] if not skipped]
    assert all(isinstance(norm, Tensor) and 0 < norm < 10 for norm in norms)
