"""MetricSaver: which files it writes, and what they hold."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.support import At, interrupt_at, make_trainer, regression, through_file
from trainer.callbacks import MetricSaver, StepMetrics


def files(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def test_files_for_chosen_steps_and_the_end_hold_what_was_chosen(tmp_path: Path) -> None:
    saver = MetricSaver(tmp_path / "json", ["*_loss"], every_n_steps=4, at_steps=[3])
    bad = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(bad_loss=math.nan))
    trainer = make_trainer([saver, bad, StepMetrics(tmp_path / "steps", transfer_every_n_steps=2)], max_epochs=3)
    state = trainer.fit(regression(), regression())
    steps = {record: float(value) for record, value in _losses(tmp_path / "steps" / "steps.csv").items()}
    first, last = state.history[0], state.history[-1]
    assert files(tmp_path / "json") == {
        "metrics-step-00000003.json": {"step": 3, "epoch": 1, "train_loss": steps[3]},
        "metrics-step-00000004.json": {
            "step": 4,
            "epoch": 2,
            "train_loss": steps[4],
            "val_loss": first["val_loss"],
            "bad_loss": "NaN",
        },
        "metrics-step-00000008.json": {
            "step": 8,
            "epoch": 3,
            "train_loss": steps[8],
            "val_loss": state.history[1]["val_loss"],
            "bad_loss": "NaN",
        },
        "metrics.json": {
            "step": 9,
            "epoch": 3,
            "train_loss": steps[9],
            "val_loss": last["val_loss"],
            "bad_loss": "NaN",
        },
    }


def _losses(path: Path) -> dict[int, str]:
    header, *rows = (line.split(",") for line in path.read_text().split())
    return {int(row[0]): row[header.index("train_loss")] for row in rows}


def test_without_records_of_steps_the_end_of_an_epoch_is_written_and_a_resumed_run_adds_its_own(
    tmp_path: Path,
) -> None:
    def saver() -> MetricSaver:
        return MetricSaver(tmp_path, every_n_steps=5)

    stopped = make_trainer([saver(), interrupt_at(7)], max_epochs=4)
    stopped.fit(regression(), regression())
    assert list(files(tmp_path)) == ["metrics-step-00000006.json", "metrics.json"]
    resumed = make_trainer([saver()], max_epochs=4)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    state = resumed.fit(regression(), regression())
    assert list(files(tmp_path)) == ["metrics-step-00000006.json", "metrics-step-00000012.json", "metrics.json"]
    assert files(tmp_path)["metrics.json"] == {"step": 12, "epoch": 4, **state.metrics}


def test_a_run_that_resumes_behind_its_last_step_ends_with_the_same_numbers(tmp_path: Path) -> None:
    def build(name: str, *others: Any) -> Any:
        return make_trainer([MetricSaver(tmp_path / name), StepMetrics(tmp_path / name), *others], max_epochs=1)

    build("whole").fit(regression(), regression())
    stopped, resumed = build("resumed", interrupt_at(3)), build("resumed")
    stopped.fit(regression(), regression())
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    whole, again = ((tmp_path / name / "metrics.json").read_text() for name in ("whole", "resumed"))
    assert whole == again


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_a_metric_with_the_name_of_a_number_is_refused_at_the_first_epoch(name: str, tmp_path: Path) -> None:
    def build(**chosen: Any) -> Any:
        odd = At("on_epoch_end", lambda trainer: trainer.state.metrics.update({name: 0.5}))
        return make_trainer([MetricSaver(tmp_path, **chosen), odd], max_epochs=2)

    trainer = build()
    with pytest.raises(ValueError, match=f"a metric is called '{name}'"):
        trainer.fit(regression(), regression())
    assert trainer.state.epoch == 1
    build(metrics=["*_loss"]).fit(regression(), regression())
    assert files(tmp_path)["metrics.json"].items() >= {"step": 6, "epoch": 2}.items()


def test_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every_n_steps is 0: give a whole number of at least 1"):
        MetricSaver(tmp_path, every_n_steps=0)
    with pytest.raises(ValueError, match="a step in at_steps is 0: give a whole number of at least 1"):
        MetricSaver(tmp_path, at_steps=[3, 0])


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("a file where the folder should be")
    state = make_trainer([MetricSaver(tmp_path / "folder")]).fit(regression())
    assert state.stop_reason is None
    assert "metrics.json can't be written" in caplog.text


@pytest.mark.parametrize("stop", [4, 5])
def test_a_file_that_is_due_when_the_run_stops_is_written_by_the_resumed_one(stop: int, tmp_path: Path) -> None:
    def build(*callbacks: Any) -> Any:
        parts = [MetricSaver(tmp_path / "json", every_n_steps=4), StepMetrics(tmp_path, every_n_steps=3)]
        return make_trainer([*parts, *callbacks], max_epochs=3)

    stopped = build(interrupt_at(stop))
    stopped.fit(regression(), regression())
    resumed = build()
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    names = ["metrics-step-00000006.json", "metrics-step-00000009.json", "metrics.json"]
    assert list(files(tmp_path / "json")) == names
