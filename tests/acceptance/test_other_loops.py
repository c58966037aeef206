"""Loops of other libraries, moved over as their pages say, and killed: each curve once and without a gap."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.acceptance.test_own_loop import curves
from tests.support.commands import hpo, hpo_json
from tests.support.in_process import workers_in_process

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning",
    "ignore:The `srun` command is available",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches",
)
EPOCHS = 5
STUDY = """
study: {{name: moved, metric: {metric}, n_trials: 4, sampler: {{name: random, seed: 3}}, pruner: none}}
objective: {{_target_: loop.main, lr: 1e-3}}
search_space:
  objective.lr: {{type: float, low: 1e-4, high: 1e-2, log: true}}
"""
#: Added to each: what kills half of the trials in the middle.
KILL = """
import os
import signal


def kill(trial, epoch, deadly):
    if deadly and epoch == 3 and trial.number % 2 and trial.folder.name == "attempt-1":
        os.kill(os.getpid(), signal.SIGKILL)
"""

LIGHTNING = """
import lightning as L
import torch
from torch import nn, utils

from hpo.integrations.lightning import HPOCallback


class LitAutoEncoder(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16))

    def step(self, batch):
        x, _ = batch
        x = x.view(x.size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Deadly(L.Callback):
    def __init__(self, trial, deadly):
        self.trial, self.deadly = trial, deadly

    def on_train_batch_end(self, trainer, *_):
        kill(self.trial, trainer.current_epoch, self.deadly)


def main(trial, lr, deadly=False):
    images = torch.rand(80, 4, 4, generator=torch.Generator().manual_seed(0))
    dataset = utils.data.TensorDataset(images, torch.zeros(80))
    train, val = utils.data.random_split(dataset, [60, 20])
    callback = HPOCallback(trial)
    trainer = L.Trainer(
        max_epochs=5, callbacks=[callback, Deadly(trial, deadly)], default_root_dir=trial.folder / "lightning",
        accelerator=trial.device.type, devices=1, enable_progress_bar=False,
    )
    loaders = utils.data.DataLoader(train, 10, shuffle=True), utils.data.DataLoader(val, 20)
    trainer.fit(LitAutoEncoder(lr), *loaders, ckpt_path=callback.load_checkpoint())
"""

TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hpo.integrations.transformers import HPOCallback


def tokenized(count):
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, 2, (count,), generator=generator)
    words = torch.randint(1, 20, (count, 8), generator=generator) + 10 * labels[:, None]
    return [{"input_ids": word, "labels": label} for word, label in zip(words, labels)]


def compute_metrics(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


class Deadly(TrainerCallback):
    def __init__(self, trial, deadly):
        self.trial, self.deadly = trial, deadly

    def on_step_end(self, args, state, control, **_):
        kill(self.trial, int(state.epoch), self.deadly)


def main(trial, lr, deadly=False):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=8, **sizes))
    callback = HPOCallback(trial)
    args = TrainingArguments(
        output_dir=trial.folder / "out", seed=trial.seed, use_cpu=trial.device.type == "cpu", learning_rate=lr,
        num_train_epochs=5, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="no",
        report_to="none", disable_tqdm=True, warmup_steps=4,
    )
    trainer = Trainer(
        model, args, train_dataset=tokenized(40), eval_dataset=tokenized(24), compute_metrics=compute_metrics,
        callbacks=[callback, Deadly(trial, deadly)],
    )
    trainer.train(resume_from_checkpoint=callback.load_checkpoint())
"""

GAN = """
import torch
from torch import nn


def main(trial, lr, deadly=False):
    real = torch.randn(96, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + 2
    netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    netD = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=lr, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=lr, betas=(0.5, 0.999))
    parts = {"netG": netG, "netD": netD, "optimizerG": optimizerG, "optimizerD": optimizerD}
    criterion = nn.BCEWithLogitsLoss()
    start = 0
    if (state := trial.load_checkpoint()) is not None:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        start = state["epoch"]
    for epoch in range(start + 1, 6):
        for data in real[torch.randperm(len(real))].split(32):
            kill(trial, epoch, deadly)
            ones, zeros = torch.ones(len(data), 1), torch.zeros(len(data), 1)
            fake = netG(torch.randn(len(data), 4))
            optimizerD.zero_grad()
            errD = criterion(netD(data), ones) + criterion(netD(fake.detach()), zeros)
            errD.backward()
            optimizerD.step()
            optimizerG.zero_grad()
            errG = criterion(netD(fake), ones)
            errG.backward()
            optimizerG.step()
        with torch.no_grad():
            distance = (netG(torch.randn(256, 4)).mean(0) - real.mean(0)).norm()
        trial.report(epoch, distance=distance, loss_d=errD, loss_g=errG)
        trial.save_checkpoint({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}})
"""


def make(folder: Path, code: str, metric: str) -> Path:
    folder.mkdir()
    (folder / "loop.py").write_text(textwrap.dedent(code) + KILL)
    study = folder / "study.yaml"
    direction = ", direction: minimize" if not metric.endswith("loss") else ""
    study.write_text(STUDY.format(metric=metric + direction))
    return study


@pytest.mark.parametrize(
    ("code", "metric"),
    [(LIGHTNING, "val_loss"), (TRANSFORMERS, "eval_loss"), (GAN, "distance")],
    ids=["Lightning", "Transformers", "a GAN"],
)
def test_a_loop_that_was_moved_over_loses_nothing_to_kills(
    tmp_path: Path, code: str, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    undisturbed = make(tmp_path / "undisturbed", code, metric)
    with workers_in_process():  # each process of a worker imports the library: two seconds of a processor
        hpo("run", undisturbed, "--workers", 1)
    expected = curves(undisturbed)
    assert [list(curve) for _, _, curve in expected.values()] == [list(range(1, EPOCHS + 1))] * 4
    killed = make(tmp_path / "killed", code, metric)
    hpo("run", killed, "--workers", 2, "objective.deadly=true")
    assert curves(killed, "objective.deadly=true") == expected
    trials = hpo_json("trials", killed, "objective.deadly=true")
    assert [(each["outcome"], each["epochs"], len(each["internals"]["attempts"])) for each in trials] == [
        ("complete", EPOCHS, 1 + number % 2) for number in range(4)
    ]
