"""The command line at its edges: exit codes, JSON, pipes, odd paths, and the commands it hands on."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import torch

import hpo as hpo_package
from hpo.checks import checks
from hpo.cli.app import main
from hpo.cli.train import _peers, _resumable
from hpo.config.spec import load_spec
from hpo.console.lines import kept_arguments, same_command
from hpo.errors import InputError
from hpo.storage.agents import AGENTS
from hpo.storage.attributes import BEST_ATTR, OUTCOME_ATTR
from hpo.storage.engines import normalize_url, sqlite_file
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from hpo.trial.resources import training_slot
from tests.support.commands import hpo, hpo_json, make_study
from tests.support.studies import Studies, ask
from tests.unit.study.test_shared import joined

pytestmark = pytest.mark.full


def played(view: OpenStudy, *, diverged: bool = False) -> None:
    """A finished trial, without training."""
    trial, _ = ask(view)
    trial.report(math.nan, 1)
    if diverged:
        trial.set_user_attr(OUTCOME_ATTR, "diverged")
    view.study.tell(trial, math.inf if diverged else 1.5)


@pytest.fixture
def looked_at(studies: Studies) -> Path:
    """A study of one diverged and one complete trial."""
    with studies.open("study.n_trials=4") as (view,):
        played(view, diverged=True)
        played(view)
        ask(view)
    return studies.folder / "study.yaml"


def test_numbers_that_json_has_not_are_null(looked_at: Path) -> None:
    first, second, running = hpo_json("trials", looked_at)
    assert (first["outcome"], first["value"], first["epochs"]) == ("diverged", None, 1)
    assert (second["outcome"], second["value"]) == ("complete", 1.5)
    assert (running["outcome"], running["value"], running["duration_s"]) == ("running", None, None)
    assert hpo_json("best", looked_at)["trial"] == 1
    status = hpo_json("status", looked_at)
    assert (status["n_trials"], status["finished"], status["running"]) == (4, 2, 1)


def test_a_best_checkpoint_that_is_not_here_is_said_to_be_missing(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        trial.set_user_attr(BEST_ATTR, {"epoch": 1, "metrics": {}, "checkpoint": "trials/0/best.pt"})
        view.study.tell(trial, 1.5)
        kept = view.spec.output_dir / "trials/0/best.pt"
    file = studies.folder / "study.yaml"
    assert hpo("best", file).stdout.endswith(f"checkpoint: {kept} (there is no such file here)\n")
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert hpo("best", file).stdout.endswith(f"checkpoint: {kept}\n")


def test_a_study_of_diverged_trials_has_no_best(studies: Studies) -> None:
    with studies.open() as (view,):
        played(view, diverged=True)
    assert hpo_json("status", studies.folder / "study.yaml")["best"] is None
    said = hpo("best", studies.folder / "study.yaml", code=3).stderr
    assert "no complete trial yet\n  fix: `hpo trials` says how its trials ended; `hpo run` trains more" in said


def test_a_parameter_that_the_file_does_not_search_any_more_is_still_shown(looked_at: Path) -> None:
    """The file has changed since the trials were drawn."""
    edited = looked_at.with_name("edited.yaml")
    space = "search_space: {optimizer.lr: {type: float, low: 1e-9, high: 1}}\n"
    edited.write_text(looked_at.read_text().partition("search_space:")[0] + space)
    before, after = (hpo_json("trials", file)[1]["params"] for file in (looked_at, edited))
    assert before == after
    for name in before:
        assert name in hpo("trials", edited).stdout.splitlines()[1]
        assert f"params.{name}" in hpo("export", edited).stdout.splitlines()[0].split(",")


def test_a_piped_table_has_a_line_for_each_trial(studies: Studies) -> None:
    long = (
        "search_space={"
        + ", ".join(f"model.{'x' * 60}{i}: {{type: float, low: 0, high: 1}}" for i in range(4))
        + "}"
    )
    with studies.open("study.n_trials=3", long) as (view,):
        for _ in range(3):
            played(view)
    lines = hpo("trials", studies.folder / "study.yaml", long).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["tiny", "trial", "0", "1", "2"]
    assert all("complete" in line for line in lines[2:])


def test_brackets_in_what_is_shown_are_no_markup(studies: Studies) -> None:
    space = 'search_space={data.note: {type: categorical, choices: ["[red]x[/red]", "[/bold]"]}}'
    with studies.open(space) as (view,):
        played(view)
    shown = hpo("trials", studies.folder / "study.yaml", space).stdout
    assert "[red]x[/red]" in shown or "[/bold]" in shown


def test_none_is_a_value_and_a_missing_parameter_is_a_dash(studies: Studies) -> None:
    space = (
        "search_space={data.note: {type: categorical, choices: [null, other]},"
        " data.more: {type: int, low: 5, high: 5, when: {data.note: other}}}"
    )
    with studies.open("study.n_trials=6", space) as (view,):
        for _ in range(6):
            played(view)
    table = hpo("trials", studies.folder / "study.yaml", space).stdout.splitlines()
    assert {tuple(line.split()[3:5]) for line in table[2:]} == {("None", "-"), ("other", "5")}


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("command", [("trials",), ("trials", "--json"), ("status",), ("best",)])
def test_a_reader_that_has_enough_is_no_failure(
    looked_at: Path, monkeypatch: pytest.MonkeyPatch, closed_pipe: int, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpo", *command, str(looked_at)])
    with open(os.dup(closed_pipe), "w") as printed, monkeypatch.context() as patch:  # noqa: PTH123
        patch.setattr(sys, "stdout", printed)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0


def test_nothing_is_said_about_a_closed_pipe_when_the_process_ends(looked_at: Path, closed_pipe: int) -> None:
    command = [sys.executable, "-m", "hpo", "trials", "--json", str(looked_at)]
    done = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("nonsense",),
        ("run", "study.yaml", "--nonsense"),
        ("run", "study.yaml", "--n-trials", "0"),
        ("run", "study.yaml", "--workers", "0"),
        ("run", "study.yaml", "--workers", "many"),
        ("train", "study.yaml", "--epochs", "0"),
        ("dashboard", "study.yaml", "--port", "70000"),
    ],
)
def test_what_the_command_line_cannot_read_ends_with_2(arguments: tuple[str, ...]) -> None:
    # The parser writes to the stream that it found at import.
    result = hpo(*arguments, code=2)
    assert "Traceback" not in result.stderr


def tabs(folder: Path) -> Path:
    (folder / "tabs.yaml").write_text("study:\n\tname: x\n")
    return folder / "tabs.yaml"


def no_space(folder: Path) -> Path:
    text = (folder / "study.yaml").read_text().partition("search_space:")[0]
    (folder / "bare.yaml").write_text(text)
    return folder / "bare.yaml"


@pytest.mark.parametrize(
    ("file", "options", "first_line"),
    [
        (lambda folder: folder / "none.yaml", (), "none.yaml: no such file"),
        (lambda folder: folder, (), "can't be read (Is a directory)"),
        (tabs, (), "tabs.yaml:2: not YAML: "),
        (no_space, (), "search_space: there is nothing to search"),
        (None, ("--timeout", "abc"), "run.timeout: is not a duration"),
        (
            None,
            ("--storage", "oracle://host/x"),
            "command line: run.storage: no support for databases of type 'oracle'",
        ),
        (None, ("--storage", "nonsense"), "command line: run.storage: not a database URL"),
        (None, ("--storage", "sqlite:///:memory:"), "command line: run.storage: a study needs a database file"),
        (None, ("study.name=../elsewhere",), "study.name: may hold only letters"),
        (None, ("study.name=a b",), "study.name: may hold only letters"),
        (None, ("optimizer.lr",), "optimizer.lr: is not an override"),
        (None, ("--devices", ""), "run.devices: names no device"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line_and_leaves_nothing(
    tmp_path: Path, file: Any, options: tuple[str, ...], first_line: str
) -> None:
    study = make_study(tmp_path)
    study = study if file is None else file(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    result = hpo("run", study, *options, code=2)
    assert first_line in result.stderr.splitlines()[0]
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    "storage",
    ["postgresql://u:secret@127.0.0.1:1/x", "mysql://u:secret@127.0.0.1:1/x", "sqlite:////dev/null/x.db"],
)
def test_a_database_out_of_reach_ends_with_3_and_tells_no_password(tmp_path: Path, storage: str) -> None:
    study = make_study(tmp_path)
    for command in ("run", "status"):
        result = hpo(command, study, "--storage", storage, code=3)
        assert "secret" not in result.stderr
        assert "Traceback" not in result.stderr
        assert "\n  fix: " in result.stderr
        if "u:secret" in storage:
            assert "refused" in result.stderr
            assert "see that the server runs, and that host, user, password and database in `run.storage`" in (
                result.stderr
            )
    assert not (tmp_path / "runs").exists()


def test_an_output_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    in_the_way = tmp_path / "parts.py"
    for storage in ((), ("--storage", f"sqlite:///{tmp_path}/x.db")):
        result = hpo("run", study, "--output-dir", in_the_way, *storage, code=3)
        assert result.stderr.startswith(f"{in_the_way}: can't make the output folder: Not a directory\n  fix: ")
        assert "`run.output_dir`, or `--output-dir`" in result.stderr
    study.write_text(f"{study.read_text()}run:\n  output_dir: {in_the_way.name}\n")
    written = f"`run.output_dir` ({study}:{len(study.read_text().splitlines())}), or `--output-dir`"
    assert written in hpo("run", study, code=3).stderr
    assert not (tmp_path / "x.db").exists(), "nothing is stored of a study that can't run"


@pytest.mark.parametrize("command", [("run",), ("enqueue", "model.hidden=3"), ("worker",)], ids=lambda it: it[0])
def test_for_a_file_that_is_not_there_nothing_else_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    looked: list[Path] = []

    def look(path: Path, overrides: object, error: InputError) -> InputError:
        looked.append(path)
        return error

    monkeypatch.setattr(checks, "all_that_is_wrong", look)
    name, *more = command
    result = hpo(name, tmp_path / "never.yaml", *more, code=2)
    assert result.stderr.startswith(f"{tmp_path}/never.yaml: no such file\n  fix: ")
    assert looked == []


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    plain = hpo("run", study, "study.sampler=tpee", code=2).stderr
    debugged = hpo("run", study, "study.sampler=tpee", "--debug", code=2).stderr
    assert "Traceback" not in plain
    assert debugged.startswith("Traceback")
    assert debugged.endswith(plain)


@pytest.mark.parametrize(
    ("trial", "code", "text"),
    [("99", 3, "has no trial 99"), ("-1", 2, "neither `best` nor a number"), ("worst", 2, "see `hpo trials`")],
)
def test_training_on_from_a_trial_that_is_not_there(looked_at: Path, trial: str, code: int, text: str) -> None:
    assert text in hpo("train", looked_at, f"--trial={trial}", code=code).stderr


def test_a_trial_whose_folder_is_gone_can_be_trained_anew_only(looked_at: Path) -> None:
    assert "--from-scratch" in hpo("train", looked_at, "--trial", "1", code=3).stderr


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", ["ünï/日本 x", "q?x=1#y", "p%20c%"])
def test_a_study_stays_in_its_folder_whatever_that_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    study = make_study(tmp_path / name)
    there = set(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path / name)
    printed = hpo("run", "study.yaml", "--n-trials", 1, "trainer.max_epochs=1").stdout
    assert (tmp_path / name / "runs" / "tiny" / "study.db").is_file()
    assert f"storage sqlite:///{tmp_path / name}/runs/tiny/study.db" in printed
    monkeypatch.chdir(tmp_path)
    assert hpo_json("status", study, "trainer.max_epochs=1")["finished"] == 1
    assert set(tmp_path.iterdir()) == there
    named = load_spec(study, ["run.storage=sqlite:///deeper/x.db"])
    assert sqlite_file(normalize_url(named.storage_url)) == tmp_path / name / "deeper" / "x.db"


@pytest.mark.parametrize("home", ["~/out", "~nobody-of-that-name/out"])
def test_a_home_that_is_not_known_is_a_folder_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    stated = hpo("status", make_study(tmp_path), "--output-dir", home, code=3).stderr
    assert stated.startswith(f"sqlite:///{tmp_path / home.removeprefix('~/')}/study.db: there is no such database")


def test_two_studies_share_a_storage_and_one_can_be_deleted(studies: Studies) -> None:
    storage = f"run.storage=sqlite:///{studies.folder}/runs/tiny/study.db"
    for name in ("tiny", "other"):
        with studies.open(storage, f"study.name={name}") as (view,):
            played(view)
        folder = studies.folder / "runs" / name / "trials"
        folder.mkdir(parents=True)
    study = studies.folder / "study.yaml"
    assert "--yes" in hpo("delete", study, storage, "study.name=other", code=2).stderr
    hpo("delete", study, storage, "study.name=other", "--yes")
    assert "no study named other" in hpo("status", study, storage, "study.name=other", code=3).stderr
    assert hpo_json("status", study, storage)["finished"] == 1
    assert not (studies.folder / "runs" / "other").exists()
    assert (studies.folder / "runs" / "tiny" / "trials").is_dir()


def test_a_study_that_runs_is_not_deleted(looked_at: Path) -> None:
    assert "1 trial is running" in hpo("delete", looked_at, "--yes", code=3).stderr


def test_a_study_whose_workers_are_between_two_trials_is_not_deleted(studies: Studies) -> None:
    with studies.open() as (view,):
        played(view)
        joined(view, "here", host="elsewhere")
    study = studies.folder / "study.yaml"
    assert "1 agent is at work on the study" in hpo("delete", study, "--yes", code=3).stderr
    with studies.open() as (view,), view.storage.one_transaction() as conn:
        conn.execute(sa.update(AGENTS).values(beat_at=time.time() - 600))  # that machine is gone
    hpo("delete", study, "--yes")


@pytest.mark.parametrize(
    ("overrides", "storage", "output_dir", "expected"),
    [
        (None, None, None, ["a b/study.yaml"]),
        (["optimizer.lr=0.5"], None, None, ["a b/study.yaml", "optimizer.lr=0.5"]),
        (
            ["search_space[optimizer.lr].high=1", "loss={_target_: x.Y}"],
            "postgresql://u@/db?host=/run&port=1",
            "out put",
            [
                "a b/study.yaml",
                "search_space[optimizer.lr].high=1",
                "loss={_target_: x.Y}",
                "--storage",
                "postgresql://u@/db?host=/run&port=1",
                "--output-dir",
                "out put",
            ],
        ),
    ],
)
def test_the_next_commands_name_the_same_study(
    overrides: list[str] | None, storage: str | None, output_dir: str | None, expected: list[str]
) -> None:
    assert shlex.split(kept_arguments(Path("a b/study.yaml"), overrides, storage, output_dir)) == expected


@pytest.mark.parametrize("url", ["mysql://h/d?user=u&password=sesame", "postgresql://u:sesame@h/d"])
def test_the_commands_that_a_run_ends_with_show_no_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    assert "sesame" not in kept_arguments(Path("study.yaml"), [f"run.storage={url}"], url, None)
    monkeypatch.setattr("sys.argv", ["hpo", "run", "study.yaml", f"--storage={url}", f"run.storage={url}"])
    assert "sesame" not in same_command()


def test_the_command_that_is_shown_is_no_start_of_a_submitted_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hpo", "run", "study.yaml", "--timeout", "9", "--submission=1f"])
    assert same_command() == "hpo run study.yaml --timeout 9"


def test_the_commands_that_a_run_ends_with_work(tmp_path: Path) -> None:
    study = make_study(tmp_path / "a b")
    printed = hpo(
        "run",
        f"--storage=sqlite:///{tmp_path}/x.db",
        study,
        "--debug",
        "trainer.max_epochs=1",
        "--n-trials=1",
        "--workers",
        1,
        "optimizer.weight_decay=0.5",
        "--output-dir",
        tmp_path / "o u t",
    ).stdout
    commands = [shlex.split(line) for line in printed.partition("next:\n")[2].splitlines()]
    assert [words[:2] for words in commands] == [["hpo", "trials"], ["hpo", "train"], ["hpo", "dashboard"]]
    assert len(json.loads(hpo(*commands[0][1:], "--json").stdout)) == 1
    assert "model: " in hpo(*commands[1][1:], "--epochs", 1).stdout


def test_a_cuda_graph_on_a_cpu_is_refused_before_anything_runs(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    result = hpo("run", study, "trainer.cuda_graph=true", "--devices", "cpu", code=2)
    assert "trainer.cuda_graph: needs CUDA devices, and a worker is on cpu" in result.stderr
    assert not list(tmp_path.rglob("*.db"))


def test_the_version_is_that_of_the_package() -> None:
    assert hpo("--version").stdout == f"hpo-service {hpo_package.__version__}\n"


@pytest.mark.parametrize("command", [("run", "study.yaml"), ("init", "there"), ("doctor",)])
def test_a_system_without_fork_is_refused_by_any_command(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpo.errors.os", SimpleNamespace(name="nt"))
    result = hpo(*command, code=3)
    assert result.stderr.startswith("hpo runs on Linux, on macOS and in WSL; Windows itself can't fork")
    assert "wsl --install" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Closes a folder to this user; root, who may run the tests, can look into any."""

    def close(folder: Path) -> None:
        def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any = ".", *arguments: Any, **more: Any) -> Any:
                if isinstance(path, str | os.PathLike) and folder in Path(path).parents:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
                return real(path, *arguments, **more)

            return call

        for name in ("stat", "scandir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))

    return close


@pytest.mark.parametrize("command", ["status", "best", "logs", "train", "delete", "enqueue"])
def test_a_database_in_a_folder_that_is_closed_to_this_user(
    looked_at: Path, closed: Callable[[Path], None], command: str
) -> None:
    more = {"logs": [0], "train": ["--trial", 1], "delete": ["--yes"], "enqueue": ["model.hidden=3"]}
    closed(looked_at.parent / "runs")
    said = hpo(command, looked_at, *more.get(command, []), code=3).stderr
    assert "study.db: can't open the database: " in said
    assert "Permission denied" in said
    assert "\n  fix: " in said


def test_an_output_folder_that_is_closed_to_this_user(studies: Studies, closed: Callable[[Path], None]) -> None:
    storage = f"run.storage=sqlite:///{studies.folder / 'x.db'}"
    with studies.open(storage) as (view,):
        trial, _ = ask(view)
        trial.set_user_attr(BEST_ATTR, {"epoch": 1, "metrics": {}, "checkpoint": "trials/0/best.pt"})
        view.study.tell(trial, 1.5)
    arguments = (studies.folder / "study.yaml", storage)
    (studies.folder / "runs" / "tiny" / "trials" / "0" / "attempt-1").mkdir(parents=True)
    closed(studies.folder / "runs")
    assert "best.pt (there is no such file here)" in hpo("best", *arguments).stdout
    for command in (("logs", arguments[0], 0, storage), ("train", *arguments, "--trial", "best")):
        said = hpo(*command, code=3).stderr
        assert re.search(r"runs/tiny/\S+: can't be read: Permission denied\n  fix: ask its owner", said)


@pytest.mark.parametrize(("overrides", "device"), [([], "cuda:2"), (["run.devices=cpu"], "cpu")])
def test_the_final_training_is_on_the_device_of_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = load_spec(make_study(tmp_path), ["run.devices=cuda:2", *overrides])
    assert _peers(Builder(spec)).devices == (device,)


@pytest.mark.parametrize(
    ("devices", "size", "used"),
    [
        ("cuda:3,cuda:1,cuda:0", 1, ("cuda:1",)),
        ("cuda:0,cuda:1,cuda:2,cuda:3", 2, ("cuda:0", "cuda:1")),
        ("cuda:1+cuda:2,cuda:1+cuda:0", 2, ("cuda:1", "cuda:0")),
    ],
)
def test_the_final_training_of_a_study_from_a_larger_machine_is_on_a_device_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, size: int, used: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spec = load_spec(make_study(tmp_path), [f"run.devices='{devices}'", f"trainer.devices={size}"])
    assert training_slot(spec).names == used


def test_a_final_training_without_a_device_of_the_study_is_refused_with_one_that_is_here(tmp_path: Path) -> None:
    said = hpo("train", make_study(tmp_path), "run.devices=cuda:97", code=2).stderr
    assert "run.devices: no such device here\n  value: cuda:97\n  fix: there are cpu" in said
    assert "; for this training alone add `run.devices=c" in said


@pytest.mark.parametrize("buffering", [0, -1], ids=["unbuffered", "buffered"])
def test_a_final_training_whose_output_has_no_reader_any_more_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], buffering: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb", buffering), write_through=True) as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(KeyboardInterrupt), _resumable():
            print("epoch 1", flush=True)
    assert capsys.readouterr().err == "\ninterrupted; the same command resumes it\n"


def test_a_pipe_of_the_study_s_own_that_breaks_is_an_error_of_a_final_training(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match="a pipe of the study's own code broke: a helper is gone"), _resumable():
        raise BrokenPipeError("a helper is gone")
    assert not capfd.readouterr().err


def test_a_final_training_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    said = hpo("train", make_study(tmp_path), "run.output_dir=/proc/runs", code=3).stderr
    assert said.startswith("/proc: can't be written to: ")
    assert "\n  fix: run this as a user who may write there\n" in said


def test_a_list_for_an_objective_that_draws_it_is_enqueued_as_it_will_be_stored(tmp_path: Path) -> None:
    text = "study: {name: drawn, direction: minimize, n_trials: 3}\nobjective: {_target_: parts.objective}\n"
    code = "def objective(trial):\n    return float(len(trial.suggest_categorical('x', [(3, 3), (5,)])))\n"
    study = make_study(tmp_path, text, code)
    assert hpo_json("enqueue", study, "x=[5]") == {
        "study": "drawn",
        "trial": 0,
        "params": {"x": "[5]"},
        "same_as": [],
    }
    assert hpo_json("enqueue", study, "x=[5]")["same_as"] == [0]
