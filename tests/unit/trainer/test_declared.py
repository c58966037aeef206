"""State that a resumed run would forget is refused; so is state that changes after it was saved; and ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.support import Recorder, make_trainer, regression
from trainer import Callback
from trainer.callbacks import Checkpoint, EarlyStopping, default_callbacks
from trainer.distributed.ranks import rank
from trainer.runner import CallbackRunner


class Counter(Callback):
    """Changes an attribute of each kind that is looked into."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.value: Any = {
            "number": 0,
            "list": [],
            "dict": {"inner": []},
            "set": set(),
            "tensor": torch.zeros(()),
            "object": object(),
            "nothing": None,
        }[kind]

    def on_train_batch_end(self, trainer: Any) -> None:
        if self.kind == "number":
            self.value += 1
        elif self.kind == "list":
            self.value.append(1)
        elif self.kind == "dict":
            self.value["inner"].append(1)
        elif self.kind == "set":
            self.value.add(len(self.value))
        elif self.kind == "tensor":
            self.value.add_(1)
        elif self.kind == "object":
            self.value = object()


KINDS = ["number", "list", "dict", "set", "tensor", "object"]


def fit(folder: Path, *callbacks: Callback) -> None:
    make_trainer([*callbacks, Checkpoint(folder)]).fit(regression(8), regression(4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_that_is_neither_saved_nor_transient_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=r"callback Counter changed `value`.*`transient = \('value',\)`"):
        fit(tmp_path, Counter(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_declared_transient_may_change(tmp_path: Path, kind: str) -> None:
    class Declared(Counter):
        transient = ("value",)

    fit(tmp_path, Declared(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_may_change(tmp_path: Path, kind: str) -> None:
    class Saved(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"kind": self.kind}

    fit(tmp_path, Saved(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_without_checkpoints_nothing_is_asked(kind: str) -> None:
    make_trainer([Counter(kind)]).fit(regression(8))


def test_what_does_not_change_and_what_a_fits_start_sets_need_no_word(tmp_path: Path) -> None:
    class SetUp(Callback):
        def __init__(self) -> None:
            self.file: Any = None

        def on_fit_start(self, trainer: Any) -> None:
            self.file = object()

    fit(tmp_path, Counter("nothing"), SetUp())


def test_the_shipped_callbacks_declare_theirs(tmp_path: Path) -> None:
    fit(tmp_path, *default_callbacks(), EarlyStopping())


class Stateful(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"here": True}


class ActsAtEpochEnd(Stateful):
    def on_epoch_end(self, trainer: Any) -> None: ...


class ActsAtBatchEnd(Stateful):
    def on_train_batch_end(self, trainer: Any) -> None: ...


class TestSavedLast:
    @pytest.mark.parametrize(
        ("kind", "event"), [(ActsAtEpochEnd, "on_epoch_end"), (ActsAtBatchEnd, "on_train_batch_end")]
    )
    @pytest.mark.parametrize("priority", [95, 96])
    def test_state_that_changes_after_the_checkpoint_is_refused(
        self, tmp_path: Path, priority: int, kind: type[Callback], event: str
    ) -> None:
        late = kind()
        late.priority = priority
        message = rf"{kind.__name__} \(priority {priority}\) has state.*{event} after Checkpoint.*below 95"
        with pytest.raises(ValueError, match=message):
            CallbackRunner([Checkpoint(tmp_path), late])

    def test_before_it_or_in_other_events_it_is_accepted(self, tmp_path: Path) -> None:
        late = Stateful()
        late.priority = 99
        early = ActsAtEpochEnd()
        early.priority = 94
        CallbackRunner([Checkpoint(tmp_path), late, early])

    def test_without_a_checkpoint_the_place_does_not_matter(self) -> None:
        late = ActsAtEpochEnd()
        late.priority = 99
        CallbackRunner([late])


class OnRankZero(Recorder):
    rank_zero_only = True


class TestRanks:
    def test_alone_the_rank_is_zero(self) -> None:
        assert rank() == 0

    @pytest.mark.parametrize(("own", "heard"), [(0, True), (1, False)])
    def test_rank_zero_callbacks_are_not_heard_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch, own: int, heard: bool
    ) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: own)
        everywhere: list[str] = []
        log: list[str] = []
        runner = CallbackRunner([OnRankZero(log), Recorder(everywhere)])
        assert len(runner.list_callbacks("on_epoch_end")) == 1 + heard
        for hook in runner.resolve()["on_epoch_end"]:
            hook(None)
        assert (bool(log), bool(everywhere)) == (heard, True)
