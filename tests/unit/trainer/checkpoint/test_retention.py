"""Which checkpoints stay, as rules, and over whole runs with restarts against a model of them."""

import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.support import one_batch, quick, run_scripted, scripted_trainer
from trainer.callbacks import Checkpoint
from trainer.checkpoint.files import Progress, list_checkpoints
from trainer.checkpoint.manager import load_checkpoint, newest_checkpoint
from trainer.checkpoint.retention import Removal, best_epochs, retained
from trainer.state import best_epoch

pytestmark = pytest.mark.full

#: Few different values, so that there are equals; some that no epoch can be best with.
VALUES = st.sampled_from([0.5, 1.0, 2.0, 3.0, -1.0, 1e300, math.nan, math.inf, -math.inf])
PROGRESS = st.tuples(st.integers(0, 12), st.integers(0, 4)).filter(lambda progress: progress > (0, 0))


def on_disk(folder: Path) -> list[Progress]:
    return [file.progress for file in list_checkpoints([folder])]


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


class TestBest:
    @pytest.mark.parametrize(
        ("values", "mode", "count", "expected"),
        [
            ([3.0, 1.0, 2.0], "min", 2, [2, 3]),
            ([3.0, 1.0, 2.0], "max", 2, [1, 3]),
            ([1.0, 1.0, 1.0], "min", 2, [1, 2]),
            ([1.0, 1.0, 1.0], "max", 2, [1, 2]),
            ([math.nan, math.inf, -math.inf, 4.0], "min", 3, [4]),
            ([math.nan], "max", 1, []),
            ([], "min", 1, []),
        ],
    )
    def test_by_value_then_by_age_and_never_without_a_finite_one(
        self, values: list[float], mode: Any, count: int, expected: list[int]
    ) -> None:
        assert best_epochs([{"m": value} for value in values], "m", mode, count) == expected

    def test_an_epoch_that_was_not_validated_is_not_among_them(self) -> None:
        assert best_epochs([{"m": 2.0}, {}, {"other": 0.0}, {"m": 1.0}], "m", "min", 4) == [4, 1]

    @quick(100)
    @given(values=st.lists(VALUES, max_size=12), mode=st.sampled_from(["min", "max"]))
    def test_the_first_is_the_best_epoch_and_more_only_add_to_fewer(self, values: list[float], mode: Any) -> None:
        history = [{"m": value} for value in values]
        best = best_epoch(history, "m", mode)
        assert best_epochs(history, "m", mode, 1) == ([] if best is None else [best])
        for count in range(1, 6):
            assert best_epochs(history, "m", mode, count) == best_epochs(history, "m", mode, 99)[:count]


class TestRetained:
    def test_the_latest_ends_the_best_the_permanent_and_what_is_inside_the_running_epoch(self) -> None:
        saved = [(1, 0), (2, 0), (2, 3), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3)]
        assert retained(saved, best=[1], keep_last=2, permanent={(2, 3)}) == {
            (1, 0),
            (2, 3),
            (3, 0),
            (4, 0),
            (4, 2),
            (4, 3),
        }

    @pytest.mark.parametrize(
        ("remove", "goes"),
        [
            ("ephemeral_only", {(2, 3), (4, 1)}),
            ("never", set()),
            ("all_non_permanent", {(1, 0), (2, 0), (2, 3), (4, 1)}),
        ],
    )
    def test_what_may_go(self, remove: Removal, goes: set[Progress]) -> None:
        saved = {(1, 0), (1, 2), (2, 0), (2, 3), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3)}
        kept = retained(saved, best=[], keep_last=2, permanent={(1, 2)}, remove=remove)
        assert saved - kept == goes

    def test_numbers_are_numbers(self) -> None:
        saved = [(9, 0), (79, 0), (109, 0), (100_000, 0), (100_000, 9), (100_000, 1_000_000)]
        assert retained(saved, best=[], keep_last=1, permanent=()) == {(100_000, 0), (100_000, 1_000_000)}

    @quick(200)
    @given(
        saved=st.sets(PROGRESS),
        best=st.sets(st.integers(1, 12)),
        permanent=st.sets(PROGRESS),
        keep_last=st.integers(1, 4),
    )
    def test_they_hold_for_any_files(
        self, saved: set[Progress], best: set[int], permanent: set[Progress], keep_last: int
    ) -> None:
        kept = retained(saved, best=best, keep_last=keep_last, permanent=permanent)
        assert kept <= saved
        assert not saved or max(saved) in kept
        assert permanent & saved <= kept
        assert {(epoch, 0) for epoch in best} & saved <= kept
        newer_ends = {end: sum(other > end and not other[1] for other in saved) for end in saved if not end[1]}
        assert all((end in kept) or newer >= keep_last for end, newer in newer_ends.items())
        others = {item for item in kept - permanent if item[1] or item[0] not in best}
        assert len(others) <= 2 * keep_last
        assert retained(kept, best=best, keep_last=keep_last, permanent=permanent) == kept


def expected_ends(
    values: Sequence[float], stops: set[int], mode: Any, every: int, best: int, last: int
) -> set[int]:
    """The model: what is ever written is what is due, what ends a process, and a best that still is one then."""

    def ranked(until: int) -> list[int]:
        finite = [epoch for epoch in range(1, until + 1) if math.isfinite(values[epoch - 1])]
        return sorted(finite, key=lambda epoch: values[epoch - 1] * (1 if mode == "min" else -1))[:best]

    written: list[int] = []
    due = [epoch for epoch in range(1, len(values) + 1) if epoch % every == 0 or epoch in stops | {len(values)}]
    begin = 1
    for end in due:
        written += [epoch for epoch in range(begin, end) if epoch in ranked(end)] + [end]
        begin = end + 1
    return {epoch for epoch in written if epoch in ranked(len(values))} | set(written[-last:])


@quick(50)
@given(
    values=st.lists(VALUES, min_size=1, max_size=12),
    stops=st.sets(st.integers(1, 11), max_size=3),
    mode=st.sampled_from(["min", "max"]),
    every=st.integers(1, 4),
    best=st.integers(1, 4),
    last=st.integers(1, 3),
    background=st.booleans(),
)
def test_what_stays_of_any_history_with_any_restarts(
    tmp_path: Path,
    values: list[float],
    stops: set[int],
    mode: Any,
    every: int,
    best: int,
    last: int,
    background: bool,
) -> None:
    folder = empty(tmp_path / "run")
    stops = {stop for stop in stops if stop < len(values)}
    begin = 0
    for end in [*sorted(stops), len(values)]:
        checkpoint = Checkpoint(
            folder,
            mode=mode,
            every_n_epochs=every,
            keep_last=last,
            keep_best=best,
            max_overhead=1,
            background=background,
        )
        # A thread's write is waited for by the next save, which costs: nothing may be left out here for that.
        checkpoint._affordable = lambda: True
        trainer = scripted_trainer([checkpoint], values[begin:end], max_epochs=end)
        if begin:
            trainer.load_state_dict(newest_checkpoint([folder])[1])
        trainer.fit(one_batch(), one_batch())
        begin = end
    assert {epoch for epoch, _ in on_disk(folder)} == expected_ends(values, stops, mode, every, best, last)
    assert not any(batch for _, batch in on_disk(folder))


class TestRestarts:
    def test_new_rules_hold_for_old_files(self, tmp_path: Path) -> None:
        run_scripted(
            [Checkpoint(tmp_path, keep_best=3, keep_last=3, max_overhead=1)], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        )
        assert on_disk(tmp_path) == [(epoch, 0) for epoch in (1, 2, 3, 4, 5, 6)]
        resumed = scripted_trainer([Checkpoint(tmp_path, keep_last=1, max_overhead=1)], [7.0], max_epochs=7)
        resumed.load_state_dict(newest_checkpoint([tmp_path])[1])
        resumed.fit(one_batch(), one_batch())
        assert on_disk(tmp_path) == [(1, 0), (7, 0)]

    def test_a_run_that_goes_back_replaces_later_files(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run_scripted([Checkpoint(tmp_path, keep_last=9, max_overhead=1)], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
        back = scripted_trainer([Checkpoint(tmp_path, keep_last=9, max_overhead=1)], [9.0, 9.0], max_epochs=4)
        back.load_state_dict(_epoch(tmp_path, 2))
        with caplog.at_level(logging.WARNING):
            back.fit(one_batch(), one_batch())
        assert "4 checkpoints after epoch 2" in caplog.text
        assert on_disk(tmp_path) == [(1, 0), (2, 0), (3, 0), (4, 0)]
        assert [item["val_loss"] for item in _epoch(tmp_path, 4)["state"]["history"]] == [6.0, 5.0, 9.0, 9.0]

    def test_it_removes_nothing_before_its_first_write(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path, keep_last=9, max_overhead=1)], [3.0, 2.0, 1.0])
        back = scripted_trainer([Checkpoint(tmp_path, keep_last=9, max_overhead=1)], [], max_epochs=1)
        back.load_state_dict(_epoch(tmp_path, 1))
        back.fit(one_batch(), one_batch())
        assert on_disk(tmp_path) == [(1, 0), (2, 0), (3, 0)]

    def test_a_run_that_starts_anew_in_an_old_folder_is_never_taken_for_the_old_one(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path, max_overhead=1)], [1.0] * 109)
        run_scripted([Checkpoint(tmp_path, max_overhead=1)], [9.0])
        assert on_disk(tmp_path) == [(1, 0)]
        assert newest_checkpoint([tmp_path])[1]["state"]["history"][0]["val_loss"] == 9.0

    def test_a_damaged_newest_file_neither_stays_nor_shields_others(self, tmp_path: Path) -> None:
        run_scripted([Checkpoint(tmp_path, max_overhead=1)], [3.0, 2.0, 1.0])
        (tmp_path / "epoch-00099-batch-000007.pt").write_bytes(b"half a checkpoint")
        resumed = scripted_trainer([Checkpoint(tmp_path, max_overhead=1)], [0.5], max_epochs=4)
        resumed.load_state_dict(newest_checkpoint([tmp_path])[1])
        resumed.fit(one_batch(), one_batch())
        assert on_disk(tmp_path) == [(3, 0), (4, 0)]


def _epoch(folder: Path, epoch: int) -> dict[str, Any]:
    return load_checkpoint(folder / f"epoch-{epoch:05d}.pt")
