"""Fused optimizers: only where there is one and nobody said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from tests.trainer.support import make_trainer, regression
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
    assert not use_fused(optimizer)
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert before == after


def test_one_that_has_stepped_is_left_alone() -> None:
    (parameter,) = parameters()
    optimizer = Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert not use_fused(optimizer)
