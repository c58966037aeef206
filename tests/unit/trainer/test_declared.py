"""State that a resumed run would forget is refused; so is state that changes after it was saved; and ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.support import Recorder, make_trainer, regression
from trainer import Callback, declared
from trainer.callbacks import Checkpoint, EarlyStopping, GarbageCollection, default_callbacks
from trainer.distributed.ranks import rank
from trainer.runner import CallbackRunner


def change(counter: Any) -> None:
    """Change an attribute of the kind; a hook that calls this shows nothing of it."""
    if counter.kind == "number":
        counter.value += 1
    elif counter.kind == "list":
        counter.value.append(1)
    elif counter.kind == "dict":
        counter.value["inner"].append(1)
    elif counter.kind == "set":
        counter.value.add(len(counter.value))
    elif counter.kind == "tensor":
        counter.value.add_(1)
    elif counter.kind == "object":
        counter.value = object()


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
        change(self)


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


class Assigns(Callback):
    """What hooks do to attributes, in ways that their source shows; the rest only looks."""

    def __init__(self) -> None:
        self.value: Any = []
        self.other: Any = {}
        self.read = 0


class AssignsPlainly(Assigns):
    def on_epoch_end(self, trainer: Any) -> None:
        trainer.value = self.value = self.read


class AssignsAPart(Assigns):
    def on_train_batch_end(self, trainer: Any) -> None:
        self.value[0] += 1


class AssignsAmongOthers(Assigns):
    def on_train_epoch_start(self, trainer: Any) -> None:
        (trainer.value, (self.value, _)) = 1, (2, 3)


class Appends(Assigns):
    def on_validation_end(self, trainer: Any) -> None:
        self.value.append(self.other.get("a"))


class AssignsByAnother(Assigns):
    def on_log_metrics(self, trainer: Any, metrics: Any) -> None:
        self._twice()

    def _twice(self) -> None:
        self._twice()
        del self.value


class ThatOnlyReads(Assigns):
    def __init__(self) -> None:
        super().__init__()
        self.append = []

    @property
    def derived(self) -> int:
        return self.read

    @derived.setter
    def derived(self, value: int) -> None: ...

    def on_fit_start(self, trainer: Any) -> None:
        self.value = 1

    def on_epoch_end(self, trainer: Any) -> None:
        trainer.state.user_state["value"] = self.read
        value = self.value
        self.derived = 2
        value += 1

    def on_fit_end(self, trainer: Any) -> None:
        self.other["here"] = 1


class TestFromTheSource:
    def test_what_was_read_of_classes_is_not_read_again_for_their_callbacks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        declared._sets.cache_clear()
        declared.read_hooks([AssignsByAnother, ThatOnlyReads])
        monkeypatch.setattr(declared.inspect, "getsource", None)
        CallbackRunner([ThatOnlyReads(), Checkpoint(tmp_path)])
        with pytest.raises(ValueError, match="sets `value` in on_log_metrics"):
            CallbackRunner([AssignsByAnother(), Checkpoint(tmp_path)])

    @pytest.mark.parametrize(
        ("kind", "event"),
        [
            (AssignsPlainly, "on_epoch_end"),
            (AssignsAPart, "on_train_batch_end"),
            (AssignsAmongOthers, "on_train_epoch_start"),
            (Appends, "on_validation_end"),
            (AssignsByAnother, "on_log_metrics"),
        ],
    )
    def test_a_hook_that_sets_what_is_not_declared_is_refused_when_it_is_registered(
        self, tmp_path: Path, kind: type[Callback], event: str
    ) -> None:
        message = rf"callback {kind.__name__} sets `value` in {event}, and .*`transient = \('value',\)`"
        runner = CallbackRunner([kind()])
        with pytest.raises(ValueError, match=message):
            runner.add(Checkpoint(tmp_path))
        with pytest.raises(ValueError, match=message):
            make_trainer([kind(), Checkpoint(tmp_path)])

        class Declared(kind):  # type: ignore[misc,valid-type]
            transient = ("value",)

        class Saved(kind):  # type: ignore[misc,valid-type]
            def state_dict(self) -> dict[str, Any]:
                return {"value": 0}

        CallbackRunner([Declared(), Saved(), Checkpoint(tmp_path)])

    def test_what_only_reads_or_sets_where_a_resumed_run_sets_it_again_is_accepted(self, tmp_path: Path) -> None:
        fit(tmp_path, ThatOnlyReads())

    def test_a_class_without_source_is_watched_as_it_trains(self, tmp_path: Path) -> None:
        made: dict[str, Any] = {"Callback": Callback}
        exec(  # a class that is in no file
            "class Made(Callback):\n"
            "    value = 0\n"
            "    def on_epoch_end(self, trainer):\n"
            "        self.value += 1\n",
            made,
        )
        CallbackRunner([made["Made"](), Checkpoint(tmp_path)])
        with pytest.raises(ValueError, match="callback Made changed `value` while training"):
            fit(tmp_path, made["Made"]())


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

    @pytest.mark.parametrize(("processes", "added"), [(1, False), (2, True)])
    def test_processes_that_run_together_collect_garbage_together(
        self, monkeypatch: pytest.MonkeyPatch, processes: int, added: bool
    ) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: processes)
        assert any(isinstance(each, GarbageCollection) for each in default_callbacks()) == added
        monkeypatch.setattr(dist, "is_initialized", lambda: False)
        assert not any(isinstance(each, GarbageCollection) for each in default_callbacks())
