"""TensorBoardLogging, read back with TensorBoard's own reader."""

import errno
import logging
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServersAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.get_experiment import Handler as GetExperiment
from tensorboard.plugins.hparams.list_session_groups import Handler as ListSessionGroups
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    one_batch,
    regression,
    run_scripted,
    scripted_trainer,
    through_file,
)
from trainer.callbacks import tensorboard_logging
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.tensorboard_logging import TensorBoardLogging
from trainer.data.plan import Plan

Series = dict[str, list[tuple[int, float]]]


def accumulator(folder: Path) -> Any:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0})


def shown(folder: Path, reader: Any = None) -> Series:
    """What a TensorBoard shows that starts now, or has looked on with ``reader``."""
    reader = reader or accumulator(folder)
    reader.Reload()
    found = {
        name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]
    }
    return {name: points for name, points in found.items() if points}


def single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def expected(history: list[dict[str, float]]) -> Series:
    series: Series = {}
    for epoch, metrics in enumerate(history, start=1):
        for name, value in metrics.items():
            series.setdefault(name, []).append((epoch, single(value)))
    return series


def checkpoint_of(epoch: int, into: list[Any]) -> At:
    return At(
        "on_epoch_end",
        lambda trainer: into.append(through_file(trainer.state_dict())),
        lambda trainer: trainer.state.epoch == epoch,
        priority=99,
    )


def resumed(callbacks: list[Any], checkpoint: Any, val: list[float], max_epochs: int) -> Any:
    trainer = scripted_trainer(callbacks, val, max_epochs=max_epochs)
    trainer.load_state_dict(checkpoint)
    trainer.fit(one_batch(), one_batch())
    return trainer


def test_one_scalar_per_metric_and_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    trainer = make_trainer([TensorBoardLogging(folder)], max_epochs=3)
    state = trainer.fit(regression(), regression())
    assert shown(folder) == expected(state.history)
    assert {"train_loss", "val_loss", "lr"} <= shown(folder).keys()


def test_each_epoch_is_on_the_disk_when_it_ends(tmp_path: Path) -> None:
    lengths: list[int] = []
    watch = At("on_epoch_end", lambda trainer: lengths.append(len(shown(tmp_path)["val_loss"])), priority=99)
    run_scripted([TensorBoardLogging(tmp_path), watch], [3.0, 2.0, 1.0])
    assert lengths == [1, 2, 3]


def test_numbers_that_are_not_finite_or_too_large_are_shown(tmp_path: Path) -> None:
    run_scripted([TensorBoardLogging(tmp_path)], [math.nan, math.inf, -math.inf, 1e300, 1.0])
    values = [value for _, value in shown(tmp_path)["val_loss"]]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, math.inf, 1.0]


def test_a_resumed_run_forgets_the_epochs_after_its_checkpoint(tmp_path: Path) -> None:
    kept: list[Any] = []
    late = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(late=1.0), lambda t: t.state.epoch == 4)
    run_scripted([TensorBoardLogging(tmp_path), checkpoint_of(2, kept), late], [5.0, 4.0, 3.0, 2.0])
    trainer = resumed([TensorBoardLogging(tmp_path)], kept[0], [7.0], max_epochs=3)
    assert shown(tmp_path) == expected(trainer.state.history)
    assert shown(tmp_path)["val_loss"] == [(1, 5.0), (2, 4.0), (3, 7.0)]


def test_a_resumed_run_that_trains_no_further_forgets_them_too(tmp_path: Path) -> None:
    kept: list[Any] = []
    run_scripted([TensorBoardLogging(tmp_path), checkpoint_of(2, kept)], [5.0, 4.0, 3.0])
    resumed([TensorBoardLogging(tmp_path)], kept[0], [], max_epochs=2)
    assert shown(tmp_path)["val_loss"] == [(1, 5.0), (2, 4.0)]


def shown_by_server(folder: Path, reader: Any) -> list[tuple[int, float]]:
    """The validation losses that TensorBoard's own server holds."""
    reader.Reload()
    return [(event.step, float(event.tensor_proto.float_val[0])) for event in reader.Tensors("val_loss")]


def make_older(folder: Path, second: int) -> None:
    """TensorBoard reads files in the order of their names, which begin with the second they were made in."""
    for file in folder.iterdir():
        if int(file.name.split(".")[3]) > second:
            file.rename(folder / f"events.out.tfevents.{second}.{file.name.split('.', maxsplit=4)[4]}")


def test_a_tensorboard_that_looks_on_forgets_them_too(tmp_path: Path) -> None:
    kept: list[Any] = []
    run_scripted([TensorBoardLogging(tmp_path), checkpoint_of(1, kept)], [5.0, 4.0, 3.0])
    make_older(tmp_path, 1_000_000_000)
    reader, server = accumulator(tmp_path), ServersAccumulator(str(tmp_path))
    assert shown(tmp_path, reader)["val_loss"] == [(1, 5.0), (2, 4.0), (3, 3.0)]
    assert shown_by_server(tmp_path, server) == [(1, 5.0), (2, 4.0), (3, 3.0)]
    for second, value in enumerate([7.0, 8.0], start=1_000_000_001):
        resumed([TensorBoardLogging(tmp_path)], kept[0], [value], max_epochs=2)
        make_older(tmp_path, second)
        assert shown(tmp_path, reader)["val_loss"] == [(1, 5.0), (2, value)]
        assert shown_by_server(tmp_path, server) == [(1, 5.0), (2, value)]


def test_what_the_folder_lacks_of_the_history_is_written(tmp_path: Path) -> None:
    before = run_scripted([], [3.0, 2.0])
    trainer = resumed([TensorBoardLogging(tmp_path)], through_file(before.state_dict()), [1.0], max_epochs=3)
    assert shown(tmp_path) == expected(trainer.state.history)


def test_epochs_keep_the_time_that_they_were_logged_at(tmp_path: Path) -> None:
    def times() -> list[float]:
        reader = accumulator(tmp_path)
        reader.Reload()
        return [event.wall_time for event in reader.Scalars("val_loss")]

    kept: list[Any] = []
    run_scripted([TensorBoardLogging(tmp_path), checkpoint_of(2, kept)], [3.0, 2.0, 1.0])
    before = times()
    resumed([TensorBoardLogging(tmp_path)], kept[0], [7.0], max_epochs=3)
    assert times()[:2] == before[:2]
    assert times()[2] > before[2]


def test_many_fits_in_one_second_are_in_order_and_leave_one_file_and_an_empty_one(tmp_path: Path) -> None:
    trainer = make_trainer([TensorBoardLogging(tmp_path)], max_epochs=1)
    for epochs in range(1, 13):
        trainer.plan = Plan(max_epochs=epochs)
        trainer.fit(regression(), regression())
    assert shown(tmp_path) == expected(trainer.state.history)
    assert sorted(file.stat().st_size > 0 for file in tmp_path.iterdir()) == [False, True]


def test_a_file_that_a_crash_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    kept: list[Any] = []
    run_scripted([TensorBoardLogging(tmp_path), checkpoint_of(1, kept)], [3.0, 2.0])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    trainer = resumed([TensorBoardLogging(tmp_path)], kept[0], [7.0], max_epochs=2)
    assert shown(tmp_path) == expected(trainer.state.history)


def test_event_files_of_others_are_left_alone(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("theirs", 1.0, 0)
    (theirs,) = tmp_path.iterdir()
    for _ in range(2):
        run_scripted([TensorBoardLogging(tmp_path)], [3.0])
    assert theirs in tmp_path.iterdir()
    assert shown(tmp_path)["theirs"] == [(0, 1.0)]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_an_interrupted_run_shows_the_same_and_has_the_same_weights(stop: int, tmp_path: Path) -> None:
    def trainer(folder: str, *others: Any) -> Any:
        checkpoint = Checkpoint(tmp_path / "checkpoints")
        return make_trainer([TensorBoardLogging(tmp_path / folder), checkpoint, *others], max_epochs=2)

    whole, first, second = trainer("whole"), trainer("parts", interrupt_at(stop)), trainer("parts")
    whole.fit(regression(), regression())
    first.fit(regression(), regression())
    second.load_state_dict(through_file(first.state_dict()))
    second.fit(regression(), regression())
    assert_same(frozen(second), frozen(whole))
    assert shown(tmp_path / "parts") == shown(tmp_path / "whole")


def test_construction_touches_nothing_and_neither_does_a_test_alone(tmp_path: Path) -> None:
    callback = TensorBoardLogging(tmp_path / "run")
    trainer = make_trainer([callback])
    trainer.test(regression())
    callback.teardown(trainer)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_raises_keeps_its_epochs_and_closes_its_file(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    callback = TensorBoardLogging(tmp_path)
    failing = At("on_epoch_end", fail, lambda trainer: trainer.state.epoch == 2, priority=90)
    with pytest.raises(ZeroDivisionError):
        run_scripted([callback, failing], [3.0, 2.0, 1.0])
    assert shown(tmp_path)["val_loss"] == [(1, 3.0), (2, 2.0)]
    callback.teardown(make_trainer())


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'hpo-service\[tensorboard\]'"):
        run_scripted([TensorBoardLogging(tmp_path)], [1.0])


def test_a_folder_that_can_not_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run_scripted([TensorBoardLogging(tmp_path / "file" / "run")], [1.0])


@pytest.mark.parametrize("where", ["write", "flush"])
# The thread that writes dies of it, which Python reports.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_said_once_training_goes_on_and_the_next_fit_writes_all(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full: list[bool] = []
    real = getattr(RecordWriter, where)

    def refuse(writer: Any, *arguments: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(writer, *arguments)

    monkeypatch.setattr(RecordWriter, where, refuse)
    fill = At("on_epoch_end", lambda trainer: full.append(True), lambda trainer: trainer.state.epoch == 2)
    callback = TensorBoardLogging(tmp_path)
    with caplog.at_level(logging.WARNING):
        trainer = run_scripted([callback, fill], [3.0, 2.0, 1.0])
    assert trainer.state.epoch == 3
    (record,) = caplog.records
    assert record.message.startswith(f"TensorBoard gets nothing more of this run, {tmp_path} can't be written")
    assert "No space left on device" in record.message
    full.clear()
    trainer.fit(one_batch(), one_batch())
    assert shown(tmp_path) == expected(trainer.state.history)


def test_after_a_full_disk_nothing_holds_the_error_that_ended_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(writer: Any, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def end(trainer: Any) -> None:
        raise ValueError("ended")

    callback = TensorBoardLogging(tmp_path)
    fill = At(
        "on_train_epoch_start", lambda trainer: monkeypatch.setattr(tensorboard_logging, "_add_scalars", refuse)
    )
    with pytest.raises(ValueError, match="ended"):
        run_scripted([callback, fill, At("on_epoch_end", end, priority=99)], [2.0])
    assert callback._error is None


def hparams_tab(folder: Path) -> tuple[Any, list[Any]]:
    """What the backend of TensorBoard's HParams tab answers: the experiment, and its session groups."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    backend, request_context = Context(TBContext(data_provider=provider)), RequestContext()
    asked_experiment = api_pb2.GetExperimentRequest()
    experiment = GetExperiment(request_context, backend, "", asked_experiment).run()
    columns = [api_pb2.ColParams(hparam=info.name, include_in_result=True) for info in experiment.hparam_infos]
    columns += [api_pb2.ColParams(metric=info.name, include_in_result=True) for info in experiment.metric_infos]
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        col_params=columns,
        allowed_statuses=[
            api_pb2.STATUS_UNKNOWN,
            api_pb2.STATUS_SUCCESS,
            api_pb2.STATUS_FAILURE,
            api_pb2.STATUS_RUNNING,
        ],
    )
    answer = ListSessionGroups(request_context, backend, "", request).run()
    return experiment, list(answer.session_groups)


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("kind"))


def metric_of(group: Any, name: str) -> float:
    (found,) = [value.value for value in group.metric_values if value.name.tag == name]
    return float(found)


def status_of(folder: Path) -> Any:
    """The status of the only session."""
    (group,) = hparams_tab(folder)[1]
    (session,) = group.sessions
    return session.status


def test_the_hparams_tab_shows_each_run_with_its_parameters_and_latest_metrics(tmp_path: Path) -> None:
    params = [
        {"optimizer.lr": 0.1, "model.hidden": 8, "model.bias": True, "optimizer": "SGD", "path": None},
        {"optimizer.lr": 0.2, "model.hidden": 16, "model.bias": False, "optimizer": "Adam", "path": [1, 2]},
    ]
    for number, values in enumerate(params):
        callback = TensorBoardLogging(tmp_path / str(number) / "tensorboard", values)
        run_scripted([callback], [3.0, 2.0 + number])
    experiment, groups = hparams_tab(tmp_path)
    assert {info.name for info in experiment.hparam_infos} == params[0].keys()
    assert {"val_loss", "train_loss", "lr"} <= {info.name.tag for info in experiment.metric_infos}
    assert len(groups) == 2
    groups.sort(key=lambda group: value_of(group.hparams["optimizer.lr"]))
    for number, group in enumerate(groups):
        shown = {name: value_of(value) for name, value in group.hparams.items()}
        assert shown == {name: str(value) if name == "path" else value for name, value in params[number].items()}
        assert metric_of(group, "val_loss") == 2.0 + number
        (session,) = group.sessions
        assert session.status == api_pb2.STATUS_SUCCESS
        assert session.end_time_secs >= session.start_time_secs > 0


def test_a_resumed_run_stays_one_session_with_its_first_start(tmp_path: Path) -> None:
    kept: list[Any] = []
    hparams, run = {"lr": 0.1}, tmp_path / "0"
    callbacks = [TensorBoardLogging(run, hparams), checkpoint_of(2, kept), interrupt_at(3, now=False)]
    run_scripted(callbacks, [5.0, 4.0, 3.0], max_epochs=4)
    assert status_of(tmp_path) == api_pb2.STATUS_UNKNOWN  # it may resume
    started = hparams_tab(tmp_path)[1][0].sessions[0].start_time_secs
    resumed([TensorBoardLogging(run, hparams)], kept[0], [3.0, 2.0], max_epochs=4)
    (group,) = hparams_tab(tmp_path)[1]
    (session,) = group.sessions
    assert (session.start_time_secs, session.status) == (started, api_pb2.STATUS_SUCCESS)
    assert metric_of(group, "val_loss") == 2.0
    assert shown(run)["val_loss"] == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]


@pytest.mark.parametrize(("reason", "status"), [("pruned", api_pb2.STATUS_SUCCESS), ("", api_pb2.STATUS_FAILURE)])
def test_a_run_that_raised_is_a_failure_unless_it_was_pruned(reason: str, status: Any, tmp_path: Path) -> None:
    def end(trainer: Any) -> None:
        if reason:
            trainer.state.stop(reason)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_scripted([TensorBoardLogging(tmp_path, {"lr": 0.1}), At("on_epoch_end", end, priority=85)], [3.0])
    assert status_of(tmp_path) == status


def test_without_parameters_there_is_no_session(tmp_path: Path) -> None:
    run_scripted([TensorBoardLogging(tmp_path)], [3.0])
    assert hparams_tab(tmp_path)[1] == []
