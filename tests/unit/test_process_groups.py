"""hpo is no part of a group that torchrun has started."""

from pathlib import Path

import pytest

import hpo
from hpo.errors import InputError, refuse_process_groups
from tests.support.commands import hpo as command

GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)


def test_a_study_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command("init", tmp_path / "new")
    before = sorted(tmp_path.rglob("*"))
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="one of 2 processes that torchrun has started"):
        hpo.run(tmp_path / "new" / "study.yaml")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("under_torchrun")
def test_the_command_says_so(tmp_path: Path) -> None:
    result = command("run", tmp_path / "study.yaml", code=2)
    assert "this is one of 2 processes that torchrun has started" in result.stderr


def test_one_process_of_torchrun_may(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (GROUP | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    refuse_process_groups()
