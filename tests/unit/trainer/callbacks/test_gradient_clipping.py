"""GradientClipping: what the optimizer gets, and what others see."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import Trainer
from trainer.callbacks import GradientMonitor
from trainer.callbacks.gradient_clipping import GradientClipping


def gradients(trainer: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in trainer.model.parameters() if parameter.grad is not None]


def fit(*callbacks: Any, checkpoint: dict[str, Any] | None = None, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, seed=5, **options)
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


@pytest.mark.parametrize(
    ("arguments", "clip"),
    [
        ({"max_norm": 0.05}, lambda parameters: clip_grad_norm_(parameters, 0.05)),
        ({"max_norm": 0.05, "norm_type": 1}, lambda parameters: clip_grad_norm_(parameters, 0.05, 1)),
        ({"max_norm": 0.05, "norm_type": float("inf")}, lambda p: clip_grad_norm_(p, 0.05, float("inf"))),
        ({"max_value": 0.01}, lambda parameters: clip_grad_value_(parameters, 0.01)),
    ],
)
def test_it_clips_as_torch_does_before_each_step(arguments: dict[str, Any], clip: Any) -> None:
    found: list[list[torch.Tensor]] = []
    expected: list[list[torch.Tensor]] = []

    def by_hand(trainer: Any) -> None:
        kept = gradients(trainer)
        clip(list(trainer.model.parameters()))
        expected.append(gradients(trainer))
        assert not all(torch.equal(one, other) for one, other in zip(kept, expected[-1], strict=True))
        for parameter, gradient in zip(trainer.model.parameters(), kept, strict=True):
            parameter.grad = gradient

    fit(
        GradientClipping(**arguments),
        At("on_before_optimizer_step", by_hand, priority=19),
        At("on_before_optimizer_step", lambda trainer: found.append(gradients(trainer)), priority=21),
    )
    assert len(found) == 6
    assert_same(found, expected)


@pytest.mark.parametrize("arguments", [{"max_norm": 1e9}, {"max_value": 1e9}])
def test_small_gradients_stay_as_they_are(arguments: dict[str, Any]) -> None:
    clipped, plain = frozen(fit(GradientClipping(**arguments))), frozen(fit())
    assert_same(clipped["model"], plain["model"])


@pytest.mark.parametrize(
    "arguments",
    [{"max_norm": 0.05}, {"max_norm": 0.05, "norm_type": 1.0}, {"max_norm": 9.0}, {"max_value": 0.01}],
)
def test_sparse_gradients_are_clipped_as_dense_ones(arguments: dict[str, Any]) -> None:
    data = TensorDataset(torch.tensor([[0, 0, 3], [1, 3, 0]] * 3), torch.linspace(0, 1, 6).view(6, 1))
    weights = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(5, 4, mode="sum", sparse=sparse), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        callbacks = [GradientMonitor(), GradientClipping(**arguments)]
        make_trainer(callbacks, model=model, optimizer=optimizer, max_epochs=2).fit(data)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*weights, rtol=0, atol=1e-6)


def test_the_norm_of_all_groups_together_counts() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)
    norms: list[float] = []

    def measure(trainer: Any) -> None:
        norms.append(float(torch.cat([item.flatten() for item in gradients(trainer)]).norm()))

    fit(
        GradientClipping(max_norm=0.1),
        At("on_before_optimizer_step", measure, priority=21),
        model=model,
        optimizer=optimizer,
    )
    assert norms == pytest.approx([0.1] * 6, rel=1e-4)


def test_the_gradient_monitor_records_the_norm_before_clipping() -> None:
    watched = fit(GradientClipping(max_norm=1e-3), GradientMonitor())
    assert all(metrics["max_grad_norm"] > 0.1 for metrics in watched.state.history)


@pytest.mark.parametrize("arguments", [{"max_norm": 0.1}, {"max_value": 0.1}])
def test_parameters_without_a_gradient_are_passed_over(arguments: dict[str, Any]) -> None:
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    before = model.bias.clone()
    trainer = fit(GradientClipping(**arguments), model=model)
    assert torch.equal(trainer.model.bias, before)

    skipping = At("on_train_batch_start", lambda trainer: trainer.state.skip("backward"))
    assert fit(GradientClipping(**arguments), skipping).state.step == 6


@pytest.mark.parametrize("arguments", [{"max_norm": 1.0}, {"max_value": 1.0}])
def test_gradients_that_are_not_finite_stay_so(arguments: dict[str, Any]) -> None:
    def spoil(trainer: Any) -> None:
        next(trainer.model.parameters()).grad.fill_(float("nan"))

    trainer = fit(GradientClipping(**arguments), At("on_after_backward", spoil))
    assert next(trainer.model.parameters()).isnan().all()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_it_clips_true_gradients_in_other_precisions(precision: str) -> None:
    norms: list[float] = []

    def measure(trainer: Any) -> None:
        norms.append(float(torch.cat([item.flatten() for item in gradients(trainer)]).norm()))

    torch.manual_seed(1)
    fit(
        GradientClipping(max_norm=0.25),
        At("on_before_optimizer_step", measure, priority=21),
        model=nn.Linear(4, 1),
        precision=precision,
        max_epochs=3,
    )
    # Scaled gradients of fp16 overflow now and then, until the scale fits.
    finite = [norm for norm in norms if math.isfinite(norm)]
    assert len(norms) == 9
    assert len(finite) >= 5
    assert finite == pytest.approx([0.25] * len(finite), rel=1e-3)


class NoReading(TorchDispatchMode):
    """Refuses whatever would wait for a device: the number in a tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("arguments", [{"max_norm": 0.1}, {"max_norm": 0.1, "norm_type": 1}, {"max_value": 0.1}])
def test_clipping_reads_no_number_back(arguments: dict[str, Any]) -> None:
    callback = GradientClipping(**arguments)
    trainer = fit(callback)
    with NoReading():
        callback.on_before_optimizer_step(trainer)
    with pytest.raises(AssertionError), NoReading():
        gradients(trainer)[0].sum().item()


@pytest.mark.parametrize("step", range(1, 6))
def test_a_run_goes_on_to_the_same_bits(step: int) -> None:
    stopped = fit(GradientClipping(max_norm=0.1), interrupt_at(step))
    resumed = fit(GradientClipping(max_norm=0.1), checkpoint=through_file(stopped.state_dict()))
    assert_same(frozen(resumed), frozen(fit(GradientClipping(max_norm=0.1))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "max_norm is None and max_value None: give exactly one"),
        ({"max_norm": 1.0, "max_value": 1.0}, "give exactly one"),
        ({"max_norm": 0.0}, r"max_norm is 0\.0: give a number above 0"),
        ({"max_value": -1.0}, r"max_value is -1\.0"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
        ({"max_norm": 1.0, "norm_type": 0.0}, r"norm_type is 0\.0"),
    ],
)
def test_it_refuses_what_is_no_limit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientClipping(**arguments)
