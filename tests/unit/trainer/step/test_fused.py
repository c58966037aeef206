"""Fused optimizers: only where there is one and the arguments don't forbid it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import TensorDataset

from tests.unit.trainer.support import At, make_trainer, quick, regression, through_file
from trainer import BatchOptions, Trainer
from trainer.callbacks import GradientMonitor
from trainer.data.plan import Plan
from trainer.step.fused import use_fused


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
        lambda: SGD(parameters(torch.bfloat16)),
        lambda: SGD(parameters(torch.float16)),
    ],
)
def test_others_are_left_alone(make: Callable[[], Any]) -> None:
    optimizer = make()
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert not use_fused(optimizer)
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert before == after


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_trained(dtype: torch.dtype, kind: type[Optimizer], fused: bool | None) -> None:
    def trained(dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        model = nn.Linear(40, 1, bias=False).to(dtype)
        nn.init.constant_(model.weight, 0.5)
        options |= {"momentum": 0.5} if kind is SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
        step = lambda model, batch: model(batch[0].to(dtype)).square().mean()  # noqa: E731
        trainer = make_trainer(model=model, optimizer=optimizer, step=step, max_epochs=2)
        trainer.fit(TensorDataset(inputs))
        return model.weight.detach().double()

    inputs = torch.linspace(-1, 1, 8 * 40).reshape(8, 40)
    exact = trained(torch.float64, {"fused": False})
    assert (exact - 0.5).abs().min() > 0.01
    torch.testing.assert_close(trained(dtype, {"fused": fused}), exact, atol=0.01, rtol=0)


def test_one_that_has_stepped_is_left_alone() -> None:
    (parameter,) = parameters()
    optimizer = Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    assert not use_fused(optimizer)


def contiguous(memory: Tensor) -> list[Tensor]:
    return [memory[:24].view(4, 6)]


LAYOUTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "contiguous": contiguous,
    "transposed": lambda memory: [memory[:24].view(4, 6).t()],
    "columns": lambda memory: [memory[:24].view(4, 6)[:, 1:4]],
    "every other row": lambda memory: [memory[:24].view(4, 6)[::2]],
    "rows": lambda memory: [memory[:24].view(4, 6)[1:3]],
    "channels last": lambda memory: [memory[:48].view(2, 2, 4, 3).permute(0, 3, 1, 2)],
    "channels last of one channel": lambda memory: [memory[:8].view(2, 2, 2, 1).permute(0, 3, 1, 2)],
    "expanded": lambda memory: [memory[:3].expand(2, 3)],
    "expanded by one": lambda memory: [memory[:3].expand(1, 3)],
    "empty": lambda memory: [memory[:0].view(0, 3), memory[3:7]],
    "without dimensions": lambda memory: [memory[5]],
    "neighbours": lambda memory: [memory[:5], memory[5:12].view(7, 1)],
    "overlapping": lambda memory: [memory[:6], memory[3:9]],
    "interleaved": lambda memory: [memory[0:20:2], memory[1:20:2]],
}

OPTIONS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda items, **given: SGD(items, lr=0.1, **given),
    "momentum": lambda items, **given: SGD(items, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, **given),
    "nesterov": lambda items, **given: SGD(items, lr=0.1, momentum=0.8, nesterov=True, maximize=True, **given),
    "adam": lambda items, **given: Adam(items, lr=0.1, weight_decay=0.1, **given),
    "amsgrad": lambda items, **given: Adam(items, lr=torch.tensor(0.1), amsgrad=True, **given),
    "adamw": lambda items, **given: AdamW(items, lr=0.1, betas=(0.7, 0.9), maximize=True, **given),
}


class Views(nn.Module):
    """Parameters that are views of one piece of memory, in different orders, and what a batch makes of them."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.memory = torch.linspace(-1, 1, 60, dtype=dtype)
        self.views = nn.ParameterList([nn.Parameter(view) for view in LAYOUTS[layout](self.memory)])

    def forward(self, number: Tensor, used: list[bool]) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for index, view in enumerate(self.views):
            if used[index % len(used)]:
                factors = torch.linspace(0.5, 2.0, view.numel(), dtype=view.dtype).reshape(view.shape)
                loss = loss + ((view * factors + number) ** 2).sum()
        return loss


def plainly(model: Views, optimizer: Optimizer, uses: list[list[bool]]) -> None:
    for number, used in enumerate(uses):
        optimizer.zero_grad()
        loss = model(torch.tensor(float(number)), used)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()


def by_trainer(model: Views, optimizer: Optimizer, uses: list[list[bool]]) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        number = int(batch[0])
        loss: Tensor = model(torch.tensor(float(number)), uses[number])
        return loss if loss.requires_grad else loss.clone().requires_grad_()

    data = TensorDataset(torch.arange(len(uses)))
    batching = BatchOptions(batch_size=1, shuffle=False)
    make_trainer(model=model, optimizer=optimizer, step=step, max_epochs=1, batching=batching).fit(data)


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    option=st.sampled_from(sorted(OPTIONS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    uses=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=2, max_size=4),
)
@quick(250)
def test_in_every_layout_the_trainer_computes_what_torch_does_without_fusing(
    layout: str, option: str, dtype: torch.dtype, uses: list[list[bool]]
) -> None:
    ours, torchs = Views(layout, dtype), Views(layout, dtype)
    error: BaseException | None = None
    try:
        plainly(torchs, OPTIONS[option](torchs.parameters(), fused=False), uses)
    except RuntimeError as raised:  # torch writes to no tensor of which elements share their memory
        error = raised
    if error is None:
        by_trainer(ours, OPTIONS[option](ours.parameters()), uses)
    else:
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:60])):
            by_trainer(ours, OPTIONS[option](ours.parameters()), uses)
    # All of the memory: what no view shows stays as it was, to the last bit.
    torch.testing.assert_close(ours.memory, torchs.memory, rtol=1e-5, atol=1e-6)
    places = torch.arange(60)
    shown = torch.cat([view.flatten() for view in LAYOUTS[layout](places)])
    hidden = ~torch.isin(places, shown)
    assert torch.equal(ours.memory[hidden], Views(layout, dtype).memory[hidden])


def test_contiguous_parameters_are_fused_and_others_beside_them_are_not() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3).t())])
    groups = [{"params": [parameter]} for parameter in model]
    optimizer = make_trainer(model=model, optimizer=Adam(groups)).optimizer
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]


@pytest.mark.parametrize("fused", [None, True], ids=["ours", "asked for"])
def test_a_gradient_that_is_not_contiguous_is_taken_as_it_is(fused: bool | None) -> None:
    def turned(trainer: Any) -> None:
        weight.grad = weight.grad.t().contiguous().t()  # as a decomposition of it may lie

    results = []
    for chosen in (fused, False):
        model = nn.Linear(4, 3)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        weight = model.weight
        optimizer = SGD(model.parameters(), lr=0.1, fused=chosen)
        step = lambda model, batch: (model(batch[0]) * torch.arange(3.0)).square().mean()  # noqa: E731
        watch = At("on_before_optimizer_step", turned)
        make_trainer([watch], model=model, optimizer=optimizer, step=step).fit(regression(8))
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)


def test_a_first_gradient_after_others_is_no_error() -> None:
    """Torch's fused SGD has no momentum for it."""

    class Unfreezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.head(self.body(inputs))
            return outputs

    def freeze(trainer: Any) -> None:
        trainer.model.body.requires_grad_(trainer.state.epoch > 0)

    results = []
    for fused in (None, False):
        torch.manual_seed(0)
        model = Unfreezing()
        before = model.body.weight.detach().clone()
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused)
        make_trainer([At("on_train_epoch_start", freeze)], model=model, optimizer=optimizer).fit(regression(8))
        assert not torch.equal(model.body.weight, before)
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*results)


class Functional(nn.Module):
    """Looks rows up without a layer that says that its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(15.0).reshape(5, 3))
        self.last = nn.Linear(6, 1)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.last(nn.functional.embedding(rows, self.table, sparse=True).flatten(1))
        return outputs


ROWS = TensorDataset(torch.tensor([[0, 1], [1, 2], [2, 2], [3, 4]]), torch.ones(4, 1))


def test_sparse_gradients_are_taken_when_they_come() -> None:
    def trained(fused: bool | None) -> Tensor:
        torch.manual_seed(0)
        model = Functional()
        optimizer = SGD(model.parameters(), lr=0.01, fused=fused)
        trainer = make_trainer(model=model, optimizer=optimizer, max_epochs=3)
        assert optimizer.param_groups[0]["fused"] is (fused is None)
        trainer.fit(ROWS)
        assert not optimizer.param_groups[0]["fused"]
        return model.table.detach()

    torch.testing.assert_close(trained(None), trained(False))


def test_parameters_added_later_are_trained_as_torch_does() -> None:
    results = []
    for fused in (None, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        model[1].weight = nn.Parameter(model[1].weight.detach().repeat(2, 1).t()[:, :1].t())
        optimizer = Adam(model[0].parameters(), lr=0.01, fused=fused)
        trainer = make_trainer(model=model, optimizer=optimizer, max_epochs=1)
        trainer.fit(regression(8))
        optimizer.add_param_group({"params": list(model[1].parameters())})
        assert not optimizer.param_groups[1].get("fused")
        trainer.plan = Plan(max_epochs=3)
        trainer.fit(regression(8))
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*results)


def in_layout(*, transposed: bool, fused: bool | None = None) -> Trainer:
    model = nn.Linear(4, 3)
    nn.init.ones_(model.bias)
    weight = torch.linspace(-1, 1, 12).reshape(3, 4)
    model.weight = nn.Parameter(weight.t().contiguous().t() if transposed else weight)
    step = lambda model, batch: (model(batch[0]) * torch.arange(3.0)).square().mean()  # noqa: E731
    return make_trainer(model=model, optimizer=Adam(model.parameters(), lr=0.1, fused=fused), step=step)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_checkpoint_brings_no_fused_step_to_parameters_or_state_that_do_not_fit(
    saved: bool, loaded: bool
) -> None:
    first, second = in_layout(transposed=saved), in_layout(transposed=loaded)
    first.fit(regression(8))
    checkpoint = through_file(first.state_dict())
    second.load_state_dict(checkpoint)
    assert second.optimizer.param_groups[0]["fused"] is (True if not saved and not loaded else None)
    second.plan = Plan(max_epochs=4)
    second.fit(regression(8))
    plain = in_layout(transposed=loaded, fused=False)
    plain.plan = Plan(max_epochs=4)
    plain.fit(regression(8))
    torch.testing.assert_close(second.model.weight, plain.model.weight)


def test_a_parameter_that_is_laid_out_anew_between_fits_is_fused_no_more() -> None:
    trainer, plain = in_layout(transposed=False), in_layout(transposed=False, fused=False)
    for each in (trainer, plain):
        each.fit(regression(8))
        weight = each.model.weight
        weight.data = weight.data.t().contiguous().t()
        each.plan = Plan(max_epochs=4)
        each.fit(regression(8))
    torch.testing.assert_close(trainer.model.weight, plain.model.weight)


def test_a_model_with_sparse_gradients_trains() -> None:
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
