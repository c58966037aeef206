"""A GAN with two optimizers and a fit by LBFGS: searched by `hpo run`, killed twice, resumed to equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.acceptance.test_own_loop import curves
from tests.support.commands import hpo
from tests.unit.trainer.support import assert_same

pytestmark = pytest.mark.full

PARTS = """
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainer import Callback


def images():
    pictures = torch.from_numpy(load_digits().data[:96]).float() / 16
    return {"train": TensorDataset(pictures[:64]), "val": TensorDataset(pictures[64:])}


def points():
    x = torch.linspace(-2, 2, 48)[:, None]
    data = TensorDataset(x, torch.sin(2 * x))
    return {"train": data, "val": data}


class GAN(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1))


def step(model, batch, update):
    (real,) = batch
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    judge = nn.functional.binary_cross_entropy_with_logits
    fake = model.generator(torch.randn(len(real), 4))
    d_loss = judge(model.discriminator(real), ones) + judge(model.discriminator(fake.detach()), zeros)
    update(d_loss, "critic")
    g_loss = judge(model.discriminator(fake), ones)
    update(g_loss, "generator")
    distance = (fake.mean(dim=0) - real.mean(dim=0)).square().mean()
    return {"loss": distance.detach(), "d_loss": d_loss.detach(), "g_loss": g_loss.detach()}


class Net(nn.Sequential):
    def __init__(self, hidden=6):
        super().__init__(nn.Linear(1, hidden), nn.Tanh(), nn.Dropout(0.05), nn.Linear(hidden, 1))


class Kill(Callback):
    def __init__(self, at=()):
        self.at = list(at)

    def on_train_batch_end(self, trainer):
        kills = Path(__file__).parent / "kills"
        made = len(kills.read_text()) if kills.exists() else 0
        if made < len(self.at) and trainer.state.step == self.at[made]:
            kills.write_text("x" * (made + 1))
            os._exit(9)
"""
GAN = """
study: {name: gan, n_trials: 2, sampler: {name: random, seed: 1}, pruner: none}
data: {_target_: parts.images}
loader: {batch_size: 16}
model: {_target_: parts.GAN}
step: {_target_: parts.step}
optimizer:
  generator: {_target_: torch.optim.Adam, lr: 1e-3}
  critic: {_target_: torch.optim.SGD, lr: 1e-2, momentum: 0.9, parameters: "discriminator.*"}
lr_scheduler:
  generator:
    {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: "${trainer.total_steps}", interval: step}
  second: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 0.9, optimizer: generator}
  critic: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 0, warmup: 1}
trainer: {max_epochs: 4}
callbacks: {kill: {_target_: parts.Kill, at: []}}
search_space:
  optimizer.generator.lr: {type: float, low: 1e-4, high: 1e-2, log: true}
  optimizer.critic.momentum: {type: float, low: 0.0, high: 0.9}
"""
LBFGS = """
study: {name: lbfgs, n_trials: 2, sampler: {name: random, seed: 1}, pruner: none}
data: {_target_: parts.points}
loader: {batch_size: 12}
model: {_target_: parts.Net}
loss: {_target_: torch.nn.MSELoss}
optimizer: {_target_: torch.optim.LBFGS, lr: 0.5, max_iter: 4, line_search_fn: strong_wolfe}
trainer: {max_epochs: 4}
callbacks: {kill: {_target_: parts.Kill, at: []}}
search_space:
  optimizer.history_size: {type: int, low: 2, high: 10}
"""


def _run(folder: Path, study: str, kills: str) -> tuple[Any, dict[str, Any]]:
    folder.mkdir()
    (folder / "parts.py").write_text(PARTS)
    (folder / "study.yaml").write_text(study.replace("at: []", f"at: {kills}"))
    hpo("run", folder / "study.yaml")
    if kills != "[]":
        assert (folder / "kills").read_text() == "xx"
    newest: dict[str, Any] = {}
    for path in sorted(folder.rglob("epoch-*.pt"), key=lambda path: path.name):
        checkpoint = torch.load(path, weights_only=True)
        trial = path.parents[2].name
        newest[trial] = {name: checkpoint[name] for name in ("model", "optimizer", "scheduler", "rng")}
    return curves(folder / "study.yaml"), dict(sorted(newest.items()))


@pytest.mark.parametrize("study", [GAN, LBFGS], ids=["gan", "lbfgs"])
def test_a_search_killed_twice_comes_to_the_same_bits(study: str, tmp_path: Path) -> None:
    straight = _run(tmp_path / "straight", study, "[]")
    killed = _run(tmp_path / "killed", study, "[6, 11]")
    assert killed[0] == straight[0]
    assert_same(killed[1], straight[1])
    assert len(straight[1]) == 2
