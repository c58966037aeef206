"""Profiler: what it writes, when it stops, and that it always does."""

import errno
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.callbacks.unchanged import assert_changes_nothing, assert_survives
from tests.unit.trainer.support import At, interrupt_at, make_trainer, regression, through_file
from trainer import Callback, Trainer
from trainer.callbacks import profiler
from trainer.callbacks.profiler import Profiler


def fit(*callbacks: Callback, epochs: int = 4, **options: Any) -> Trainer:
    """Three steps an epoch."""
    trainer = make_trainer(callbacks, max_epochs=epochs, **options)
    trainer.fit(regression(), regression())
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def files(*steps: int) -> list[str]:
    return sorted(
        name for step in steps for name in (f"operators-step-{step:08d}.txt", f"trace-step-{step:08d}.json")
    )


def events(folder: Path, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"trace-step-{step:08d}.json").read_text())["traceEvents"]
    return found


def steps_in(folder: Path, step: int) -> set[str]:
    return {event["name"] for event in events(folder, step) if event["name"].startswith("ProfilerStep#")}


def assert_nothing_is_profiled() -> None:
    """Raises if a profile were still running."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(1).add(1)
    assert "aten::add" in {event.key for event in profile.key_averages()}


@pytest.fixture(autouse=True)
def _stops() -> Any:
    yield
    assert_nothing_is_profiled()


def test_writes_a_trace_and_a_table_of_the_active_steps(tmp_path: Path) -> None:
    fit(Profiler(tmp_path / "deep" / "profile", wait=2, warmup=1, active=2))
    folder = tmp_path / "deep" / "profile"
    assert names(folder) == files(5)
    assert steps_in(folder, 5) == {"ProfilerStep#3", "ProfilerStep#4"}
    operators = [event["name"] for event in events(folder, 5)]
    assert operators.count("Optimizer.step#SGD.step") == 2
    assert "aten::mse_loss" in (folder / files(5)[0]).read_text()


def test_the_table_begins_with_what_took_longest_itself(tmp_path: Path) -> None:
    fit(Profiler(tmp_path))
    table = (tmp_path / files(5)[0]).read_text()
    first_columns = [re.search(r"([\d.]+)%", line) for line in table.splitlines()]
    shares = [float(found[1]) for found in first_columns if found]
    assert len(shares) > 10
    assert shares == sorted(shares, reverse=True)


def test_each_cycle_has_files_of_its_own(tmp_path: Path) -> None:
    fit(Profiler(tmp_path, wait=1, warmup=1, active=2, repeat=2))
    assert names(tmp_path) == files(4, 8)
    for step in (4, 8):
        assert steps_in(tmp_path, step) == {"ProfilerStep#2", "ProfilerStep#3"}
        assert [event["name"] for event in events(tmp_path, step)].count("Optimizer.step#SGD.step") == 2


def test_after_the_last_cycle_a_step_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[bool] = []
    steps: list[int] = []
    step = torch.profiler.profile.step

    def counted(profile: torch.profiler.profile) -> None:
        steps.append(profile.step_num)
        step(profile)

    monkeypatch.setattr(torch.profiler.profile, "step", counted)
    watch = At(
        "on_train_batch_end", lambda trainer: running.append(torch.autograd._profiler_enabled()), priority=99
    )
    fit(Profiler(tmp_path, wait=0, warmup=1, active=1), watch, epochs=2)
    assert running == [True, False, False, False, False, False]
    assert steps == [0, 1]


def test_every_profile_that_was_started_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("start", "stop"):
        original = getattr(torch.profiler.profile, name)

        def noted(profile: torch.profiler.profile, name: str = name, original: Any = original) -> None:
            calls.append(name)
            original(profile)

        monkeypatch.setattr(torch.profiler.profile, name, noted)
    fit(Profiler(tmp_path, wait=0, warmup=1, active=1, repeat=3))
    assert calls == ["start", "stop"] * 3


def test_a_cycle_that_the_end_cuts_short_has_the_steps_there_were(tmp_path: Path) -> None:
    fit(Profiler(tmp_path, wait=1, warmup=1, active=99), epochs=2)
    assert names(tmp_path) == files(6)
    assert [event["name"] for event in events(tmp_path, 6)].count("Optimizer.step#SGD.step") == 4


def test_an_exception_leaves_the_steps_before_it(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(
            Profiler(tmp_path, active=99),
            At("on_after_backward", fail, lambda trainer: trainer.state.step == 4),
        )
    assert names(tmp_path) == files(4)
    assert_nothing_is_profiled()


@pytest.mark.parametrize(("wait", "warmup"), [(3, 1), (2, 1), (9, 9)])
def test_a_run_that_is_shorter_than_the_schedule_says_that_there_is_nothing(
    wait: int, warmup: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Profiler(tmp_path, wait=wait, warmup=warmup), epochs=1)
    assert names(tmp_path) == []
    assert "nothing was profiled: training ended after step 3" in caplog.text
    assert f"the first {wait + warmup} steps" in caplog.text


def test_a_run_that_was_profiled_says_where_and_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trainer.callbacks.profiler"):
        fit(Profiler(tmp_path))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"3 profiled steps, up to step 5, are in {tmp_path / files(5)[1]}"


def test_steps_are_counted_not_batches(tmp_path: Path) -> None:
    accumulate = At(
        "on_before_zero_grad",
        lambda trainer: trainer.state.skip("optimizer_step"),
        lambda trainer: trainer.state.data_batch != 2,
    )
    fit(Profiler(tmp_path, wait=0, warmup=1, active=2), accumulate)
    assert names(tmp_path) == files(3)
    operators = [event["name"] for event in events(tmp_path, 3)]
    assert operators.count("Optimizer.step#SGD.step") == 2
    assert operators.count("MseLossBackward0") == 2 * 3


def test_a_resumed_fit_is_profiled_anew(tmp_path: Path) -> None:
    stopped = fit(Profiler(tmp_path), interrupt_at(5))
    resumed = make_trainer([Profiler(tmp_path)], max_epochs=4)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    assert names(tmp_path) == files(5, 10)


def test_one_profiler_serves_two_fits(tmp_path: Path) -> None:
    trainer = make_trainer([Profiler(tmp_path, wait=0, active=1, repeat=2), interrupt_at(5)], max_epochs=4)
    for _ in range(2):
        trainer.fit(regression(), regression())
    assert names(tmp_path) == files(2, 4, 7, 9)


def test_validating_alone_profiles_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    running: list[bool] = []
    watch = At("on_validation_batch_end", lambda trainer: running.append(torch.autograd._profiler_enabled()))
    make_trainer([Profiler(tmp_path, wait=0, warmup=1), watch]).validate(regression())
    assert running == [False]
    assert (names(tmp_path), caplog.text) == ([], "")


def test_without_a_warm_up_torch_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="warmup"):
        fit(Profiler(tmp_path, wait=0, warmup=0, active=1))
    assert names(tmp_path) == files(1)


def test_shapes_stacks_and_memory_are_recorded_on_request(tmp_path: Path) -> None:
    fit(Profiler(tmp_path, record_shapes=True, with_stack=True, profile_memory=True))
    table = (tmp_path / files(5)[0]).read_text()
    assert "Input Shapes" in table
    assert "CPU Mem" in table
    found = events(tmp_path, 5)
    assert any("Input Dims" in event.get("args", {}) for event in found)
    assert any(event.get("cat") == "python_function" for event in found)


@pytest.mark.parametrize("where", ["folder", "trace", "torch's own", "operators"])
def test_files_that_cannot_be_written_are_a_warning_and_leave_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(profile: torch.profiler.profile, path: str) -> None:
        Path(f"{path}.tmp" if where == "torch's own" else path).write_text("{")
        if where == "trace":
            raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "profile"
    if where == "folder":
        folder.write_text("")
    elif where == "operators":
        (folder / files(5)[0] / "inside").mkdir(parents=True)
    else:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full_disk)
    trainer = fit(Profiler(folder))
    assert (trainer.state.step, trainer.finished) == (12, True)
    assert "the profile up to step 5 can't be written" in caplog.text
    assert names(tmp_path) == ["profile"]
    if folder.is_dir():
        assert names(folder) == (files(5) if where == "operators" else [])
    assert_nothing_is_profiled()


@pytest.mark.parametrize(
    "options", [{"wait": -1}, {"warmup": -1}, {"active": 0}, {"repeat": 0}, {"active": 1.5}], ids=str
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}: give a whole number of at least"):
        Profiler("folder", **options)


def test_nothing_that_is_learnt_changes(tmp_path: Path) -> None:
    assert_changes_nothing(lambda: Profiler(tmp_path))


def test_survives_any_use(tmp_path: Path) -> None:
    assert_survives(lambda: Profiler(tmp_path))


def test_the_first_steps_may_be_skipped_and_the_first_only(tmp_path: Path) -> None:
    fit(Profiler(tmp_path, skip_first=3, wait=1, warmup=1, active=1, repeat=2, cuda_sync_events=True))
    assert names(tmp_path) == files(6, 9)
    with pytest.raises(ValueError, match="skip_first is -1: give a whole number of at least 0"):
        Profiler(tmp_path, skip_first=-1)


@pytest.mark.parametrize(("ranks", "written"), [((0,), False), ((0, 1), True), (None, True)])
def test_the_processes_that_are_asked_for_write_files_of_their_own(
    ranks: tuple[int, ...] | None, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "rank", lambda: 1)
    fit(Profiler(tmp_path, wait=0, active=1, ranks=ranks))
    expected = ["operators-rank-1-step-00000002.txt", "trace-rank-1-step-00000002.json"]
    assert names(tmp_path) == (expected if written else [])
    with pytest.raises(ValueError, match="rank 'all' is 'all': give a whole number"):
        Profiler(tmp_path, ranks=["all"])
