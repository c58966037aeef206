"""Steps that make their own updates: several optimizers, their schedulers, events, precision, resuming."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import (
    EMA,
    Checkpoint,
    GradientAccumulation,
    GradientClipping,
    GradientMonitor,
    LRFinder,
    StabilityMonitor,
    default_callbacks,
)


class Pair(nn.Module):
    """A generator of targets from inputs, and a discriminator of targets."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))


def losses(model: Any, batch: Any) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    fake = model.generator(batch[0])
    ones, zeros = torch.ones(len(fake), 1), torch.zeros(len(fake), 1)
    judge = nn.functional.binary_cross_entropy_with_logits

    def of_discriminator() -> Tensor:
        real, made = model.discriminator(batch[1]), model.discriminator(fake.detach())
        return judge(real, ones) + judge(made, zeros)

    return of_discriminator, lambda: judge(model.discriminator(fake), ones)


def gan(model: Any, batch: Any, update: Any) -> dict[str, Any]:
    of_discriminator, of_generator = losses(model, batch)
    first = of_discriminator()
    update(first, "discriminator")
    second = of_generator()
    update(second, "generator")
    return {"loss": first.detach() + second.detach(), "d": first.detach(), "g": second.detach()}


def build(*callbacks: Callback, step: Any = gan, seed: int = 0, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    model = Pair()
    optimizers = {
        "generator": torch.optim.Adam(model.generator.parameters(), lr=0.01),
        "discriminator": torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9),
    }
    if options.pop("scheduled", False):
        plateau = ReduceLROnPlateau(optimizers["generator"], patience=0, factor=0.5)
        options["scheduler"] = {
            "cosine": CosineAnnealingLR(optimizers["generator"], 12),
            "plateau": plateau,
            "discriminator": StepLR(optimizers["discriminator"], 2, 0.9),
        }
        options["scheduler_interval"] = {"cosine": "step", "plateau": "epoch", "discriminator": "step"}
    return make_trainer(callbacks, model=model, optimizer=optimizers, step=step, **options)


def test_it_computes_what_a_loop_of_torch_alone_does() -> None:
    data = regression(12)
    trainer = build(max_epochs=2, batching=BatchOptions(batch_size=4, shuffle=False))
    trainer.model.generator[1].p = 0.0
    torch.manual_seed(0)
    model = Pair()
    model.generator[1].p = 0.0
    for_g = torch.optim.Adam(model.generator.parameters(), lr=0.01)
    for_d = torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for inputs, targets in zip(data.tensors[0].split(4), data.tensors[1].split(4), strict=True):
            of_discriminator, of_generator = losses(model, (inputs, targets))
            for optimizer, loss in ((for_d, of_discriminator), (for_g, of_generator)):
                optimizer.zero_grad()
                loss().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    state = trainer.fit(data)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], weight)
    assert state.step == 6
    assert state.metrics["train_loss"] == pytest.approx(state.metrics["train_d"] + state.metrics["train_g"])
    assert (state.metrics["lr_generator"], state.metrics["lr_discriminator"]) == (0.01, 0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_stopped_twice_resumes_to_the_same_bits(precision: Any) -> None:
    def run(*stops: int) -> Any:
        checkpoint: Any = None
        for stop in (*stops, 99):
            trainer = build(
                GradientMonitor(), EMA(0.9), interrupt_at(stop), scheduled=True, precision=precision, max_epochs=4
            )
            if checkpoint is not None:
                trainer.load_state_dict(checkpoint)
            elif precision == "fp16":
                for name in ("generator", "discriminator"):
                    scaler = trainer.precision.of(name)
                    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
            trainer.fit(regression(12), regression(8))
            checkpoint = through_file(trainer.state_dict())
        return frozen(trainer)

    assert_same(run(2, 7), run())


def test_schedulers_step_with_their_own_optimizer_or_epoch() -> None:
    trainer = build(scheduled=True, max_epochs=2)
    history = trainer.fit(regression(12), regression(8)).history
    assert history[-1]["lr_discriminator"] == pytest.approx(0.1 * 0.9**3)
    schedulers: Any = trainer.scheduler
    assert schedulers.by_name["cosine"].last_epoch == 6
    assert schedulers.by_name["plateau"].last_epoch == 2


def test_events_see_the_optimizer_at_work_and_its_name() -> None:
    seen: list[tuple[str, bool]] = []

    def look(trainer: Any) -> None:
        name = trainer.state.optimizer_name
        seen.append((name, trainer.optimizer.param_groups[0]["params"][0] is next(parameters(trainer, name))))

    def parameters(trainer: Any, name: str) -> Any:
        return getattr(trainer.model, name).parameters()

    whole: list[Any] = []
    build(
        At("on_before_optimizer_step", look),
        At("on_train_batch_end", lambda trainer: whole.append(trainer.optimizer)),
        max_epochs=1,
    ).fit(regression(4))
    assert seen == [("discriminator", True), ("generator", True)]
    assert sorted(whole[0].by_name) == ["discriminator", "generator"]


def test_an_update_leaves_the_gradients_of_other_optimizers_alone() -> None:
    def step(model: Any, batch: Any, update: Any) -> Tensor:
        loss = losses(model, batch)[1]()
        update(loss, "generator")
        assert all(parameter.grad is None for parameter in model.discriminator.parameters())
        return loss

    build(step=step, max_epochs=1).fit(regression(4))


def test_each_update_is_clipped_and_its_norm_is_measured() -> None:
    norms: list[dict[str, Tensor]] = []
    largest: list[float] = []

    def clipped(trainer: Any) -> None:
        gradients = [p.grad for group in trainer.optimizer.param_groups for p in group["params"]]
        largest.append(float(torch.cat([g.flatten() for g in gradients]).norm()))

    trainer = build(
        GradientMonitor(),
        GradientClipping(max_norm=1e-3),
        At("on_before_optimizer_step", clipped, priority=30),
        At("on_train_batch_end", lambda trainer: norms.append(trainer.state.grad_norms)),
        max_epochs=1,
    )
    trainer.fit(regression(8))
    assert all(norm == pytest.approx(1e-3, rel=1e-3) for norm in largest)
    assert [sorted(each) for each in norms] == [["grad_norm_discriminator", "grad_norm_generator"]] * 2
    for name in ("generator", "discriminator"):
        expected = max(float(each[f"grad_norm_{name}"]) for each in norms)
        assert trainer.state.metrics[f"max_grad_norm_{name}"] == pytest.approx(expected)


def test_an_update_that_overflows_in_fp16_has_no_part_in_the_largest_norm() -> None:
    norms: list[float] = []

    def step(model: Any, batch: Any, update: Any) -> Tensor:
        loss = losses(model, batch)[0]()
        update(loss * (1.0 if update.state.batch_index else 1e38), "discriminator")
        return loss

    look = At("on_train_batch_end", lambda t: norms.append(float(t.state.grad_norms["grad_norm_discriminator"])))
    trainer = build(GradientMonitor(), look, step=step, max_epochs=1, precision="fp16")
    trainer.fit(regression(12))
    assert [isfinite(norm) for norm in norms] == [False, True, True]
    assert trainer.state.metrics["max_grad_norm_discriminator"] == pytest.approx(max(norms[1:]))


def test_spikes_are_those_of_batches_whatever_updates_they_make() -> None:
    norms: list[Tensor] = []
    monitor = StabilityMonitor(window=8)
    look = At("on_train_batch_end", lambda t: norms.append(torch.stack(list(t.state.grad_norms.values())).norm()))
    trainer = build(monitor, look, max_epochs=2)
    state = trainer.fit(regression(12))
    saved = monitor.state_dict()
    assert saved["norms"]["before"].tolist() == pytest.approx(list(map(float, norms)))
    losses = saved["losses"]["before"].view(2, 3).mean(dim=1).tolist()
    assert losses == pytest.approx([metrics["train_loss"] for metrics in state.history])


def test_in_half_precision_an_update_is_seen_by_the_next_forward_pass() -> None:
    outputs: list[Tensor] = []

    def step(model: Any, batch: Any, update: Any) -> Tensor:
        loss = model.generator(batch[0]).square().mean()
        update(loss, "generator")
        outputs.append(model.generator(batch[0]).detach().float())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            outputs.append(model.generator(batch[0]).detach().float())
        return loss

    trainer = build(step=step, max_epochs=1, precision="bf16")
    trainer.model.generator[1].p = 0.0
    trainer.optimizer.param_groups[0]["lr"] = 1.0
    trainer.fit(regression(4))
    assert torch.equal(outputs[0], outputs[1])


def test_each_optimizer_has_a_loss_scale_of_its_own_in_fp16() -> None:
    skipped: list[bool] = []

    def step(model: Any, batch: Any, update: Any) -> Tensor:
        of_discriminator, of_generator = losses(model, batch)
        update(of_discriminator() * 1e38 * 1e38, "discriminator")  # overflows in each batch
        loss = of_generator()
        update(loss, "generator")
        return loss

    look = At("on_train_batch_end", lambda trainer: skipped.append(trainer.state.skipped_step))
    trainer = build(look, step=step, max_epochs=2, precision="fp16")
    parts = {name: getattr(trainer.model, name)[0].weight for name in ("generator", "discriminator")}
    before = {name: weight.detach().clone() for name, weight in parts.items()}
    trainer.fit(regression(12))
    assert [name for name, weight in parts.items() if not torch.equal(weight, before[name])] == ["generator"]
    assert trainer.precision.of("discriminator").overflows == 6
    assert skipped[-1] is False


def test_a_batch_without_an_update_is_a_skipped_step_and_counts_as_none() -> None:
    skipped: list[bool] = []

    def step(model: Any, batch: Any, update: Any) -> Tensor:
        loss = losses(model, batch)[1]()
        if update.state.batch_index % 2:
            update(loss, "generator")
        return loss

    look = At("on_train_batch_end", lambda trainer: skipped.append(trainer.state.skipped_step))
    state = build(look, step=step, max_epochs=1).fit(regression(16))
    assert (skipped, state.step) == ([True, False, True, False], 2)


def test_an_average_takes_each_batch_once_however_many_updates_it_makes() -> None:
    average = EMA(0.5)
    build(average, max_epochs=1).fit(regression(12))
    assert average.state_dict()["updates"] == 3


def test_validation_makes_no_update_and_uses_evaluate_where_there_is_one() -> None:
    class Step:
        evaluated = 0

        def __call__(self, model: Any, batch: Any, update: Any) -> Any:
            return gan(model, batch, update)

        def evaluate(self, model: Any, batch: Any) -> Tensor:
            self.evaluated += 1
            return losses(model, batch)[1]()

    for step, calls in ((gan, None), (Step(), 1)):
        trainer = build(step=step, max_epochs=1)
        before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        assert trainer.validate(regression(4))["val_loss"] > 0
        assert_same(dict(trainer.model.state_dict()), before)
        assert getattr(step, "evaluated", None) == calls


def test_what_a_step_keeps_is_in_the_checkpoint() -> None:
    class Step:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, model: Any, batch: Any, update: Any) -> Any:
            self.calls += 1
            return gan(model, batch, update)

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    trainer = build(step=Step(), max_epochs=1)
    trainer.fit(regression(12))
    again = Step()
    build(step=again).load_state_dict(through_file(trainer.state_dict()))
    assert again.calls == 3


def test_one_loss_steps_all_together_with_or_without_an_update_of_its_own() -> None:
    def plain(model: Any, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model.discriminator(model.generator(batch[0])), batch[1])

    def own(model: Any, batch: Any, update: Any) -> Tensor:
        loss = plain(model, batch)
        update(loss)
        return loss

    runs = [build(step=step, max_epochs=2, scheduled=True) for step in (plain, own)]
    for trainer in runs:
        trainer.fit(regression(12), regression(4))
    weights = [dict(trainer.model.state_dict()) for trainer in runs]
    assert_same(weights[0], weights[1])
    assert runs[0].state.history == runs[1].state.history


def test_the_finder_of_learning_rates_moves_all_and_puts_them_back() -> None:
    trainer = build(max_epochs=3)
    rates: list[float] = []
    trainer.callbacks.add(
        At("on_train_batch_end", lambda t: rates.append(t.optimizer["discriminator"].param_groups[0]["lr"]))
    )
    with trainer.callbacks.add(LRFinder(1e-4, 1e-2, steps=3)):
        trainer.fit(regression(12))
    assert rates == pytest.approx([1e-3, 1e-2, 1e-1])
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01


def test_a_fork_has_its_own_hyperparameters_in_each_optimizer() -> None:
    parent = build(scheduled=True, max_epochs=2)
    parent.fit(regression(12), regression(8))
    child = build(scheduled=True, max_epochs=4)
    schedulers: Any = child.scheduler
    for each in child.optimizer.by_name.values():  # type: ignore[attr-defined]
        each.param_groups[0]["lr"] *= 10
        each.param_groups[0]["initial_lr"] *= 10
    child.built = [
        {**group, "lr": group["lr"] * 10, "initial_lr": group["initial_lr"] * 10} for group in child.built
    ]
    child.load_state_dict(through_file(parent.state_dict()), fork=True)
    for name in ("generator", "discriminator"):
        old, new = (trainer.optimizer[name].param_groups[0] for trainer in (parent, child))  # type: ignore[index]
        assert new["lr"] == pytest.approx(10 * old["lr"])
    assert schedulers.by_name["discriminator"].base_lrs == pytest.approx([1.0])
    child.fit(regression(12), regression(8))


def test_it_is_checkpointed_with_all_default_callbacks(tmp_path: Any) -> None:
    def make() -> Trainer:
        return build(*default_callbacks(), Checkpoint(tmp_path, max_overhead=1, every_n_steps=1), max_epochs=2)

    first = make()
    first.fit(regression(12), regression(4))
    second = make()
    second.fit(regression(12), regression(4), ckpt="last")
    assert_same(dict(second.model.state_dict()), dict(first.model.state_dict()))


def _backward_twice(model: Any, batch: Any, update: Any) -> Tensor:
    loss = losses(model, batch)[1]()
    update(loss, "generatr")
    return loss


def _of_two_elements(model: Any, batch: Any, update: Any) -> Tensor:
    update(torch.ones(2, requires_grad=True), "generator")
    return torch.zeros(())


def _frozen(model: Any, batch: Any, update: Any) -> Tensor:
    model.generator.requires_grad_(False)
    update(losses(model, batch)[1](), "generator")
    return torch.zeros(())


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (_backward_twice, ValueError, "no optimizer is called 'generatr': did you mean 'generator'"),
        (_of_two_elements, TypeError, r"update takes the loss.*not a tensor of shape \(2,\)"),
        (_frozen, ValueError, "update of generator: none of its parameters takes a gradient"),
    ],
)
def test_a_wrong_update_is_refused(step: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(step=step, max_epochs=1).fit(regression(4))


def test_accumulation_is_refused() -> None:
    with pytest.raises(ValueError, match="the step makes its own updates, so GradientAccumulation can't"):
        build(GradientAccumulation(2)).fit(regression(8))


def test_what_can_be_no_set_of_optimizers_is_refused() -> None:
    model = Pair()
    optimizer = torch.optim.SGD(model.generator.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer 'b' holds no parameter of the model"):
        make_trainer(model=model, optimizer={"a": optimizer, "b": other})
    with pytest.raises(ValueError, match="scheduler 'x' was built over another optimizer"):
        make_trainer(model=model, optimizer={"a": optimizer}, scheduler={"x": StepLR(other, 1)})
    with pytest.raises(ValueError, match=r"an optimizer is called 'a\.b'"):
        make_trainer(model=model, optimizer={"a.b": optimizer})
    trainer = build()
    with pytest.raises(ValueError, match="the checkpoint has the optimizers of a run with only one"):
        trainer.optimizer.load_state_dict(optimizer.state_dict())


def test_a_batch_whose_second_update_fails_is_not_trained_again() -> None:
    failed: list[int] = []

    def fail(trainer: Any) -> None:
        if not failed and trainer.state.optimizer_name == "generator":
            failed.append(trainer.state.batch_index)
            raise RuntimeError("once")

    trainer = build(At("on_before_optimizer_step", fail), max_epochs=1)
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(regression(12))
    assert (trainer.state.batch_index, trainer.state.step, trainer.state.optimizer_name) == (1, 1, "")
    assert trainer.fit(regression(12)).step == 3
