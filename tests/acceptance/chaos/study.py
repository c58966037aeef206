"""The study that storms blow on: everything that makes resuming hard to get right, and slow enough to be hit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

#: Read by the study's code in the processes whose environment has them; the numbers are the same without.
#: Seconds that a batch sleeps, or a file with that number, which may change; by its name agents get it, too.
DELAY = "HPO_CHAOS_DELAY"
#: How likely a process kills itself in one of the hooks where that is hardest to bear, and a file with a byte for
#: each that has.
MINES = "CHAOS_MINES"
MINES_FILE = "CHAOS_MINES_FILE"

_CODE = f'''
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainer.callback import Callback


def load(samples=96):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 4, generator=generator)
    targets = (inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0])).unsqueeze(1)
    cut = samples * 2 // 3
    return {{
        "train": TensorDataset(inputs[:cut], targets[:cut]),
        "val": TensorDataset(inputs[cut:], targets[cut:]),
    }}


def delay():
    given = os.environ.get("{DELAY}", "0")
    return float(Path(given).read_text() if "/" in given else given)


class Net(nn.Module):
    def __init__(self, hidden=4, dropout=0.1):
        super().__init__()
        if dropout > 0.47:
            raise ValueError("so much dropout is refused")
        self.layers = nn.Sequential(
            nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1)
        )

    def forward(self, inputs):
        if self.training:
            time.sleep(delay())
        return self.layers(inputs)


def mae(outputs, targets):
    return (outputs - targets).abs().mean()


class Mine(Callback):
    """Kills the process between two other callbacks, now and then."""

    def __init__(self, priority):
        self.priority = priority
        self._likely = float(os.environ.get("{MINES}", "0"))

    def _step(self):
        if self._likely and random.SystemRandom().random() < self._likely:
            with open(os.environ["{MINES_FILE}"], "ab") as file:
                file.write(b"!")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer):
        self._step()

    def on_epoch_end(self, trainer):
        self._step()

    def on_exception(self, trainer, error):
        self._step()

    def on_fit_end(self, trainer):
        self._step()
'''

_STUDY = """
study:
  name: chaos
  n_trials: 12
  sampler: {name: tpe, seed: 3}
  pruner: {name: median, n_startup_trials: 3, n_warmup_steps: 3}
run: {max_retries: 1000, lost_after: 3s}
data: {_target_: parts.load}
loader: {batch_size: 16}
model: {_target_: parts.Net, hidden: 4, dropout: 0.1}
loss: {_target_: torch.nn.MSELoss}
optimizer: {_target_: torch.optim.SGD, lr: 1e-2, momentum: 0.9}
lr_scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: "${trainer.max_epochs}"}
metrics: {mae: {_target_: parts.mae}}
trainer: {max_epochs: 16}
callbacks:
  early_stopping: {patience: 5}
  after_the_table: {_target_: parts.Mine, priority: 81}
  after_the_report: {_target_: parts.Mine, priority: 86}
  after_the_checkpoint: {_target_: parts.Mine, priority: 96}
search_space:
  optimizer.lr: {type: float, low: 1e-3, high: 2.0, log: true}
  model.hidden: {type: int, low: 2, high: 8}
  model.dropout: {type: float, low: 0.0, high: 0.5}
  loader.batch_size: {type: categorical, choices: [8, 16]}
"""


def make_study(folder: Path, overrides: Sequence[str] = ()) -> Path:
    """Write the study's code and YAML; returns the YAML's path.

    Args:
        folder: Where to.
        overrides: ``dotted.path=value``, for a study that differs in these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(_CODE.lstrip())
    path = folder / "study.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.create(_STUDY), OmegaConf.from_dotlist(list(overrides))), path)
    return path
