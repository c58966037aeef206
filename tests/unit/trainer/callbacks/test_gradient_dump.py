"""GradientDump: which steps are written, and what is in their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.callbacks.reads import no_reads_inside_a_step
from tests.unit.trainer.support import (
    At,
    TwoUpdates,
    assert_same,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer.callbacks import GradientClipping, GradientDump


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.iterdir())


def test_the_files_hold_the_gradients_of_the_chosen_steps(tmp_path: Path) -> None:
    batches: list[list[Tensor]] = []
    weights: list[Tensor] = []
    model = nn.Linear(4, 1)

    def watch(trainer: Any) -> None:
        batches.append(trainer.state.batch)
        weights.append(torch.cat([model.weight.detach(), model.bias.detach()[None]], dim=1).double())

    dump = GradientDump(tmp_path, every_n_steps=2, first_step=2, last_step=7)
    others = [At("on_before_forward", watch), GradientClipping(max_norm=1e-3)]
    make_trainer([dump, *others], model=model, max_epochs=3).fit(regression())
    assert steps(tmp_path) == [2, 4, 6]
    for step in (2, 4, 6):
        inputs, targets = (part.double() for part in batches[step - 1])
        inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
        gradient = 2 * (inputs @ weights[step - 1].T - targets).T @ inputs / len(inputs)
        found = torch.load(tmp_path / f"gradients-step-{step:08d}.pt", weights_only=True)
        assert list(found) == ["weight", "bias"]
        torch.testing.assert_close(found["weight"], gradient[:, :4].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["bias"], gradient[0, 4:].float(), rtol=1e-5, atol=1e-5)


def test_a_wrapped_model_has_the_names_of_what_is_in_it(tmp_path: Path) -> None:
    make_trainer([GradientDump(tmp_path, max_files=1)], model=nn.DataParallel(make_model())).fit(regression())
    found = torch.load(tmp_path / "gradients-step-00000001.pt", weights_only=True)
    assert list(found) == [name for name, _ in make_model().named_parameters()]


def test_a_step_with_updates_by_name_has_each_optimizers_own_gradients(tmp_path: Path) -> None:
    seen: dict[int, dict[str, Tensor]] = {}

    def watch(trainer: Any) -> None:
        first = trainer.state.optimizer_name == "first"
        held = {"0.weight": trainer.model[0].weight} if first else {"4.weight": trainer.model[4].weight}
        of_step = seen.setdefault(trainer.state.step + 1, {})
        of_step.update({name: weight.grad.clone() for name, weight in held.items()})

    model = make_model()
    optimizers = {
        "first": torch.optim.SGD([model[0].weight], lr=0.05),
        "last": torch.optim.SGD([model[4].weight], lr=0.05),
    }
    callbacks = [GradientDump(tmp_path), At("on_before_optimizer_step", watch)]
    make_trainer(callbacks, model=model, optimizer=optimizers, step=TwoUpdates()).fit(regression())
    assert [sorted(seen[step]) for step in (1, 2)] == [["0.weight", "4.weight"], ["4.weight"]]
    for step, expected in seen.items():
        found = torch.load(tmp_path / f"gradients-step-{step:08d}.pt", weights_only=True)
        assert sorted(found) == sorted(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)


def test_a_step_with_a_closure_has_the_gradients_before_it(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    watch = At("on_before_optimizer_step", lambda trainer: seen.append(model.weight.grad.clone()))
    trainer = make_trainer([GradientDump(tmp_path), watch], model=model, optimizer=optimizer, max_epochs=1)
    trainer.fit(regression(4))
    assert len(seen) > 1
    found = torch.load(tmp_path / "gradients-step-00000001.pt", weights_only=True)
    torch.testing.assert_close(found["weight"], seen[0], rtol=0, atol=0)


def test_files_elements_and_names_are_bounded_and_a_resumed_run_writes_the_same(tmp_path: Path) -> None:
    def dump(place: str) -> GradientDump:
        return GradientDump(tmp_path / place, max_files=5, first_elements=3, names="weight$")

    make_trainer([dump("whole")], max_epochs=3).fit(regression())
    stopped = make_trainer([dump("parts"), interrupt_at(2)], max_epochs=3)
    stopped.fit(regression())
    resumed = make_trainer([dump("parts")], max_epochs=3)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression())
    assert steps(tmp_path / "parts") == [1, 2, 3, 4, 5]
    for path in (tmp_path / "whole").iterdir():
        found = torch.load(path, weights_only=True)
        assert {name: tensor.shape for name, tensor in found.items()} == dict.fromkeys(
            ("0.weight", "1.weight", "4.weight"), torch.Size([3])
        )
        assert_same(torch.load(tmp_path / "parts" / path.name, weights_only=True), found)


def test_steps_that_are_not_due_read_nothing_and_a_disk_that_refuses_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer([GradientDump(tmp_path, first_step=99), *no_reads_inside_a_step()]).fit(regression())
    assert steps(tmp_path) == []
    (tmp_path / "file").write_text("")
    make_trainer([GradientDump(tmp_path / "file", max_files=1)]).fit(regression())
    assert "gradients-step-00000001.pt can't be written" in caplog.text


def test_a_disk_that_is_full_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(content: Any, path: Path) -> None:
        path.write_bytes(b"PK")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full_disk)
    make_trainer([GradientDump(tmp_path)]).fit(regression())
    assert "gradients-step-00000006.pt can't be written" in caplog.text
    assert steps(tmp_path) == []


@pytest.mark.parametrize("name", ["every_n_steps", "first_step", "last_step", "max_files", "first_elements"])
def test_nonsense_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: give a whole number of at least 1"):
        GradientDump(tmp_path, **{name: 0})
