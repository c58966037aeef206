"""Describes the course of the learning rate in a final training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hpo.config.several import is_several
from hpo.trial.builder import Builder
from hpo.trial.optimizer import make_scheduler
from hpo.wording import count_of
from trainer import Trainer
from trainer.lr_schedulers import needs_metric
from trainer.step.optimizers import first_rate


def learning_rate_plan(builder: Builder, config: Mapping[str, Any], trainer: Trainer) -> Sequence[str]:
    """Lines that describe the course of the learning rate, found by running the schedule on a dummy optimizer."""
    rate = trainer.optimizer.param_groups[0].get("initial_lr", first_rate(trainer.optimizer))
    if rate is None:
        return ["learning rate: the optimizer finds its own"]
    start = float(rate)
    if config["lr_scheduler"] is None:
        return [f"learning rate: {start:.4g}, constant"]
    node = config["lr_scheduler"]
    if is_several(node):
        return [f"learning rate: from {start:.4g}, by the schedulers {', '.join(node)}"]
    name = str(node["_target_"]).rpartition(".")[2]
    epochs = config["trainer"]["max_epochs"]
    by_pass = epochs is not None and config["trainer"]["validate_every"] is None
    if node["interval"] == "step" or not by_pass:
        return [f"learning rate: from {start:.4g}, {name} at each {node['interval']}"]
    # Any optimizer with as many groups will do; some schedules also need a momentum.
    groups = [
        {"params": nn.Linear(1, 1).parameters(), "lr": float(each.get("initial_lr", each["lr"]))}
        for each in trainer.optimizer.param_groups
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = make_scheduler(builder.resolver, node, optimizer)
    if needs_metric(scheduler):
        return [f"learning rate: from {start:.4g}, lower when {builder.spec.study.metric} stalls"]
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    shown = sorted({0, epochs // 4, epochs // 2, 3 * epochs // 4, epochs - 1})
    steps = ", ".join(f"{rates[index]:.3g} (epoch {index + 1})" for index in shown)
    return [f"learning rate over {count_of(epochs, 'epoch')}, {name}: {steps}"]
