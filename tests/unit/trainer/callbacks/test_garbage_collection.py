"""GarbageCollection: when the collector runs, and that it is left as it was."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.unit.trainer.callbacks.unchanged import assert_changes_nothing, assert_survives
from tests.unit.trainer.support import At, interrupt_at, make_trainer, regression
from trainer import Callback, Trainer
from trainer.callbacks.garbage_collection import GarbageCollection

pytestmark = pytest.mark.full

IN_TRAINING = ("on_before_forward", "on_after_optimizer_step", "on_train_batch_end")
OUTSIDE = ("on_fit_start", "on_validation_start", "on_epoch_end", "on_test_start")


@pytest.fixture(autouse=True, params=[True, False], ids=["enabled", "disabled"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether automatic collection is on before and, whatever happens, after."""
    before = gc.isenabled()
    gc.freeze()  # what earlier tests have imported is not visited hundreds of times
    (gc.enable if request.param else gc.disable)()
    yield request.param
    after = gc.isenabled()
    (gc.enable if before else gc.disable)()
    assert after is request.param


class Node:
    """Something that only a collection frees: it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def fit(*callbacks: Callback, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, **options)
    trainer.fit(regression(), regression())
    return trainer


def seen(*events: str) -> tuple[list[bool], list[Callback]]:
    """Whether automatic collection was on, at each firing of the events."""
    states: list[bool] = []
    return states, [At(event, lambda trainer, *_: states.append(gc.isenabled()), priority=99) for event in events]


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets ``"young"`` or ``"all"`` at each collection that is asked for."""
    calls: list[Any] = []
    collect = gc.collect

    def noted(generation: int = 2) -> int:
        calls.append("all" if generation == 2 else "young")
        return collect(generation)

    monkeypatch.setattr(gc, "collect", noted)
    return calls


def test_it_is_off_while_batches_are_trained() -> None:
    states, watching = seen(*IN_TRAINING)
    fit(GarbageCollection(), *watching)
    assert states == [False] * 2 * 3 * len(IN_TRAINING)


def test_it_is_as_before_between_epochs(enabled: bool) -> None:
    states, watching = seen(*OUTSIDE)
    trainer = fit(GarbageCollection(), *watching)
    trainer.test(regression())
    assert states == [enabled] * (1 + 2 + 2 + 1)


def test_it_is_off_where_a_fit_goes_on_inside_an_epoch() -> None:
    states, watching = seen(*IN_TRAINING)
    trainer = make_trainer([GarbageCollection(), interrupt_at(2), *watching])
    trainer.fit(regression(), regression())
    trainer.fit(regression(), regression())
    assert states == [False] * 2 * 3 * len(IN_TRAINING)


def test_collections_come_at_fixed_steps_and_at_the_end_of_an_epoch(collections: list[Any]) -> None:
    note = At("on_train_batch_end", lambda trainer: collections.append(trainer.state.step))
    fit(GarbageCollection(every_n_steps=2), note)
    assert collections == [1, "young", 2, 3, "all", "young", 4, 5, "young", 6, "all"]


def test_a_resumed_run_collects_at_the_same_steps(collections: list[Any]) -> None:
    note = At("on_train_batch_end", lambda trainer: collections.append(trainer.state.step))
    trainer = make_trainer([GarbageCollection(every_n_steps=2), note, interrupt_at(1)])
    for _ in range(2):
        trainer.fit(regression(), regression())
    assert collections == [1, "young", 2, 3, "all", "young", 4, 5, "young", 6, "all"]


def test_batches_without_a_step_do_not_collect_twice(collections: list[Any]) -> None:
    skip = At("on_before_optimizer_step", lambda trainer: trainer.state.skip("optimizer_step"))
    fit(GarbageCollection(every_n_steps=1), skip)
    assert collections == ["all", "all"]


def test_cycles_stay_until_the_collection_that_is_due() -> None:
    alive: list[bool] = []
    nodes: list[weakref.ref[Node]] = []
    born = At("on_before_forward", lambda trainer: nodes.append(weakref.ref(Node())))
    look = At("on_train_batch_end", lambda trainer: alive.append(nodes[0]() is not None))
    fit(GarbageCollection(every_n_steps=3), born, look, max_epochs=1)
    assert alive == [True, True, False]
    assert [node() for node in nodes] == [None] * 3


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in a script; what the test run has imported is again afterwards."""
    gc.unfreeze()
    yield
    gc.freeze()


def tracked(node: object) -> bool:
    """Whether a collection looks at it: not at what is frozen."""
    return any(each is node for each in gc.get_objects())


@pytest.mark.usefixtures("thawed")
def test_what_was_there_before_is_collected_once_and_left_out_until_the_end(collections: list[Any]) -> None:
    old, dead, made = Node(), weakref.ref(Node()), []
    found: list[tuple[bool, bool, bool]] = []
    make = At("on_train_epoch_start", lambda trainer: made.append(Node()))
    look = At("on_epoch_end", lambda trainer: found.append((dead() is None, tracked(old), tracked(made[-1]))))
    fit(GarbageCollection(), make, look)
    assert found == [(True, False, True)] * 2
    assert collections == ["all"] * 3
    assert tracked(old)
    assert gc.get_freeze_count() == 0


def test_what_the_process_has_frozen_stays_frozen_alone() -> None:
    count, node = gc.get_freeze_count(), Node()
    found: list[bool] = []
    fit(GarbageCollection(), At("on_epoch_end", lambda trainer: found.append(tracked(node))), max_epochs=1)
    assert found == [True]
    assert count / 2 < gc.get_freeze_count() <= count


class Watching(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Its inputs say whether the process that makes them collects on its own."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(gc.isenabled())), torch.zeros(1)


def test_worker_processes_of_the_data_loading_keep_theirs(enabled: bool) -> None:
    inputs: list[float] = []
    look = At("on_train_batch_start", lambda trainer: inputs.extend(trainer.state.batch[0][:, 0].tolist()))
    trainer = make_trainer([GarbageCollection(), look])
    trainer.fit(DataLoader(Watching(), 4, num_workers=1, multiprocessing_context="fork"))
    assert inputs == [float(enabled)] * 8


@pytest.mark.parametrize("event", ["on_fit_start", "on_before_forward", "on_train_batch_end", "on_epoch_end"])
def test_it_is_as_before_after_an_exception(event: str) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(GarbageCollection(), At(event, fail))


def test_validating_alone_changes_nothing(enabled: bool, collections: list[Any]) -> None:
    states, watching = seen("on_validation_batch_start", "on_test_batch_start")
    trainer = make_trainer([GarbageCollection(), *watching])
    trainer.validate(regression())
    trainer.test(regression())
    assert states == [enabled] * 2
    assert collections == []


def test_validating_alone_after_a_fit_leaves_what_was_set_in_between(enabled: bool) -> None:
    trainer = fit(GarbageCollection())
    (gc.disable if enabled else gc.enable)()
    trainer.validate(regression())
    assert gc.isenabled() is not enabled
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("value", [0, -3, 1.5, "9", None])
def test_intervals_that_make_no_sense_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="every_n_steps is"):
        GarbageCollection(value)


def test_nothing_that_is_learnt_changes() -> None:
    assert_changes_nothing(lambda: GarbageCollection(2))


def test_survives_any_use() -> None:
    assert_survives(GarbageCollection)
