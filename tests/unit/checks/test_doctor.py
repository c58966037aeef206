"""What `hpo doctor` says of the machine, the database and W&B; where it looks is real, or made for the test."""

from __future__ import annotations

import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hpo.checks import database_check, doctor
from hpo.checks.doctor import Line, examine
from hpo.checks.meaning import check_meaning
from hpo.config.spec import load_spec
from tests.support.commands import STUDY, hpo, hpo_json, make_study

Look = Callable[..., dict[str, Line]]
WANDB_VARIABLES = tuple(
    f"WANDB_{name}" for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "BASE_URL", "MODE", "CONFIG_DIR")
)


class Usage(NamedTuple):
    """As `shutil.disk_usage` gives it."""

    total: int
    used: int
    free: int


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Look:
    """Everything by name, from an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (*WANDB_VARIABLES, "NETRC"):
        monkeypatch.delenv(name, raising=False)

    def found(*overrides: str, text: str = STUDY, storage: str | None = None) -> dict[str, Line]:
        spec = load_spec(make_study(tmp_path / "study", text), overrides)
        return {line.name: line for line in examine(spec, storage=storage)}

    return found


def test_a_machine_that_runs_these_tests_is_fit(look: Look) -> None:
    lines = look()
    assert {"python", "torch", "optuna", "optuna-dashboard", "sqlalchemy", "processor"} < lines.keys()
    assert {"database", "wandb", "disk", "open files"} < lines.keys()
    assert lines["torch"].found == torch.__version__
    assert [line for line in lines.values() if line.status == "error"] == []
    assert all(line.fix for line in lines.values() if line.status != "ok")


def test_a_version_out_of_range_is_an_error_with_the_one_to_install(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "4.9.0" if name == "optuna" else real(name))
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.8.1")
    lines = look()
    assert (lines["optuna"].status, lines["optuna"].found) == ("error", "4.9.0")
    assert lines["optuna"].fix.endswith("`pip install 'optuna<5.1,>=5.0'`")
    assert (lines["python"].status, lines["python"].fix) == ("error", "use Python >=3.11")


def test_a_new_file_is_no_error_and_is_not_made(look: Look, tmp_path: Path) -> None:
    line = look()["database"]
    assert (line.status, line.fix) == ("ok", "")
    assert line.found.endswith("study.db: not there yet: `hpo run` makes it")
    assert not (tmp_path / "study" / "runs").exists()


def test_a_sqlite_file(look: Look, ready_sqlite_file: Path, tmp_path: Path) -> None:
    copy = shutil.copy(ready_sqlite_file, tmp_path / "ready.db")
    assert look(storage=f"sqlite:///{copy}")["database"].found.endswith("has the tables")
    (tmp_path / "empty.db").write_bytes(b"")
    assert look(storage=f"sqlite:///{tmp_path / 'empty.db'}")["database"].found.endswith("`hpo run` makes them")
    (tmp_path / "text.db").write_text("no database at all, but long enough to be looked at as if it were one" * 9)
    broken = look(storage=f"sqlite:///{tmp_path / 'text.db'}")["database"]
    assert broken.status == "error"
    assert "file is not a database" in broken.found


def test_a_server_is_asked_for_its_version(look: Look, postgres_url: str) -> None:
    line = look(storage=postgres_url)["database"]
    assert line.status == "ok"
    assert ": PostgreSQL 1" in line.found
    assert line.found.endswith("has no tables yet: `hpo run` makes them")


def test_a_server_that_is_not_there_and_a_password_that_stays_hidden(look: Look) -> None:
    with socket.socket() as free:  # bound and not listening: every connection is refused
        free.bind(("127.0.0.1", 0))
        line = look(storage=f"postgresql://ann:secret@127.0.0.1:{free.getsockname()[1]}/x")["database"]
    assert line.status == "error"
    assert "can't open the database" in line.found
    assert "ann:***@127.0.0.1" in line.found
    assert "secret" not in line.found + line.fix
    assert line.fix


def test_a_server_that_does_not_answer_is_not_waited_for_long(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_check, "_SECONDS", 2)  # the least that PostgreSQL's library knows
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        line = look(storage=f"postgresql://ann:secret@127.0.0.1:{port}/x")["database"]
    assert line.status == "error"
    assert "timeout" in line.found
    assert "secret" not in line.found


@pytest.mark.parametrize(
    ("url", "found"),
    [("oracle://me@host/x", "no support for databases of type"), ("nonsense", "not a database URL")],
)
def test_a_url_that_is_none(look: Look, url: str, found: str) -> None:
    line = look(storage=url)["database"]
    assert line.status == "error"
    assert found in line.found
    assert "sqlite:///study.db" in line.fix


def test_a_database_on_a_network_file_system(
    look: Look, ready_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_check, "network_file_system", lambda url: "nfs4")
    line = look(storage=f"sqlite:///{ready_sqlite_file}")["database"]
    assert (line.status, "on a network file system (nfs4)" in line.found) == ("warning", True)


WITH_WANDB = "callbacks={wandb: {project: x}}"


def test_wandb_is_looked_for_where_it_keeps_its_login(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert look()["wandb"].status == "ok"
    assert "needed by" in look()["wandb"].found
    line = look(WITH_WANDB)["wandb"]
    assert (line.status, line.fix.startswith("`wandb login`")) == ("warning", True)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine api.wandb.ai login user password 0000\n")
    (home / ".netrc").chmod(0o600)
    assert look(WITH_WANDB)["wandb"].found.endswith("logged in")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert look(WITH_WANDB)["wandb"].status == "warning"
    monkeypatch.setenv("WANDB_API_KEY", "0000")
    assert look(WITH_WANDB)["wandb"].status == "ok"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "offline by WANDB_MODE; `wandb sync`" in look(WITH_WANDB)["wandb"].found


@pytest.mark.parametrize("place", ["wandb/settings", "home/.config/wandb/settings"])
def test_a_switch_that_wandb_has_stored_is_seen(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """As `wandb offline` stores it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / place
    file.parent.mkdir(parents=True)
    file.write_text("[default]\nmode = offline\n")
    line = look(WITH_WANDB)["wandb"]
    assert (line.status, "offline by" in line.found) == ("ok", True)


@pytest.mark.usefixtures("look")
def test_a_study_that_wandb_will_not_show_says_so_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = load_spec(make_study(tmp_path), [WITH_WANDB])
    (warning,) = check_meaning(spec)
    assert (warning.path, "no login to W&B" in warning.problem) == ("callbacks.wandb", True)
    assert "`wandb login`" in warning.fix
    assert check_meaning(load_spec(spec.path, ["callbacks.wandb=false"])) == []
    monkeypatch.setenv("WANDB_API_KEY", "0000")
    assert check_meaning(spec) == []
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_meaning(spec) == []


def test_wandb_that_is_not_installed(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version

    def version(name: str) -> str:
        if name == "wandb":
            raise doctor.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert look()["wandb"].status == "ok"
    assert look(WITH_WANDB)["wandb"] == Line(
        "wandb", "error", "isn't installed, and the study uses it", "pip install 'hpo-service[wandb]'"
    )


@pytest.mark.parametrize(("free", "status"), [(2**26, "error"), (2**31, "warning"), (2**40, "ok")])
def test_room_on_the_disk(look: Look, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(2**41, 0, free))
    line = look()["disk"]
    assert line.status == status
    assert bool(line.fix) == (status != "ok")


def test_an_output_folder_that_can_not_be_written_to(look: Look) -> None:
    line = look("run.output_dir=/proc/runs")["disk"]
    assert line.status == "error"
    assert line.found.startswith("/proc: can't be written to: ")
    assert "--output-dir" in line.fix


def test_little_shared_memory_matters_to_loaders_only(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**40))
    assert look()["shared memory"].status == "ok"
    line = look("loader.num_workers=2")["shared memory"]
    assert (line.status, line.found) == ("warning", "64 MiB")
    assert "--shm-size" in line.fix


def test_few_open_files(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    line = look()["open files"]
    assert (line.status, line.found) == ("warning", "256 may be open at once")
    assert line.fix == "`ulimit -n 1024` (at most unlimited) before `hpo run`"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    return tmp_path / "version"


def test_no_gpu_at_all_is_fine(no_gpu: Path, look: Look) -> None:
    assert look()["gpu"] == Line("gpu", "ok", "none: trials run on the processor")


def test_a_driver_without_a_torch_that_uses_it(no_gpu: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    line = look()["gpu"]
    assert line.status == "warning"
    assert line.found == "there is an NVIDIA driver (550.54.15), but torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = look()["gpu"]
    assert line.found.endswith("torch is built for CUDA 12.8, and finds none")
    assert line.fix == "CUDA_VISIBLE_DEVICES is '': unset it, or name GPUs that exist"


def test_a_gpu_that_does_not_compute(no_gpu: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(index: int) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure\nand more")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    lines = look()
    assert lines["cuda"].status == "ok"
    assert lines["cuda:0"].status == "error"
    assert lines["cuda:0"].found == "does not compute: CUDA error: unspecified launch failure"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    study = make_study(tmp_path / "study")
    printed = hpo("doctor", study, code=0).stdout
    assert [line.split()[0] for line in printed.splitlines() if not line.startswith(" ")].count("ok") >= 9
    assert {"name", "status", "found", "fix"} == set(hpo_json("doctor")[0])
    failed = hpo("doctor", "--storage", "oracle://me:secret@host/x", code=3).stdout
    assert "error    database" in failed
    assert "→ write sqlite:///study.db" in failed
    assert "secret" not in failed
    assert "no such file" in hpo("doctor", tmp_path / "nowhere.yaml", code=2).stderr.lower()
