"""The checks of `hpo run`, in a process of their own: what they find, and how that process may end."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from hpo.config.spec import load_spec
from hpo.errors import InputError, StudyError
from hpo.execution.checking import Checked, checked
from hpo.execution.run import prepared
from tests.support.commands import MODEL, make_study


def check(folder: Path, *overrides: str, code: str = MODEL) -> Checked:
    return checked(load_spec(make_study(folder, code=code), list(overrides)))


def test_the_findings_and_the_slots_come_back(tmp_path: Path) -> None:
    found = check(
        tmp_path,
        "run.workers=3",
        "run.devices=[cpu]",
        "study.pruner={name: median, n_startup_trials: 5}",
        "study.n_trials=4",
    )
    assert [slot.label for slot in found.slots] == ["cpu"] * 3
    assert any("median" in str(finding) for finding in found.findings)


def test_an_error_comes_back_as_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        check(tmp_path, "model.hiden=3")
    error = caught.value
    assert (error.path, error.file) == ("model.hiden", "command line")
    assert "hidden" in error.fix


def test_an_error_of_an_import_comes_back_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ZeroDivisionError"):
        check(tmp_path, code=f"{MODEL}\n1 / 0\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("os._exit(7)", "ended with exit code 7"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_a_death_in_an_import_is_told_with_its_cause(tmp_path: Path, line: str, said: str) -> None:
    others = multiprocessing.active_children()  # of tests before
    with pytest.raises(StudyError, match=f"the process that checks the study {said}"):
        check(tmp_path, code=f"import os\n{line}\n{MODEL}")
    assert set(multiprocessing.active_children()) <= set(others)


def test_a_fork_of_a_module_does_not_answer_as_well(tmp_path: Path) -> None:
    found = check(tmp_path, code=f"import os\nos.fork()\n{MODEL}")
    assert len(found.slots) == 1


def test_what_a_module_prints_is_no_output_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(tmp_path, code=f"print('imported')\n{MODEL}")
    assert capfd.readouterr().out == ""


def test_the_modules_are_not_imported_here(tmp_path: Path) -> None:
    before = set(sys.modules)
    check(tmp_path)
    assert not [name for name in set(sys.modules) - before if name.endswith("parts")]


def test_the_environment_is_that_of_now_and_not_of_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"import os\nopen('{tmp_path}/said', 'a').write(os.environ.get('WHERE', 'nowhere') + ' ')\n{MODEL}"
    for place in ("here", "there"):
        monkeypatch.setenv("WHERE", place)
        check(tmp_path, code=said)
    monkeypatch.delenv("WHERE")
    check(tmp_path, code=said)
    assert (tmp_path / "said").read_text() == "here there nowhere "


@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_token_of_a_dashboard_stays_here(here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_DASHBOARD_TOKEN", "a token")
    said = f"import os\nopen('{tmp_path}/said', 'a').write(os.environ.get('HPO_DASHBOARD_TOKEN', 'none'))\n{MODEL}"
    checked(load_spec(make_study(tmp_path, code=said)), here=here)
    assert (tmp_path / "said").read_text() == "none"
    assert os.environ["HPO_DASHBOARD_TOKEN"] == "a token"


@pytest.mark.full
def test_the_checks_of_a_driver_leave_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a fork server, which has imported torch, would live as long as the driver")

    monkeypatch.setattr("hpo.trial.mainless.SERVER.ensure_running", refuse)
    monkeypatch.setattr("hpo.trial.mainless.SERVER.connect_to_new_process", refuse)
    others = multiprocessing.active_children()  # of tests before
    assert prepared(load_spec(make_study(tmp_path)), refuse, here=False) == []
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.full
def test_a_driver_refuses_devices_that_no_machine_has(tmp_path: Path) -> None:
    spec = load_spec(make_study(tmp_path), ["run.devices=[cuda:7]"])
    assert checked(spec, here=False).slots == []
    with pytest.raises(InputError, match="is not a device name"):
        checked(load_spec(spec.path, ["run.devices=[gpu]"]), here=False)
