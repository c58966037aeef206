"""Batch sizes that a hook changes: a run that resumes at any batch has the samples of one that went through."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import default_collate

from tests.unit.trainer.support import At, assert_same, frozen, make_trainer, quick, regression, through_file
from trainer import BatchOptions, Callback, Trainer

pytestmark = pytest.mark.full

SAMPLES = 14
EPOCHS = 2
IN_MEMORY: dict[str, Any] = {}
LOADED: dict[str, Any] = {"collate_fn": default_collate}
#: At each event by how many batches a trainer has behind it: a size, and whether it holds at once.
Changes = Mapping[str, Mapping[int, tuple[int, bool]]]


class Sizes(Callback):
    """Changes sizes by hand, counting what it has seen of the run; its count is its only state."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.batches = 0

    def on_train_epoch_start(self, trainer: Any) -> None:
        self._change("start", trainer)

    def on_train_batch_end(self, trainer: Any) -> None:
        self.batches += 1
        self._change("batch", trainer)

    def on_epoch_end(self, trainer: Any) -> None:
        self._change("end", trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]

    def _change(self, event: str, trainer: Any) -> None:
        count = self.batches if event == "batch" else trainer.state.epoch
        if count in self.changes.get(event, {}):
            size, now = self.changes[event][count]
            trainer.set_batch_size(size, now=now)


def run(
    seen: list[list[float]],
    changes: Changes,
    options: Mapping[str, Any],
    stop: int | None = None,
    checkpoint: dict[str, Any] | None = None,
    **plan: Any,
) -> Trainer:
    """A run that writes down its samples, from its beginning or a checkpoint, to its end or a batch."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.4), nn.Linear(3, 1))
    sizes = Sizes(changes)
    look = At("on_before_forward", lambda trainer: seen.append(trainer.state.batch[1].flatten().tolist()))
    leave = At(
        "on_train_batch_end",
        lambda trainer: trainer.state.stop("interrupted", now=True),
        lambda trainer: sizes.batches == stop,
    )
    batching = BatchOptions(batch_size=4, **options)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for layer in (model[0], model[2]):
            layer.reset_parameters()  # type: ignore[operator]
    trainer = make_trainer([sizes, look, leave], model=model, batching=batching, max_epochs=EPOCHS, **plan)
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(SAMPLES), regression(5, seed=8))
    return trainer


def assert_resumes_anywhere(changes: Changes, options: Mapping[str, Any], **plan: Any) -> None:
    whole: list[list[float]] = []
    expected = frozen(run(whole, changes, options, **plan))
    for batch in range(1, len(whole) + 1):
        seen: list[list[float]] = []
        stopped = run(seen, changes, options, batch, **plan)
        assert len(seen) == batch
        resumed = run(seen, changes, options, checkpoint=through_file(stopped.state_dict()), **plan)
        assert seen == whole
        assert_same(frozen(resumed), expected)
        assert resumed.batching.batch_size == (resumed.state.batch_size or 4)


sizes = st.integers(1, 7)
inside = st.dictionaries(st.integers(1, 12), st.tuples(sizes, st.just(True)), max_size=3)
at_start = st.dictionaries(st.integers(0, EPOCHS), st.tuples(sizes, st.booleans()), max_size=2)
at_end = st.dictionaries(st.integers(1, EPOCHS), st.tuples(sizes, st.booleans()), max_size=2)


@quick(8)
@given(
    changes=st.fixed_dictionaries({"batch": inside, "start": at_start, "end": at_end}),
    options=st.sampled_from([IN_MEMORY, LOADED, {"drop_last": False, "shuffle": False}]),
)
def test_a_run_whose_size_changed_anywhere_resumes_at_any_batch(changes: Changes, options: Any) -> None:
    assert_resumes_anywhere(changes, options)


@pytest.mark.parametrize("options", [IN_MEMORY, LOADED], ids=["memory", "loader"])
@pytest.mark.parametrize("batch", range(1, 5))
def test_each_batch_of_a_pass_may_change_the_size(batch: int, options: Any) -> None:
    assert_resumes_anywhere({"batch": {batch: (3, True), batch + 1: (2, True)}}, options)


def test_a_change_after_the_last_step_is_one_state_wherever_the_run_stopped() -> None:
    assert_resumes_anywhere({"batch": {3: (5, True)}}, IN_MEMORY, max_steps=3)


def test_a_size_for_the_next_pass_leaves_the_running_one_its_own() -> None:
    seen: list[list[float]] = []
    changes = {"start": {0: (6, False)}}
    run(seen, changes, IN_MEMORY)
    assert [len(batch) for batch in seen] == [4, 4, 4, 2, 6, 6, 2]
    assert_resumes_anywhere(changes, IN_MEMORY)


def test_the_run_is_planned_anew_where_a_pass_of_another_size_begins_inside_an_epoch() -> None:
    steps: list[int | None] = []
    look = At("on_train_batch_start", lambda trainer: steps.append(trainer.state.total_steps))
    ask = At("on_train_batch_end", lambda t: t.set_batch_size(2, now=True), lambda t: t.state.step == 3)
    make_trainer([look, ask], model=nn.Linear(4, 1), max_epochs=EPOCHS, validate_every=3).fit(regression(SAMPLES))
    assert steps == [8] * 4 + [4 + 7] * 7


def test_epochs_of_a_few_steps_change_sizes_too() -> None:
    assert_resumes_anywhere(
        {"batch": {3: (3, True), 5: (5, True)}, "start": {2: (2, True)}}, IN_MEMORY, validate_every=2
    )


@pytest.mark.parametrize("now", [True, False])
def test_a_size_set_where_a_run_resumes_loses_no_sample(now: bool) -> None:
    """With ``now`` the rest of the pass has it, else the next pass."""
    seen: list[list[float]] = []
    stopped = run(seen, {}, IN_MEMORY, 2)
    again = make_trainer(
        [
            At("on_before_forward", lambda trainer: seen.append(trainer.state.batch[1].flatten().tolist())),
            At("on_fit_start", lambda trainer: trainer.set_batch_size(3, now=now)),
        ],
        model=stopped.model,
        max_epochs=EPOCHS,
    )
    again.load_state_dict(through_file(stopped.state_dict()))
    again.fit(regression(SAMPLES))
    first = [4, 4, 3, 3] if now else [4, 4, 4, 2]
    assert [len(batch) for batch in seen] == [*first, 3, 3, 3, 3, 2]
    assert sorted(chain.from_iterable(seen[:4])) == sorted(regression(SAMPLES).tensors[1].flatten().tolist())


def test_a_checkpoint_without_sizes_resumes_with_what_a_hook_sets() -> None:
    """Up to version 7 they were not saved, and the size that held had to be set at the start."""
    changes: Changes = {"batch": {1: (3, True)}}
    whole: list[list[float]] = []
    run(whole, changes, IN_MEMORY)
    for now in (True, False):
        seen: list[list[float]] = []
        checkpoint = through_file(run(seen, changes, IN_MEMORY, 3).state_dict()) | {"version": 7}
        for name in ("batch_size", "pass_batch_size"):
            checkpoint["state"].pop(name)
        again = make_trainer(
            [
                At("on_before_forward", lambda t, seen=seen: seen.append(t.state.batch[1].flatten().tolist())),
                At("on_fit_start", lambda trainer, now=now: trainer.set_batch_size(3, now=now)),
            ],
            model=nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.4), nn.Linear(3, 1)),
            max_epochs=EPOCHS,
        )
        checkpoint["callbacks"] = {}
        again.load_state_dict(checkpoint)
        again.fit(regression(SAMPLES))
        assert seen == whole
