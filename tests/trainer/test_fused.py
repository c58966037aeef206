"""Fused optimizers: only where there is one and nobody said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import TensorDataset

from tests.trainer.support import make_trainer, regression
from trainer.callbacks import GradientMonitor
from trainer.fused import use_fused


class Own(Adam):
    """A subclass may do anything in its step."""


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, dtype=dtype))]


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_torchs_own_are_fused_and_compute_the_same(kind: type[Optimizer]) -> None:
    results = []
    for fused in (None, False):
        model = nn.Linear(4, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = kind(model.parameters(), lr=0.01, fused=fused)  # type: ignore[call-arg]
        trainer = make_trainer(model=model, optimizer=optimizer)
        assert trainer.optimizer.param_groups[0]["fused"] is (fused is None)
        trainer.fit(regression(), regression())
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(parameters()),
        lambda: RMSprop(parameters()),
        lambda: Adam(parameters(), foreach=True),
        lambda: Adam(parameters(), fused=False),
        lambda: Adam(parameters(), differentiable=True),
        lambda: Adam([nn.Parameter(torch.ones(2, device="meta"))]),
        lambda: SGD(parameters(torch.complex64)),
    ],
)
def test_others_are_left_alone(make: Callable[[], Any]) -> None:
    optimizer = make()
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert not use_fused(optimizer, nn.Identity())
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert before == after


def test_one_that_has_stepped_is_left_alone() -> None:
    (parameter,) = parameters()
    optimizer = Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert not use_fused(optimizer, nn.Identity())


def test_a_model_with_sparse_gradients_is_left_alone_and_trains() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = GradientMonitor()
    trainer = make_trainer([monitor], model=model, optimizer=optimizer, max_epochs=1)
    data = TensorDataset(torch.tensor([[0, 1], [1, 2], [2, 2], [3, 4]]), torch.ones(4, 1))
    seen: list[float] = []

    def dense_norm(trainer: Any) -> None:
        gradients = [parameter.grad.to_dense().flatten() for parameter in model.parameters()]
        seen.append(torch.cat(gradients).norm().item())

    trainer.callbacks.register("on_before_optimizer_step", dense_norm)
    history = trainer.fit(data).history
    assert not optimizer.param_groups[0]["fused"]
    assert history[0]["max_grad_norm"] == pytest.approx(max(seen))
