"""A function that trains by itself: a plain torch loop on a session, without a Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpo.trial.session import Session

BATCH = 16


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets; two thirds of them to train with."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(96, 4, generator=generator)
    return inputs, (inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0])).unsqueeze(1)


def train(session: Session) -> None:
    """Train as the session's config says; dropout and order draw from the global generators."""
    config, (inputs, targets) = session.config, data()
    loss_of = nn.MSELoss()
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1)]
    model = nn.Sequential(*layers).to(session.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["optimizer"]["lr"])
    epoch = 0
    saved = session.load_checkpoint()
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"]
    while epoch < config["trainer"]["max_epochs"]:
        model.train()
        for batch in torch.randperm(64).split(BATCH):
            optimizer.zero_grad()
            loss = loss_of(model(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            if session.should_stop:
                return
        epoch += 1
        if config["loss"].get("fail"):
            raise ValueError("this loss fails")
        model.eval()
        with torch.no_grad():
            value = loss_of(model(inputs[64:]), targets[64:])
        session.report(epoch, val_loss=value * float("nan") if config["loss"].get("nan") else value)
        session.save_checkpoint(state_of(model, optimizer, epoch, config))
        if session.should_stop:
            return


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, config: Any) -> dict[str, Any]:
    """What the function resumes from; with a callback named ``odd``, something in it can't be read back."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    return {**state, "odd": object()} if "odd" in config["callbacks"] else state
