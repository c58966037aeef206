"""JSONLogging: strict JSON Lines that equal the history; what it shares with CSV is in test_sinks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.support import (
    At,
    make_trainer,
    one_batch,
    quick,
    regression,
    run_scripted,
    scripted_trainer,
    through_file,
)
from trainer.callbacks.json_logging import JSONLogging
from trainer.files import json_number


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def test_holds_the_history_to_the_last_digit(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    trainer = make_trainer([JSONLogging(path)], max_epochs=3)
    state = trainer.fit(regression(), regression())
    records = lines(path)
    assert [next(iter(record)) for record in records] == ["epoch"] * 3
    assert [record.pop("epoch") for record in records] == [1, 2, 3]
    assert records == state.history


def test_is_written_epoch_by_epoch(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lengths: list[int] = []
    watch = At("on_epoch_end", lambda trainer: lengths.append(len(lines(path))), priority=99)
    run_scripted([JSONLogging(path), watch], [3.0, 2.0, 1.0])
    assert lengths == [1, 2, 3]


def test_a_resumed_run_cuts_the_file_to_its_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    early: list[dict[str, Any]] = []
    keep = At(
        "on_epoch_end",
        lambda trainer: early.append(through_file(trainer.state_dict())),
        lambda trainer: trainer.state.epoch == 1,
        priority=99,
    )
    run_scripted([JSONLogging(path), keep], [3.0, 2.0, 1.0])
    with path.open("a") as file:
        file.write('{"epoch": 4, "train')  # a line that a crash cut off
    after = scripted_trainer([JSONLogging(path)], [7.0], max_epochs=2)
    after.load_state_dict(early[0])
    after.fit(one_batch(), one_batch())
    assert [(record["epoch"], record["val_loss"]) for record in lines(path)] == [(1, 3.0), (2, 7.0)]


def test_numbers_that_are_not_finite_are_strings_in_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_scripted([JSONLogging(path)], [math.nan, math.inf, -math.inf, 1.0])
    assert [record["val_loss"] for record in lines(path)] == ["NaN", "Infinity", "-Infinity", 1.0]


def test_metrics_may_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sometimes = At("on_epoch_end", lambda t: t.state.metrics.update(extra=5.0), lambda t: t.state.epoch == 2)
    run_scripted([JSONLogging(path), sometimes], [3.0, 2.0, 1.0])
    assert ["extra" in record for record in lines(path)] == [False, True, False]


def test_a_run_without_epochs_leaves_an_empty_file(tmp_path: Path) -> None:
    run_scripted([JSONLogging(tmp_path / "metrics.jsonl")], [], max_epochs=0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_construction_touches_nothing_and_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    callback = JSONLogging(tmp_path / "metrics.jsonl")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        run_scripted([callback], [1.0])
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


@quick(50)
@given(value=st.floats())
def test_any_number_comes_back_from_its_json(value: float) -> None:
    back = float(strict(json.dumps(json_number(value), allow_nan=False)))
    assert back == value or (math.isnan(back) and math.isnan(value))


@quick(30)
@given(name=st.text(min_size=1), value=st.floats())
def test_any_name_and_number_come_back_from_the_file(tmp_path_factory: Any, name: str, value: float) -> None:
    if name == "epoch":
        return
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    add = At("on_epoch_end", lambda trainer: trainer.state.metrics.update({name: value}))
    run_scripted([JSONLogging(path), add], [1.0])
    (record,) = (strict(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
    assert record[name] == value or str(json_number(value)) == record[name]
