"""The step as one CUDA graph: with a stand-in for the capture on a CPU, and the real one where there is a GPU."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainer.support import (
    At,
    assert_same,
    beside_a_graph,
    frozen,
    make_model,
    make_trainer,
    regression,
)
from trainer import BatchOptions, Trainer, WholeSet
from trainer.callbacks import EarlyStopping, GarbageCollection, GradientMonitor, default_callbacks
from trainer.step.compute import Compute
from trainer.step.graph import GraphedCompute, make_capturable
from trainer.step.supervised import StepResult

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put the numbers of its state back, in the tensors that it has; a recording changes none."""
    for state, before in zip(optimizer.state.values(), saved["state"].values(), strict=True):
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                state[key].copy_(value)


class StandIn(GraphedCompute):
    """Captures without a GPU: runs the work once and takes its effects back; a replay runs it again.

    As with a real graph, results always lie in the tensors of the capture.
    """

    captures = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:  # type: ignore[override]
        type(self).captures += 1
        trainer: Any = self._trainer
        saved = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict(), torch.get_rng_state()))
        work()
        trainer.model.load_state_dict(saved[0])
        restore(trainer.optimizer, saved[1])
        torch.set_rng_state(saved[2])
        places = self._results()

        def replay() -> None:
            self._clear_gradients()
            work()
            with torch.no_grad():
                for place, result in zip(places, self._results(), strict=True):
                    place.copy_(result)

        return replay

    def _results(self) -> list[torch.Tensor]:
        trainer: Any = self._trainer
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        scalars = [self.last.loss, self.last.weight, *self.last.extra.values()]
        tensors = [item.detach() for item in scalars if isinstance(item, torch.Tensor)]
        return [trainer.state.outputs.detach(), *tensors, *gradients]

    def _forward(self) -> StepResult:
        self.last = super()._forward()
        return self.last


@pytest.fixture
def stand_in() -> type[StandIn]:
    return type("Fresh", (StandIn,), {"captures": 0})


def graphed(stand_in: type[StandIn], *callbacks: Any, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, metrics={"mae": nn.functional.l1_loss}, **options)
    trainer._compute_class = lambda *_: stand_in
    return trainer


@pytest.mark.parametrize("samples", [32, 30])
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_it_trains_to_the_same_bits(stand_in: type[StandIn], samples: int, interval: str) -> None:
    trainers = []
    for graph in (False, True):
        trainer = graphed(stand_in, GradientMonitor(), scheduler_interval=interval)
        make_capturable(trainer.optimizer, trainer.device)  # the rate in float32 on both sides
        if not graph:
            trainer._compute_class = lambda *_: Compute
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
        trainer.fit(regression(samples), regression(4))
        trainers.append(frozen(trainer))
    assert stand_in.captures == 1
    assert_same(trainers[1], trainers[0])


def of_tokens(model: nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    outputs, valid = model(inputs), targets > 0
    loss = ((outputs - targets).square() * valid).sum() / valid.sum().clamp(min=1)
    return {"loss": loss, "outputs": outputs, "weight": valid.sum(), "share": valid.double().mean()}


@pytest.mark.parametrize("step", [None, of_tokens])
def test_weights_and_metrics_of_the_whole_set_are_each_batchs_own(stand_in: type[StandIn], step: Any) -> None:
    found = []
    for kind in (Compute, stand_in):
        options: dict[str, Any] = {"loss": nn.BCEWithLogitsLoss()} if step is None else {"step": step}
        trainer = make_trainer(metrics={"whole": WholeSet(nn.functional.l1_loss)}, **options)
        trainer._compute_class = lambda *_, kind=kind: kind
        make_capturable(trainer.optimizer, trainer.device)
        trainer.fit(regression(30), regression(4))
        found.append(frozen(trainer))
    assert stand_in.captures == 1
    assert_same(found[1], found[0])


def test_a_weight_that_is_a_number_is_refused(stand_in: type[StandIn]) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).mean(), "weight": len(batch[0])}

    with pytest.raises(ValueError, match=r"a weight that it returns as a number .* return a tensor"):
        graphed(stand_in, step=step).fit(regression(30))


def test_a_batch_of_another_shape_or_with_a_skip_runs_as_usual(stand_in: type[StandIn]) -> None:
    replayed: list[int] = []

    class Noted(stand_in):  # type: ignore[valid-type, misc]
        def _replay_graph(self, batch: Any) -> None:
            replayed.append(self._trainer.state.batch_index)
            super()._replay_graph(batch)

    skip = At(
        "on_train_batch_start",
        lambda trainer: trainer.state.skip("optimizer_step"),
        lambda trainer: trainer.state.batch_index == 5,
    )
    skip.graph_safe = True  # type: ignore[misc]
    trainer = graphed(Noted, skip, max_epochs=1)
    trainer.fit(regression(4 * 8 + 2))
    assert replayed == [3, 4, 6, 7]
    assert trainer.state.step == 8


def test_garbage_is_collected_at_the_same_steps(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[tuple[int, int]] = []
    trainer = graphed(stand_in, GarbageCollection(every_n_steps=5), max_epochs=1)
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append((generation, trainer.state.step)))
    trainer.fit(regression(4 * 12))
    assert stand_in.captures == 1
    assert [step for generation, step in collected if generation == 1] == [4, 9]


@pytest.mark.parametrize(("batches", "epochs"), [(3, 3), (1, 5)])
def test_what_is_recorded_is_no_smaller_batch_of_a_passs_end(
    stand_in: type[StandIn], batches: int, epochs: int
) -> None:
    replayed: list[int] = []

    class Noted(stand_in):  # type: ignore[valid-type, misc]
        def _replay_graph(self, batch: Any) -> None:
            replayed.append(len(batch[0]))
            super()._replay_graph(batch)

    trainer = graphed(Noted, max_epochs=epochs)
    trainer.fit(regression(batches * 4 + 2))  # the fourth batch, after those that set all up, is a smaller one
    assert Noted.captures == 1
    assert replayed == [4] * {3: 6, 1: 3}[batches]


def test_settings_that_change_are_not_those_of_an_old_recording(stand_in: type[StandIn]) -> None:
    """A recorded step has the momentum of its recording: other ones run as usual, or are recorded anew."""
    replayed: list[tuple[float, float]] = []
    recorded_with: list[float] = []

    class Noted(stand_in):  # type: ignore[valid-type, misc]
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            recorded_with.append(self._trainer.optimizer.param_groups[0]["momentum"])
            return super().capture(work)

        def _replay_graph(self, batch: Any) -> None:
            replayed.append((self._trainer.optimizer.param_groups[0]["momentum"], recorded_with[-1]))
            super()._replay_graph(batch)

    def change(trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["momentum"] += 0.1

    model = make_model()
    trainer = graphed(
        Noted,
        beside_a_graph(At("on_train_epoch_start", change)),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.1),
        max_epochs=3,
    )
    trainer.fit(regression(4 * 8))
    assert replayed == [(value, value) for value in recorded_with for _ in range(7)][2:]
    assert recorded_with == pytest.approx([0.2, 0.3, 0.4])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_learning_rate_that_was_replaced_is_read_by_the_recording(
    stand_in: type[StandIn], as_tensor: bool
) -> None:
    read: list[torch.Tensor] = []

    class Noted(stand_in):  # type: ignore[valid-type, misc]
        def _replay_graph(self, batch: Any) -> None:
            read.append(self._trainer.optimizer.param_groups[0]["lr"])
            super()._replay_graph(batch)

    def change(trainer: Any) -> None:
        rate = 0.01 / (1 + trainer.state.step)
        trainer.optimizer.param_groups[0]["lr"] = torch.tensor(rate) if as_tensor else rate

    trainer = graphed(Noted, beside_a_graph(At("on_train_batch_start", change)), max_epochs=1)
    trainer.fit(regression(4 * 8))
    assert Noted.captures == 1
    assert len({id(rate) for rate in read}) == 1
    assert read[0].item() == pytest.approx(0.01 / 8)


def test_a_state_that_was_loaded_is_recorded_anew(stand_in: type[StandIn]) -> None:
    """The recording has the places of the old moments."""
    reload = At(
        "on_train_batch_start",
        lambda trainer: trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict())),
        lambda trainer: trainer.state.step == 6,
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = graphed(stand_in, beside_a_graph(reload), model=model, optimizer=optimizer, max_epochs=1)
    trainer.fit(regression(4 * 12))
    assert stand_in.captures == 2


def test_parameters_that_are_added_are_recorded_too(stand_in: type[StandIn]) -> None:
    model = make_model()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([first], lr=0.01, momentum=0.9)
    add = At(
        "on_train_batch_start",
        lambda trainer: trainer.optimizer.add_param_group({"params": others, "lr": 0.1}),
        lambda trainer: trainer.state.step == 6,
    )
    trainer = graphed(stand_in, beside_a_graph(add), model=model, optimizer=optimizer, max_epochs=1)
    trainer.fit(regression(4 * 12))
    assert stand_in.captures == 2
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)


def test_a_momentum_that_changes_with_each_batch_is_said_to_spoil_the_recording(
    stand_in: type[StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16)
    trainer = graphed(stand_in, model=model, optimizer=optimizer, scheduler=cycle, scheduler_interval="step")
    trainer.fit(regression(4 * 8))
    assert stand_in.captures == 0
    (said,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert said.startswith("cuda_graph has no effect while momentum of the optimizer changes with each batch")


class TestRefusals:
    def test_on_a_cpu(self) -> None:
        with pytest.raises(ValueError, match="cuda_graph needs a CUDA device, and this run is on cpu"):
            make_trainer(cuda_graph=True)

    def test_a_callback_that_acts_inside(self, stand_in: type[StandIn]) -> None:
        trainer = graphed(stand_in, At("on_before_backward", lambda trainer: None))
        with pytest.raises(ValueError, match="At acts inside: leave it out"):
            trainer.fit(regression(8))

    def test_an_optimizer_that_can_not_be_recorded(self, stand_in: type[StandIn]) -> None:
        model = nn.Linear(4, 1)
        trainer = graphed(stand_in, model=model, optimizer=torch.optim.LBFGS(model.parameters()))
        with pytest.raises(ValueError, match="can't record LBFGS"):
            trainer.fit(regression(8))

    def test_loss_scaling(self, stand_in: type[StandIn]) -> None:
        with pytest.raises(ValueError, match="fp16"):
            graphed(stand_in, precision="fp16").fit(regression(8))

    def test_the_default_callbacks_are_accepted(self, stand_in: type[StandIn]) -> None:
        graphed(stand_in, *default_callbacks(), EarlyStopping()).fit(regression(8), regression(4))


@cuda
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_on_a_gpu_it_learns_what_single_launches_learn(optimizer: str) -> None:
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
        trainer = Trainer(
            model,
            getattr(torch.optim, optimizer)(model.parameters(), lr=0.01),
            nn.functional.mse_loss,
            callbacks=[GradientMonitor()],
            cuda_graph=graph,
            batching=BatchOptions(batch_size=4),
            max_epochs=3,
            device="cuda",
        )
        results.append(trainer.fit(regression(30), regression(4)).history)
    for plain, recorded in zip(*results, strict=True):
        assert recorded == pytest.approx(plain, rel=1e-4)


@cuda
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu_no_step_waits_for_the_device(graph: bool) -> None:
    def forbid(trainer: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if trainer.state.batch_index else "default")

    model = nn.Linear(4, 1).cuda()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        nn.functional.mse_loss,
        callbacks=[
            *default_callbacks(),
            beside_a_graph(At("on_train_batch_end", forbid)),
            beside_a_graph(
                At("on_train_epoch_end", lambda trainer: torch.cuda.set_sync_debug_mode("default"), priority=-1000)
            ),
        ],
        cuda_graph=graph,
        batching=BatchOptions(batch_size=4),
        max_epochs=2,
        device="cuda",
    )
    try:
        trainer.fit(regression(48))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.epoch == 2
