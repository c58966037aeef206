"""What a fit begins with: `ckpt` of `Trainer.fit`, and weights that fit in whole or in part."""

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from tests.unit.trainer.support import At, assert_same, frozen, interrupt_at, make_model, make_trainer, regression
from trainer import Trainer, load_weights
from trainer.callbacks import Checkpoint
from trainer.checkpoint.files import CheckpointError, list_checkpoints

EPOCHS = 4


def build(*callbacks: Any, folder: Path, seed: int = 0) -> Trainer:
    """Another ``seed`` is another model and another run, unless a checkpoint is loaded."""
    scoring = At(
        "on_epoch_end",
        lambda trainer: trainer.state.metrics.update(score=-abs(trainer.state.epoch - 2.0)),
        priority=60,
    )
    checkpoint = Checkpoint(folder, "score", "max", keep_last=9, max_overhead=1)
    return make_trainer(
        [scoring, checkpoint, *callbacks], model=make_model(seed=7 + seed), seed=seed, max_epochs=EPOCHS
    )


def fit(trainer: Trainer, ckpt: Any = None) -> Trainer:
    trainer.fit(regression(16), regression(), ckpt=ckpt)
    return trainer


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Any]:
    return frozen(fit(build(folder=tmp_path / "whole")))


class TestCkpt:
    def test_the_last_one_resumes_to_the_same_bits_and_starts_where_there_is_none(
        self, tmp_path: Path, whole: dict[str, Any]
    ) -> None:
        for step in (3, 6, 11):  # the first one finds nothing
            stopped = fit(build(interrupt_at(step), folder=tmp_path / "run"), "last")
            assert stopped.state.step == step
        resumed = build(folder=tmp_path / "run", seed=5 if list_checkpoints([tmp_path / "run"]) else 0)
        assert_same(frozen(fit(resumed, "last")), whole)

    def test_the_best_is_that_of_the_monitored_metric(self, tmp_path: Path, whole: dict[str, Any]) -> None:
        fit(build(folder=tmp_path / "run"))
        begun: list[int] = []
        looking = At("on_fit_start", lambda trainer: begun.append(trainer.state.epoch))
        resumed = fit(build(looking, folder=tmp_path / "run", seed=5), "best")
        assert begun == [2]
        assert_same(frozen(resumed), whole)

    @pytest.mark.parametrize("name", ["", "epoch-00001.pt"], ids=["folder", "file"])
    def test_a_path_is_a_file_or_a_folder(self, tmp_path: Path, whole: dict[str, Any], name: str) -> None:
        fit(build(interrupt_at(6), folder=tmp_path / "run"))
        shutil.copytree(tmp_path / "run", tmp_path / "other")
        resumed = fit(build(folder=tmp_path / "new", seed=5), tmp_path / "other" / name)
        assert_same(frozen(resumed), whole)

    def test_it_takes_no_memory_while_the_run_trains(self, tmp_path: Path) -> None:
        fit(build(interrupt_at(6), folder=tmp_path))
        loaded: list[weakref.ref[torch.Tensor]] = []
        left: list[bool] = []

        def remember(_: Any, checkpoint: dict[str, Any]) -> None:
            loaded.extend(map(weakref.ref, checkpoint["model"].values()))

        def look(_: Any) -> None:
            gc.collect()
            left.extend(tensor() is not None for tensor in loaded)

        fit(build(At("on_load_checkpoint", remember), At("on_fit_start", look), folder=tmp_path), "last")
        assert left
        assert not any(left)

    def test_a_damaged_last_one_gives_way_to_the_one_before(
        self, tmp_path: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        fit(build(interrupt_at(6), folder=tmp_path))
        (tmp_path / "epoch-00001-batch-000002.pt").write_bytes(b"")
        assert_same(frozen(fit(build(folder=tmp_path, seed=5), "last")), whole)
        assert "epoch-00001-batch-000002.pt" in caplog.text

    @pytest.mark.parametrize(
        ("ckpt", "error", "says"),
        [
            ("last", ValueError, r"no callback keeps checkpoints: add Checkpoint\(folder\)"),
            ("no/such/file.pt", CheckpointError, "file.pt: no readable checkpoint"),
            (".", CheckpointError, "holds no readable checkpoint; ckpt='last' starts"),
        ],
    )
    def test_what_is_not_there_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ckpt: str, error: Any, says: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(error, match=says):
            fit(make_trainer(), ckpt)

    def test_a_file_of_weights_is_no_run_to_resume(self, tmp_path: Path) -> None:
        torch.save(make_trainer().model.state_dict(), tmp_path / "weights.pt")
        with pytest.raises(CheckpointError, match=r"weights.pt: no checkpoint of a run; .* load_weights"):
            fit(make_trainer(), str(tmp_path / "weights.pt"))

    def test_a_best_that_was_never_recorded_is_said(self, tmp_path: Path) -> None:
        def trainer() -> Trainer:
            return make_trainer([Checkpoint(tmp_path, "missing")])

        fit(trainer())
        with pytest.raises(CheckpointError, match="no epoch has a finite missing"):
            fit(trainer(), "best")


def network(hidden: int = 3, names: str = "abc", value: float = 1.0) -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(2 if name == names[0] else hidden, hidden) for name in names})
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def as_torch(path: Path, model: nn.Module) -> Path:
    torch.save(model.state_dict(), path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def as_safetensors(path: Path, model: nn.Module) -> Path:
    save_file(model.state_dict(), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def as_checkpoint(path: Path, model: nn.Module) -> Path:
    torch.save({"version": 0, "model": model.state_dict(), "state": {}}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


class TestWeights:
    @pytest.mark.parametrize("write", [as_torch, as_safetensors, as_checkpoint])
    def test_each_kind_of_file_is_read(self, tmp_path: Path, write: Callable[[Path, nn.Module], Path]) -> None:
        model = network(value=0.0)
        outcome = load_weights(nn.DataParallel(model), write(tmp_path / "w", network(value=2.0)))
        assert all(bool((parameter == 2).all()) for parameter in model.parameters())
        assert (len(outcome.loaded), outcome.skipped) == (6, "")

    def test_a_file_that_has_a_tied_weight_once_is_whole(self, tmp_path: Path) -> None:
        def tied(value: float) -> nn.Module:
            model = network(value=value)
            model["c"].weight = model["b"].weight  # type: ignore[index]
            return model

        model, path = tied(0.0), tmp_path / "w.safetensors"
        save_model(tied(2.0), str(path))
        outcome = load_weights(model, path)
        assert all(bool((parameter == 2).all()) for parameter in model.parameters())
        assert (len(outcome.loaded), outcome.skipped) == (5, "")
        with pytest.raises(ValueError, match=r"not in the file: c\.weight|not in the file: b\.weight"):
            load_weights(network(), path)

    def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(self, tmp_path: Path) -> None:
        model = network(hidden=4, names="abd", value=0.0)
        with pytest.raises(ValueError, match=r"file: d\.weight, d\.bias; not in the model: c\.weight, c\.bias"):
            load_weights(model, as_torch(tmp_path / "w", network(hidden=4)))
        assert all(bool((parameter == 0).all()) for parameter in model.parameters())

    def test_not_strict_takes_what_fits_and_says_the_rest(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, file = network(names="abd", value=0.0), as_torch(tmp_path / "w", network(value=2.0))
        model["b"] = nn.Linear(3, 4)  # type: ignore[index, operator]
        outcome = load_weights(model, file, strict=False)
        assert outcome.loaded == ["a.weight", "a.bias"]
        assert outcome.mismatched == ["b.weight [3, 3] for [4, 3]", "b.bias [3] for [4]"]
        assert bool((model["a"].weight == 2).all())  # type: ignore[index, union-attr]
        assert bool((model["d"].weight == 0).all())  # type: ignore[index, union-attr]
        assert "2 of 6 weights come from" in caplog.text
        assert "b.weight [3, 3] for [4, 3]" in caplog.text

    def test_weights_of_which_none_fits_are_refused_even_then(self, tmp_path: Path) -> None:
        file = as_torch(tmp_path / "w", network())
        with pytest.raises(
            ValueError, match=r"w\.pt holds another model: none of its weights fits; .*this model$"
        ):
            load_weights(network(names="xyz"), file, strict=False)

    def test_weights_that_differ_by_what_their_names_begin_with_are_said_so(self, tmp_path: Path) -> None:
        wrapped = as_torch(tmp_path / "w", nn.ModuleDict({"net": network()}))
        with pytest.raises(ValueError, match=r"; every name in it begins with `net\.`: save it without"):
            load_weights(network(), wrapped)
        with pytest.raises(ValueError, match=r"; every name in the model begins with `net\.`: save the file with"):
            load_weights(nn.ModuleDict({"net": network()}), as_torch(tmp_path / "w", network()))

    def test_a_model_of_another_size_is_to_be_made_alike(self, tmp_path: Path) -> None:
        file = as_torch(tmp_path / "w", network(names="abcd"))
        with pytest.raises(ValueError, match=r"another model: 6 of its 8 weights fit; .*strict=False takes those"):
            load_weights(network(), file)

    @pytest.mark.parametrize(
        ("content", "holds"),
        [
            ({"lr": 0.1, "epochs": 3}, "but `lr`, `epochs`; save `model.state_dict"),
            ({}, "but nothing; save"),
            ([1, 2], "but a list; save"),
            (torch.zeros(3, 2), "but one tensor of shape [3, 2]; save"),
            (
                {"epoch": 3, "state_dict": {"a": torch.zeros(2)}},
                "but `epoch`, `state_dict`; its weights are under `state_dict`: save that part alone",
            ),
            (nn.Linear(2, 2), "it holds objects (torch.nn.modules.linear.Linear), which are not unpickled; save"),
            (b"", "no readable weights: it is no file of `torch.save` or safetensors (EOFError: "),
            (b"text", "no readable weights: it is no file of `torch.save` or safetensors ("),
            (None, "no readable weights: there is no such file"),
        ],
    )
    def test_a_file_without_weights_is_said_with_what_it_holds(
        self, tmp_path: Path, content: Any, holds: str
    ) -> None:
        file = tmp_path / "w.pt"
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content is not None:
            torch.save(content, file)
        with pytest.raises(CheckpointError) as raised:
            load_weights(network(), file)
        assert str(raised.value).startswith(str(file))
        assert holds in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1
