"""What a loss was divided by: torch's own means over random batches, put together to that of the whole."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.trainer.support import one_batch, quick
from trainer import BatchOptions, Trainer
from trainer.metrics.denominators import denominator_of

C = 3


def merged(loss: Any, outputs: Tensor, targets: Tensor, cuts: list[int], *, grad: bool) -> float:
    """The whole set's value from that of its batches."""
    denominator = denominator_of(loss)
    assert denominator is not None
    total = whole = 0.0
    for some, wanted in zip(outputs.split(cuts), targets.split(cuts), strict=True):
        some = some.detach().requires_grad_(grad)
        value = loss(some, wanted)
        weight = denominator(value, some, wanted)
        if weight is None:
            total, whole = total + value.item(), 1.0
        elif float(weight):
            total, whole = total + value.item() * float(weight), whole + float(weight)
    return total / whole if whole else math.nan


shapes = st.sampled_from([(), (4,), (2, 3), (2, 2, 2)])


@quick(120)
@given(
    shape=shapes,
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    weighted=st.booleans(),
    ignore=st.sampled_from([-100, 1, 255]),
    smoothing=st.sampled_from([0.0, 0.2]),
    kind=st.sampled_from(["indices", "probabilities"]),
    reduction=st.sampled_from(["mean", "sum"]),
    grad=st.booleans(),
    seed=st.integers(0, 9),
)
def test_cross_entropy_of_any_kind(
    shape: tuple[int, ...],
    cuts: list[int],
    weighted: bool,
    ignore: int,
    smoothing: float,
    kind: str,
    reduction: str,
    grad: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(sum(cuts), C, *shape, generator=generator, dtype=torch.double)
    targets = torch.randint(C, (sum(cuts), *shape), generator=generator)
    if kind == "probabilities":
        ignore = -100  # torch takes no other one then
        targets = torch.rand(outputs.shape, generator=generator, dtype=torch.double)
    else:
        targets = torch.where(torch.rand(targets.shape, generator=generator) < 0.4, ignore, targets)
    loss = nn.CrossEntropyLoss(
        weight=torch.tensor([0.2, 1.0, 5.0], dtype=torch.double) if weighted else None,
        ignore_index=ignore,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    expected = loss(outputs, targets).item()
    found = merged(loss, outputs, targets, cuts, grad=grad)
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


ELEMENTS = {
    "MSELoss": nn.MSELoss(),
    "SmoothL1Loss": nn.SmoothL1Loss(beta=0.5),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "KLDivLoss, batchmean": nn.KLDivLoss(reduction="batchmean"),
    "SoftMarginLoss": nn.SoftMarginLoss(),
    "MultiLabelSoftMarginLoss": nn.MultiLabelSoftMarginLoss(),
    "huber_loss": functional.huber_loss,
    "l1_loss, bound": functools.partial(functools.partial(functional.l1_loss), reduction="mean"),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_other_losses(name: str) -> None:
    outputs, targets = torch.randn(11, 2, dtype=torch.double), torch.rand(11, 2, dtype=torch.double)
    found = merged(ELEMENTS[name], outputs, targets, [1, 7, 3], grad=False)
    assert found == pytest.approx(float(ELEMENTS[name](outputs, targets)))


def test_samples_of_one_number_each_count_in_a_mean_over_the_batch() -> None:
    loss = nn.KLDivLoss(reduction="batchmean")
    outputs, targets = torch.randn(11, dtype=torch.double), torch.rand(11, dtype=torch.double)
    assert merged(loss, outputs, targets, [8, 3], grad=False) == pytest.approx(float(loss(outputs, targets)))


def test_batches_with_more_elements_a_sample_count_more() -> None:
    denominator = denominator_of(nn.L1Loss())
    assert denominator is not None
    assert denominator(torch.zeros(()), torch.zeros(2, 5), torch.zeros(2, 5)) == 10
    assert denominator(torch.zeros(()), torch.zeros(2, 3), torch.zeros(2, 1)) == 6


def test_a_count_in_half_precision_is_not_taken_over() -> None:
    outputs = torch.zeros(300, 2, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(300, dtype=torch.long)
    targets[0] = -100
    loss = nn.CrossEntropyLoss()
    denominator = denominator_of(loss)
    assert denominator is not None
    assert denominator(loss(outputs, targets), outputs, targets) == 299


class Renamed(nn.CrossEntropyLoss):
    """Computes what its base does."""


class Other(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs, targets) * 2


class Called(nn.CrossEntropyLoss):
    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().__call__(outputs, targets) * 2


def replaced() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = lambda outputs, targets: outputs.sum()  # type: ignore[method-assign]
    return loss


def compiled(loss: Any) -> Any:
    return torch.compile(loss, backend="eager")


def wrapped(loss: Any) -> Any:
    """With all names and attributes of the loss, but not its value."""
    return functools.wraps(loss)(lambda outputs, targets: 2 * loss(outputs, targets))


@pytest.mark.parametrize(
    "loss",
    [
        compiled(nn.CrossEntropyLoss(ignore_index=0)),
        compiled(functools.partial(functional.cross_entropy, ignore_index=0)),
        functools.partial(compiled(functional.cross_entropy), ignore_index=0),
    ],
    ids=["module", "partial", "function"],
)
def test_a_compiled_loss_counts_as_it_was_written(loss: Any) -> None:
    outputs = torch.randn(6, C, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 1, 0, 0])
    assert merged(loss, outputs, targets, [1, 3, 2], grad=True) == pytest.approx(loss(outputs, targets).item())


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (Renamed(), True),
        (compiled(Renamed()), True),
        (compiled(functional.nll_loss), True),
        (compiled(Other()), False),
        (wrapped(functional.nll_loss), False),
        (wrapped(compiled(functional.nll_loss)), False),
        (compiled(wrapped(functional.nll_loss)), False),
        (functional.nll_loss, True),
        (Other(), False),
        (Called(), False),
        (replaced(), False),
        (lambda outputs, targets: outputs.mean(), False),
        (functools.partial(functional.mse_loss, weight=torch.ones(3)), False),
        (functools.partial(functional.cross_entropy, size_average=False), False),
        (nn.CTCLoss(), False),
    ],
)
def test_what_is_known(loss: Any, known: bool) -> None:
    assert (denominator_of(loss) is not None) == known


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_loss_is_none_that_is_known() -> None:
    assert denominator_of(torch.jit.script(nn.MSELoss())) is None


def test_an_option_that_is_changed_later_counts() -> None:
    loss = nn.CrossEntropyLoss()
    denominator = denominator_of(loss)
    assert denominator is not None
    loss.ignore_index = 0
    outputs, targets = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
    assert denominator(loss(outputs, targets), outputs, targets) == 2


# ---- a step's own weight


def stepped(result: Any, **options: Any) -> Trainer:
    model = nn.Linear(1, 1).double()

    def step(model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).mean() * 0 + 3, **result}

    return Trainer(model, torch.optim.SGD(model.parameters()), step=step, max_epochs=1, device="cpu", **options)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, torch.tensor(-1.0), torch.tensor(math.nan)])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"weight .*(negative|finite).*tokens, nodes or valid targets"):
        stepped({"weight": weight}).fit(one_batch())


@pytest.mark.parametrize("weight", ["many", torch.ones(2), torch.ones((), dtype=torch.complex64), [1]])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match=r"weight is .*not one number: return the number of tokens"):
        stepped({"weight": weight}).fit(one_batch())


def test_an_epoch_without_any_weight_is_nan_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    metrics = stepped({"weight": torch.tensor(0)}).fit(one_batch(), one_batch()).metrics
    assert math.isnan(metrics["train_loss"])
    assert math.isnan(metrics["val_loss"])
    assert "train_loss is NaN: no batch of the epoch has any weight" in caplog.text


def test_batches_that_hold_no_tensors_are_weighed_by_the_step() -> None:
    class Graph:
        def __init__(self, nodes: int, value: float) -> None:
            self.nodes, self.value = nodes, value

    class Graphs:
        def epoch(self, epoch: int, skip: int = 0) -> Any:
            return iter([Graph(3, 1.0), Graph(1, 5.0), Graph(0, math.nan)][skip:])

    def step(model: nn.Module, batch: Any) -> Any:
        loss = model.weight.sum() * 0 + batch.value
        return {"loss": loss, "weight": batch.nodes, "twice": 2 * batch.value}

    model = nn.Linear(1, 1, bias=False)
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), step=step, max_epochs=1, device="cpu")
    metrics = trainer.fit(Graphs(), Graphs()).metrics
    assert metrics["train_loss"] == metrics["val_loss"] == 2.0
    assert metrics["train_twice"] == 4.0


def test_a_weight_that_is_changed_afterwards_counts_as_it_was() -> None:
    seen = torch.zeros(())

    def step(model: nn.Module, batch: Any) -> Any:
        seen.fill_(batch[0].shape[0])
        return {"loss": model(batch[0]).mean() * 0 + batch[0].sum(), "weight": seen}

    model = nn.Linear(1, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters()),
        step=step,
        max_epochs=1,
        device="cpu",
        batching=BatchOptions(batch_size=2, shuffle=False),
    )
    assert trainer.fit((torch.tensor([[1.0], [1.0], [5.0]]),)).metrics["train_loss"] == 3.0
