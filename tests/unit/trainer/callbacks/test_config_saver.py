"""ConfigSaver: what a run was started with, on disk, and kept when a run is resumed."""

import enum
import json
import logging
import math
import platform
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from tests.support import mlflow_store
from tests.unit.trainer.support import (
    At,
    make_trainer,
    one_batch,
    quick,
    run_scripted,
    scripted_trainer,
    through_file,
)
from trainer.callbacks import MLflowLogging, TensorBoardLogging
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.config_saver import ConfigSaver
from trainer.checkpoint.files import list_checkpoints
from trainer.checkpoint.manager import load_checkpoint

CONFIG: dict[str, Any] = {"optimizer": {"name": "SGD", "lr": 1e-05}, "sizes": [4, 2], "seed": None, "größe": True}


def load(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    return content


def saved(path: Path, config: Any) -> Any:
    run_scripted([ConfigSaver(path, config)], [1.0])
    return load(path)["config"]


def resume(path: Path, config: Any) -> None:
    before = run_scripted([], [2.0])
    after = scripted_trainer([ConfigSaver(path, config)], [1.0], max_epochs=2)
    after.load_state_dict(through_file(before.state_dict()))
    after.fit(one_batch(), one_batch())


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "code.py").write_text("one")
    git(folder, "add", "code.py")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", ["run.json", "run.yaml", "run.yml"])
class TestFile:
    def test_holds_the_configuration_and_the_environment(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "deep" / name
        before = datetime.now(UTC) - timedelta(seconds=1)
        run_scripted([ConfigSaver(path, CONFIG)], [1.0])
        content = load(path)
        assert content["config"] == CONFIG
        assert list(content["config"]) == list(CONFIG)
        environment = content["environment"]
        assert environment["python"] == platform.python_version()
        assert environment["torch"] == torch.__version__
        assert environment["platform"] == platform.platform()
        assert (environment["device"], environment["cuda_devices"]) == ("cpu", [])
        assert before <= datetime.fromisoformat(environment["started"]) <= datetime.now(UTC)
        assert [item.name for item in path.parent.iterdir()] == [name]

    def test_is_there_before_the_first_batch(self, name: str, tmp_path: Path) -> None:
        seen: list[bool] = []
        look = At("on_train_batch_start", lambda trainer: seen.append((tmp_path / name).exists()))
        run_scripted([ConfigSaver(tmp_path / name, CONFIG), look], [1.0])
        assert seen == [True]

    def test_a_resumed_run_with_the_same_configuration_leaves_it(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        odd = {**CONFIG, "loss": math.nan, "model": nn.Linear(1, 1), "function": run_scripted, "set": {"b", "a"}}
        saved(tmp_path / name, odd)
        text = (tmp_path / name).read_bytes()
        resume(tmp_path / name, {**dict(reversed(odd.items())), "model": nn.Linear(1, 1)})
        assert (tmp_path / name).read_bytes() == text
        assert len(list(tmp_path.iterdir())) == 1
        assert caplog.records == []

    def test_a_resumed_run_with_another_puts_it_beside_and_says_so(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        stem, suffix = name.split(".")
        saved(tmp_path / name, CONFIG)
        text = (tmp_path / name).read_bytes()
        for lr in (0.2, 0.3, 0.2):
            resume(tmp_path / name, {"lr": lr})
        assert (tmp_path / name).read_bytes() == text
        assert load(tmp_path / f"{stem}-2.{suffix}")["config"] == {"lr": 0.2}
        assert load(tmp_path / f"{stem}-3.{suffix}")["config"] == {"lr": 0.3}
        assert len(list(tmp_path.iterdir())) == 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert f"{stem}-2.{suffix}" in caplog.records[0].message

    @pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"a: [", b""])
    def test_a_file_that_can_not_be_understood_is_kept(self, name: str, content: bytes, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        resume(tmp_path / name, CONFIG)
        stem, suffix = name.split(".")
        assert (tmp_path / name).read_bytes() == content
        assert load(tmp_path / f"{stem}-2.{suffix}")["config"] == CONFIG

    def test_a_run_from_scratch_writes_it_anew(self, name: str, tmp_path: Path) -> None:
        saved(tmp_path / name, CONFIG)
        assert saved(tmp_path / name, {"lr": 0.2}) == {"lr": 0.2}
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_run_resumed_where_there_is_none_writes_it(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        resume(tmp_path / name, CONFIG)
        assert load(tmp_path / name)["config"] == CONFIG
        assert caplog.records == []


class Color(enum.StrEnum):
    RED = "red"


class Mixed(str, enum.Enum):  # noqa: UP042 - the older kind, whose str() is another
    BLUE = "blue"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
class TestValues:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (np.float64(0.5), 0.5),
            (np.int64(3), 3),
            (np.float32(0.25), 0.25),
            (math.inf, "Infinity"),
            ((1, (2, 3)), [1, [2, 3]]),
            ({"b", "a"}, ["a", "b"]),
            ({1: "one", None: 2}, {"1": "one", "None": 2}),
            (Path("a/b"), "a/b"),
            ([Color.RED, Mixed.BLUE, Number.ONE], ["red", "blue", 1]),
            (torch.float16, "torch.float16"),
            (b"ab", "b'ab'"),
            (1 + 2j, "(1+2j)"),
            (nn.Linear(2, 1, bias=False), "Linear(in_features=2, out_features=1, bias=False)"),
            (run_scripted, "<function run_scripted>"),
            (OmegaConf.create({"a": {"b": [1, "${a.c}"], "c": 2}}), {"a": {"b": [1, 2], "c": 2}}),
            ("2020-01-01", "2020-01-01"),
            ("1e-5", "1e-5"),
            ("no", "no"),
            ("line\nline\t\x07", "line\nline\t\x07"),
        ],
    )
    def test_are_kept_as_plain_ones_or_their_repr(
        self, suffix: str, value: Any, expected: Any, tmp_path: Path
    ) -> None:
        assert saved(tmp_path / f"run{suffix}", {"value": value}) == {"value": expected}

    def test_later_changes_of_the_configuration_are_not_in_it(self, suffix: str, tmp_path: Path) -> None:
        config: dict[str, Any] = {"sizes": [1]}
        callback = ConfigSaver(tmp_path / f"run{suffix}", config)
        config["sizes"].append(2)
        run_scripted([callback], [1.0])
        assert load(tmp_path / f"run{suffix}")["config"] == {"sizes": [1]}


@quick(40)
@given(
    config=st.dictionaries(
        st.text(),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    ),
    suffix=st.sampled_from([".json", ".yaml"]),
)
def test_any_plain_configuration_comes_back(tmp_path_factory: Any, config: dict[str, Any], suffix: str) -> None:
    path = tmp_path_factory.mktemp("run") / f"run{suffix}"
    callback = ConfigSaver(path, config)
    callback.on_fit_start(make_trainer())
    assert load(path)["config"] == config


class TestGit:
    def state(self, folder: Path) -> Any:
        run_scripted([ConfigSaver(folder / "run.json", {})], [1.0])
        return load(folder / "run.json")["environment"]["git"]

    def test_the_commit_is_named_and_whether_files_were_changed(self, repository: Path, tmp_path: Path) -> None:
        commit = git(repository, "rev-parse", "HEAD")
        assert self.state(tmp_path) == {"commit": commit, "dirty": False}
        (repository / "results.csv").write_text("not part of the code")
        assert self.state(tmp_path) == {"commit": commit, "dirty": False}
        (repository / "code.py").write_text("two")
        assert self.state(tmp_path) == {"commit": commit, "dirty": True}

    def test_a_repository_without_a_commit_has_no_state(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        git(tmp_path, "init", "-q")
        monkeypatch.chdir(tmp_path)
        assert self.state(tmp_path) is None

    def test_without_a_repository_there_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        monkeypatch.chdir(tmp_path)
        assert self.state(tmp_path) is None

    def test_without_git_there_is_none(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert self.state(tmp_path) is None

    def test_a_git_that_does_not_answer_is_not_waited_for(
        self, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = tmp_path / "git"
        program.write_text('#!/bin/sh\ncase "$*" in *status*) exec sleep 60;; *) echo 1234;; esac\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr("trainer.git_state._TIMEOUT_S", 0.2)
        assert self.state(tmp_path) == {"commit": "1234", "dirty": None}


def test_the_names_of_the_devices_are_asked_for_where_the_run_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    trainer.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"device {index}")
    ConfigSaver(tmp_path / "run.json", {}).on_fit_start(trainer)
    environment = load(tmp_path / "run.json")["environment"]
    assert (environment["device"], environment["cuda_devices"]) == ("cuda:1", ["device 0", "device 1"])


def test_each_checkpoint_has_it_and_the_others_are_handed_it(tmp_path: Path) -> None:
    handed: list[Any] = []
    run_scripted(
        [
            At("on_fit_start", lambda trainer: handed.append(trainer.state.config), priority=1),
            ConfigSaver(tmp_path / "config.json", CONFIG),
            Checkpoint(tmp_path / "run", at_steps=[1], max_overhead=1),
        ],
        [2.0, 1.0],
    )
    assert handed == [CONFIG]
    files = list_checkpoints([tmp_path / "run"])
    assert len(files) == 2
    assert all(load_checkpoint(file.path)["config"] == CONFIG for file in files)


def test_trackers_without_a_config_of_their_own_show_it(tmp_path: Path) -> None:
    mlflow = MLflowLogging("config", tracking_uri=mlflow_store.uri())
    own = MLflowLogging("config", tracking_uri=mlflow_store.uri(), params={"mine": 1}, name="own")
    board = TensorBoardLogging(tmp_path / "board")
    run_scripted([ConfigSaver(tmp_path / "config.json", CONFIG), mlflow, own, board], [2.0])
    client = mlflow_store.client()
    found = client.search_runs([client.get_experiment_by_name("config").experiment_id])
    shown = {run.info.run_name == "own": run.data.params for run in found}
    assert shown[False]["optimizer.lr"] == "1e-05"
    assert shown[True] == {"mine": "1"}
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    data = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    assert HParamsPluginData.FromString(data).session_start_info.hparams["optimizer.lr"].number_value == 1e-5


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.toml'.*\.json, \.yaml, \.yml"):
        ConfigSaver(tmp_path / "run.toml", {})


def test_construction_touches_nothing_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    callback = ConfigSaver(tmp_path / "run.json", {})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").mkdir()
    with pytest.raises(IsADirectoryError):
        run_scripted([callback], [1.0])
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]


def test_two_fits_leave_one_file(tmp_path: Path) -> None:
    callbacks = [ConfigSaver(tmp_path / "run.json", CONFIG), Checkpoint(tmp_path / "checkpoints")]
    trainer = scripted_trainer(callbacks, [2.0, 1.0])
    trainer.fit(one_batch(), one_batch())
    text = (tmp_path / "run.json").read_bytes()
    trainer.fit(one_batch(), one_batch())
    assert [item.read_bytes() for item in tmp_path.glob("*.json")] == [text]
