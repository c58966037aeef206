"""TensorStatistics: the right numbers under the right names, and modules left as they were."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.trainer.callbacks.reads import no_reads_inside_a_step
from tests.unit.trainer.support import (
    At,
    TwoUpdates,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer import Callback, Trainer
from trainer.callbacks import Checkpoint
from trainer.callbacks.tensor_statistics import STATISTICS, TensorStatistics

EPOCHS, BATCHES = 2, 4
STEPS = EPOCHS * BATCHES
PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")
EVERYTHING = {"activations": True, "statistics": list(STATISTICS)}


def fit(*callbacks: Callback, seed: int = 7, **options: Any) -> Trainer:
    trainer = build(*callbacks, seed=seed, **options)
    trainer.fit(regression(4 * BATCHES), regression(9, seed=8))
    return trainer


def build(*callbacks: Callback, seed: int = 7, **options: Any) -> Trainer:
    model = options.pop("model", None) or make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    return make_trainer(callbacks, model=model, optimizer=optimizer, **{"max_epochs": EPOCHS, **options})


def recorded(trainer: Trainer, epoch: int = 0) -> dict[str, float]:
    plain = {"train_loss", "val_loss", "lr"}
    return {name: value for name, value in trainer.state.history[epoch].items() if name not in plain}


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_by_default_it_is_one_norm_of_each_gradient_and_parameter() -> None:
    names = {f"{kind}_norm/{name}" for kind in ("grad", "param") for name in PARAMETERS}
    trainer = fit(TensorStatistics())
    assert recorded(trainer).keys() == recorded(trainer, 1).keys() == names


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, partial(torch.compile, backend="eager")], ids=["data parallel", "compiled"]
)
def test_a_wrapped_model_has_the_names_of_what_is_in_it(wrap: Callable[[nn.Module], Any]) -> None:
    statistics = partial(TensorStatistics, activations=True, names="^0")
    wrapped = fit(statistics(), model=wrap(make_model()))
    names = {f"{kind}_norm/0.{name}" for kind in ("grad", "param") for name in ("weight", "bias")}
    assert recorded(wrapped).keys() == names | {"activation_norm/0"}
    assert recorded(wrapped) == pytest.approx(recorded(fit(statistics(), model=make_model())))


def test_a_model_that_is_compiled_already_is_looked_into_and_stays_in_one_piece() -> None:
    def compiled_fit(*callbacks: Callback) -> tuple[Trainer, int]:
        graphs: list[Any] = []
        torch.compiler.reset()
        model = torch.compile(make_model(), backend=lambda graph, inputs: graphs.append(inputs) or graph.forward)
        trainer = build(*callbacks, model=model)
        trainer.model(torch.zeros(4, 4))
        assert len(graphs) == 1
        trainer.fit(regression(4 * BATCHES), regression(9, seed=8))
        return trainer, len(graphs)

    statistics = partial(TensorStatistics, activations=True)
    trainer, graphs = compiled_fit(statistics(every_n_steps=3))
    assert recorded(trainer) == pytest.approx(recorded(fit(statistics(every_n_steps=3))))
    assert graphs == compiled_fit()[1]


def test_a_compiled_part_that_is_checkpointed_is_computed_again_as_in_the_forward_pass() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.compile(make_model(), backend="aot_eager")

        def forward(self, inputs: Tensor) -> Any:
            return checkpoint(self.part, inputs, use_reentrant=False)

    torch.compiler.reset()
    trainer = fit(TensorStatistics(activations=True, every_n_steps=2), model=Checkpointed())
    assert any(name.startswith("activation_norm/part") for name in recorded(trainer))


def test_a_measured_step_without_a_backward_pass_leaves_the_model_compiled() -> None:
    ran: list[bool] = []
    torch.compiler.reset()
    model = torch.compile(
        make_model(), backend=lambda graph, inputs: lambda *given: ran.append(True) or graph(*given)
    )
    skip = At("on_after_forward", lambda trainer: trainer.state.skip("backward"))
    fit(TensorStatistics(activations=True), skip, model=model)
    assert ran, "in validation"


def test_numbers_are_means_and_maxima_over_the_measured_steps() -> None:
    taken: list[tuple[Tensor, Tensor]] = []

    def keep(trainer: Any) -> None:
        weight = trainer.model[0].weight
        taken.append((weight.grad.double(), weight.detach().double().clone()))

    watch = At("on_before_optimizer_step", keep, lambda trainer: trainer.state.step in {0, 3})
    trainer = fit(watch, TensorStatistics(every_n_steps=3, statistics=list(STATISTICS)))
    metrics = recorded(trainer)
    for kind, tensors in (("grad", [item[0] for item in taken]), ("param", [item[1] for item in taken])):
        stacked = torch.stack(tensors)
        expected = {
            "mean": stacked.mean(),
            "std": torch.stack([item.std(correction=0) for item in tensors]).mean(),
            "norm": torch.stack([item.square().sum().sqrt() for item in tensors]).mean(),
            "max_abs": stacked.abs().max(),
            "zero_fraction": (stacked == 0).double().mean(),
        }
        for statistic, value in expected.items():
            assert metrics[f"{kind}_{statistic}/0.weight"] == pytest.approx(value.item(), rel=1e-5), statistic


def test_a_step_that_overflows_in_fp16_is_not_measured() -> None:
    def overflow(trainer: Any) -> None:
        trainer.model[0].weight.grad.fill_(torch.inf)

    norms: list[float] = []
    outputs: list[float] = []

    def watch(trainer: Any) -> None:
        norms.append(trainer.model[4].weight.grad.norm().item())
        outputs.append(trainer.state.outputs.float().norm().item())

    spoil = At("on_after_backward", overflow, lambda trainer: not trainer.state.batch_index)
    statistics = TensorStatistics(activations=True, every_n_steps=1)
    trainer = fit(spoil, At("on_after_optimizer_step", watch), statistics, precision="fp16", max_epochs=1)
    assert 0 < len(norms) < BATCHES
    assert recorded(trainer)["grad_norm/4.weight"] == pytest.approx(sum(norms) / len(norms), rel=1e-6)
    assert recorded(trainer)["activation_norm/4"] == pytest.approx(sum(outputs) / len(outputs), rel=1e-6)
    assert all(math.isfinite(value) for value in recorded(trainer).values())


def test_an_update_by_name_measures_its_own_parameters() -> None:
    norms: dict[str, list[float]] = {"first": [], "last": []}

    def watch(trainer: Any) -> None:
        name = trainer.state.optimizer_name
        norms[name].append(trainer.model[0 if name == "first" else 4].weight.grad.norm().item())

    def named(*callbacks: Callback) -> Trainer:
        model = make_model()
        optimizers = {
            "first": torch.optim.SGD(model[:2].parameters(), lr=0.05),
            "last": torch.optim.SGD(model[4].parameters(), lr=0.05),
        }
        statistics = TensorStatistics(every_n_steps=1)
        return make_trainer([statistics, *callbacks], model=model, optimizer=optimizers, step=TwoUpdates())

    def fitted(trainer: Trainer) -> Trainer:
        trainer.fit(regression(4 * BATCHES))
        return trainer

    whole = fitted(named(At("on_before_optimizer_step", watch, lambda trainer: not trainer.state.epoch)))
    assert [len(of_optimizer) for of_optimizer in norms.values()] == [BATCHES // 2, BATCHES]
    for name, of_optimizer in (("0.weight", norms["first"]), ("4.weight", norms["last"])):
        expected = sum(of_optimizer) / len(of_optimizer)
        assert recorded(whole)[f"grad_norm/{name}"] == pytest.approx(expected, rel=1e-6)
    resumed = named()
    resumed.load_state_dict(through_file(fitted(named(interrupt_at(1))).state_dict()))
    assert_same(frozen(fitted(resumed)), frozen(whole))


def test_each_epoch_is_measured_at_its_first_step() -> None:
    weights: list[float] = []
    watch = At(
        "on_train_epoch_start",
        lambda trainer: weights.append(trainer.model[0].weight.norm().item()),
    )
    trainer = fit(watch, TensorStatistics(every_n_steps=1000, gradients=False, names=r"^0\.weight$"))
    assert [recorded(trainer, epoch) for epoch in range(EPOCHS)] == [
        {"param_norm/0.weight": pytest.approx(weight, rel=1e-6)} for weight in weights
    ]


@pytest.mark.parametrize("every", [1, 2])
def test_activations_are_those_of_training_only(every: int) -> None:
    outputs: list[Tensor] = []
    model = make_model()

    def keep(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if model.training:
            outputs.append(output.detach().clone())

    model[2].register_forward_hook(keep)
    statistics = TensorStatistics(
        gradients=False,
        parameters=False,
        activations=True,
        every_n_steps=every,
        statistics=["mean", "zero_fraction"],
    )
    trainer = fit(statistics, model=model)
    metrics = recorded(trainer)
    leaves = {"0", "1", "2", "3", "4"}
    assert metrics.keys() == {f"activation_{kind}/{name}" for kind in ("mean", "zero_fraction") for name in leaves}
    measured = torch.stack(outputs[:BATCHES:every])
    assert metrics["activation_mean/2"] == pytest.approx(measured.mean().item(), rel=1e-6)
    assert metrics["activation_zero_fraction/2"] == pytest.approx((measured == 0).double().mean().item())


class Nested(nn.Module):
    """Returns what modules return: tuples, mappings, and things that are no floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 1)
        self.odd = Odd()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(inputs[:, None])
        output: Tensor = self.odd(self.head(hidden[:, -1]))["result"]
        return output


class Odd(nn.Module):
    def forward(self, inputs: Tensor) -> dict[str, Any]:
        others = [inputs.argmax(), None, "text", inputs[:0], inputs.to(torch.complex64)]
        return {"result": inputs, "half": inputs.half(), "others": others}


def test_outputs_are_found_in_tuples_and_mappings() -> None:
    trainer = fit(TensorStatistics(gradients=False, parameters=False, activations=True), model=Nested())
    assert recorded(trainer).keys() == {
        f"activation_norm/{name}"
        for name in ("lstm[0]", "lstm[1][0]", "lstm[1][1]", "head", "odd[result]", "odd[half]")
    }
    assert recorded(trainer)["activation_norm/odd[half]"] == pytest.approx(
        recorded(trainer)["activation_norm/odd[result]"], rel=1e-2
    )


def test_names_choose_parameters_and_any_module() -> None:
    trainer = fit(TensorStatistics(activations=True, names=r"^(model|lstm.*_l0|head\.bias)$"), model=Nested())
    lstm = {f"lstm.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    expected = {f"{kind}_norm/{name}" for kind in ("grad", "param") for name in {*lstm, "head.bias"}}
    assert recorded(trainer).keys() == expected | {"activation_norm/model"}


class Unused(nn.Module):
    """A sparse gradient, a frozen parameter and one of 16 bits that overflows where it is not widened."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 1, sparse=True)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.large = nn.Parameter(torch.full((1000,), 6e4, dtype=torch.float16), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.table(inputs[:, 0].abs().long() % 4)
        return output


def test_sparse_frozen_and_half_precision_tensors_are_measured() -> None:
    dense: list[Tensor] = []
    keep = At("on_before_optimizer_step", lambda trainer: dense.append(trainer.model.table.weight.grad.to_dense()))
    metrics = recorded(fit(keep, TensorStatistics(statistics=["norm", "zero_fraction"]), model=Unused()))
    assert metrics["grad_norm/table.weight"] == pytest.approx(dense[0].norm().item())
    assert metrics["grad_zero_fraction/table.weight"] == (dense[0] == 0).sum().item() / 4
    assert metrics["param_norm/large"] == pytest.approx(5.9999e4 * 1000**0.5, rel=1e-2)
    assert "grad_norm/frozen" not in metrics


def test_watching_changes_nothing_that_is_learnt() -> None:
    one, other = fit(TensorStatistics(every_n_steps=1, **EVERYTHING)), fit()
    assert_same(dict(one.model.state_dict()), dict(other.model.state_dict()))


@cache
def whole() -> dict[str, Any]:
    return frozen(fit(TensorStatistics(every_n_steps=2, **EVERYTHING)))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_stopped_at_any_batch_goes_on_to_the_same_bits(step: int) -> None:
    stopped = fit(TensorStatistics(every_n_steps=2, **EVERYTHING), interrupt_at(step))
    resumed = build(TensorStatistics(every_n_steps=2, **EVERYTHING), seed=99)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    for trainer in (resumed, stopped):
        trainer.fit(regression(4 * BATCHES), regression(9, seed=8))
        assert_same(frozen(trainer), whole())


@pytest.mark.parametrize(
    "event", ["on_fit_start", "on_before_forward", "on_after_backward", "on_validation_start"]
)
def test_hooks_are_gone_after_a_fit_that_failed_anywhere(event: str) -> None:
    def fail(trainer: Any) -> None:
        raise OSError(event)

    statistics = TensorStatistics(activations=True)
    trainer = build(statistics, At(event, fail))
    with pytest.raises(OSError, match=event):
        trainer.fit(regression(), regression())
    assert hooks(trainer.model) == 0
    statistics.teardown(trainer)


def test_two_fits_and_an_evaluation_register_nothing_twice(tmp_path: Any) -> None:
    counts: list[int] = []
    watch = At("on_before_forward", lambda trainer: counts.append(hooks(trainer.model)))
    trainer = fit(TensorStatistics(activations=True), watch, interrupt_at(3), Checkpoint(tmp_path))
    assert hooks(trainer.model) == 0
    trainer.fit(regression(4 * BATCHES), regression(9, seed=8))
    assert trainer.test(regression()).keys() == {"test_loss"}
    # Measured is the first step of each epoch, of which there are two, and one resumes inside.
    assert counts == [5, 0, 0, 0, 5, 0, 0, 0]
    assert hooks(trainer.model) == 0


def test_no_step_reads_from_the_device() -> None:
    trainer = fit(*no_reads_inside_a_step(), TensorStatistics(every_n_steps=1, **EVERYTHING))
    assert trainer.finished


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": False, "parameters": False}, "are all False: set one to True"),
        ({"every_n_steps": 0}, "every_n_steps is 0: give a whole number of at least 1"),
        ({"statistics": []}, "give a list of some of mean, std, norm"),
        ({"statistics": "norm"}, "statistics is 'norm': give a list"),
        ({"statistics": ["median"]}, r"statistics is \['median'\]"),
        ({"names": "("}, r"names is '\(', no regular expression"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorStatistics(**arguments)


@pytest.mark.parametrize("by_itself", [False, True])
def test_of_a_step_that_evaluates_its_loss_again_the_first_evaluation_counts(by_itself: bool) -> None:
    """With a closure, also in a step that makes its own update; all metrics are those before the step."""

    def step(model: nn.Module, batch: Any, update: Any) -> Tensor:
        inputs, targets = batch
        update(lambda: nn.functional.mse_loss(model(inputs), targets))
        return nn.functional.mse_loss(batch[1] * 0, targets)

    def trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> dict[str, float]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        trainer = make_trainer(
            [TensorStatistics(every_n_steps=1, **EVERYTHING)],
            model=model,
            optimizer=optimizer(model.parameters(), lr=0.5, **options),
            max_epochs=1,
            **({"step": step} if by_itself else {}),
        )
        trainer.fit(regression(4))
        return recorded(trainer)

    assert trained(torch.optim.LBFGS, max_iter=5) == trained(torch.optim.SGD)
