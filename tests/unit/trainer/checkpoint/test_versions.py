"""Versions of modules: what is saved now is loaded as it is, not as what an older version of the module saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.support import assert_same, make_trainer, regression
from trainer import Trainer, load_weights
from trainer.callbacks import BestWeights, Checkpoint, WeightMerging
from trainer.checkpoint.manager import newest_checkpoint, snapshot
from trainer.checkpoint.readable import readable


class Scaled(nn.Linear):
    """Halves the weights that its first version has saved, as modules do that have changed what they keep."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


def build(*callbacks: Any) -> Trainer:
    return make_trainer(callbacks, model=nn.Sequential(Scaled(4, 3), nn.Linear(3, 1)))


def fit(*callbacks: Any) -> Trainer:
    trainer = build(*callbacks)
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.model.state_dict())


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_keeps_them(tmp_path: Path, background: bool) -> None:
    trained, resumed = fit(Checkpoint(tmp_path, background=background)), build()
    found = newest_checkpoint([tmp_path])
    assert found is not None
    resumed.load_state_dict(found[1])
    assert_same(weights(resumed), weights(trained))


def test_the_best_weights_are_put_back_as_they_were(tmp_path: Path) -> None:
    trained = fit(BestWeights(), Checkpoint(tmp_path, keep_last=9))
    best = min(range(2), key=lambda epoch: trained.state.history[epoch]["val_loss"]) + 1
    file = torch.load(tmp_path / f"epoch-{best:05d}.pt", weights_only=True)
    assert_same(weights(trained), dict(file["model"]))


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_a_file_are_loaded_as_they_are(tmp_path: Path, strict: bool) -> None:
    trained, other = fit(WeightMerging(tmp_path, last_steps=1, every_n_steps=6)), build()
    for name in ("merged-step-00000006.pt", "own.pt"):
        torch.save(trained.model.state_dict(), tmp_path / "own.pt")
        load_weights(other.model, tmp_path / name, strict=strict)
        assert_same(weights(other), weights(trained))


def test_what_is_made_of_a_state_dict_keeps_them() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    odd = nn.Module()
    odd.get_extra_state = lambda: {"name": torch.tensor(1.0).numpy()[()]}  # type: ignore[method-assign]
    assert snapshot({"model": state})["model"]._metadata == state._metadata
    assert readable(odd.state_dict())._metadata == odd.state_dict()._metadata
