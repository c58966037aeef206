"""What a study begins with: the base config, another study's trials, enqueued trials."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpo.cli.enqueue import _is_override
from hpo.config.code import code_identity
from hpo.config.schema_study import FARTHEST
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError, StudyError
from hpo.storage.attributes import BASELINE_ATTR, CONFIG_ATTR, ORIGIN_ATTR
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.study_storage import StudyStorage
from hpo.study import open_study
from hpo.study.config_record import keep_code_and_config
from hpo.study.initial_trials import _PATIENCE, _take_over, begin, known_trials
from hpo.study.open_study import OpenStudy, load_study, start_study
from hpo.study.queue import enqueue
from hpo.wording import are
from tests.support.commands import MODEL, PATIENCE, STUDY, hpo, hpo_json, make_study
from tests.support.in_process import workers_in_process
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full

BASELINE = "study.baseline=true"


def own(view: OpenStudy) -> list[optuna.trial.FrozenTrial]:
    return view.study.get_trials(deepcopy=False)


def test_the_base_config_is_the_first_trial(studies: Studies) -> None:
    with studies.open(BASELINE) as (view,):
        trial, params = ask(view)
        assert (trial.number, params) == (0, {"optimizer.lr": 0.01, "model.hidden": 4})
        assert trial.user_attrs[BASELINE_ATTR]
        assert ask(view)[1] != params


@pytest.mark.usefixtures("in_process")
def test_it_counts_among_the_studys_trials(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--workers", 2, "--n-trials", 2, BASELINE)
    hpo("run", study, "--workers", 2, "--n-trials", 3, BASELINE)
    trials = hpo_json("trials", study, BASELINE)
    assert [trial["outcome"] for trial in trials] == ["complete"] * 3
    assert [trial["params"]["model.hidden"] for trial in trials].count(4) >= 1
    assert trials[0]["params"] == {"optimizer.lr": 0.01, "model.hidden": 4}


def test_what_is_under_a_condition_that_does_not_hold_is_left_out(studies: Studies) -> None:
    text = STUDY + (
        "  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}\n"
        "  optimizer.momentum: {type: float, low: 0.0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}\n"
    )
    with studies.open(BASELINE, text=text) as (view,):
        assert "optimizer.momentum" not in ask(view)[1]


@pytest.mark.parametrize(
    ("override", "path", "fix"),
    [
        ("optimizer.lr=0.5", "optimizer.lr", "from 0.001 to 0.1"),
        ("model.hidden=99", "model.hidden", "from 2 to 8"),
        (
            "search_space={optimizer.eps: {type: float, low: 1e-9, high: 1e-7}}",
            "search_space[optimizer.eps]",
            "eps",
        ),
    ],
)
def test_a_base_config_outside_of_the_space_is_refused(
    studies: Studies, override: str, path: str, fix: str
) -> None:
    spec = studies.spec(BASELINE, override)
    with pytest.raises(InputError) as caught:
        start_study(spec)
    assert caught.value.path == path
    assert fix in caught.value.fix
    assert not (spec.output_dir / "study.db").exists()


def started_together(spec: StudySpec, count: int, monkeypatch: pytest.MonkeyPatch) -> list[OpenStudy]:
    """The study as threads have started it, which stand for processes."""
    # Python's parser counts its depth for all threads together.
    code = code_identity(spec)
    monkeypatch.setattr(open_study, "code_identity", lambda _: code)
    opened: list[OpenStudy] = []
    threads = [threading.Thread(target=lambda: opened.append(start_study(spec))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return opened


def test_processes_that_start_together_begin_once(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    with studies.open() as _:  # the tables are there; the study begins below
        pass
    spec = studies.spec(BASELINE, "study.name=together")
    opened = started_together(spec, 4, monkeypatch)
    try:
        assert [BASELINE_ATTR in trial.user_attrs for trial in own(opened[0])] == [True]
    finally:
        for each in opened:
            each.storage.close()


def test_initial_trials_that_were_broken_off_are_completed(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("it was interrupted")

    spec = studies.spec(BASELINE)
    with monkeypatch.context() as broken:
        broken.setattr(optuna.Study, "enqueue_trial", die)
        with pytest.raises(RuntimeError, match="it was interrupted"):
            start_study(spec)
    began = time.monotonic()
    with start_study(spec) as opened:
        assert time.monotonic() - began < _PATIENCE / 2, "it need not wait for itself"
        assert [trial.state for trial in own(opened)] == [TrialState.WAITING]
        assert begin(spec, opened.space, opened.storage, opened.study) == []


def test_processes_begin_once_on_every_database(
    studies: Studies, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = studies.spec(BASELINE, f"run.storage={database_url}")
    open_storage(spec.storage_url, create=True).close()
    opened = started_together(spec, 3, monkeypatch)
    try:
        storage, study_id = opened[0].storage, opened[0].study_id
        assert len(opened) == 3
        assert [BASELINE_ATTR in trial.user_attrs for trial in own(opened[0])] == [True]
        assert not _take_over(storage, study_id, None, ["somebody"])
        theirs = storage.get_study_system_attrs(study_id)["hpo:initial_trials"]
        assert [_take_over(storage, study_id, theirs, ["heir", number]) for number in range(2)] == [True, False]
    finally:
        for each in opened:
            each.storage.close()


@pytest.mark.parametrize("holder", ["dead", "alive"])
def test_initial_trials_are_taken_over_from_a_dead_process_only(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    with studies.open() as _:
        pass
    spec = studies.spec(BASELINE, "study.name=taken")
    with monkeypatch.context() as broken:
        broken.setattr("hpo.study.open_study.begin", lambda *_: [])
        opened = start_study(spec)
    other = Owner.current().in_process(os.getppid())
    pid = other.pid if holder == "alive" else 2**22 + 1  # no process has that id
    said = [other.host, other.boot_id, pid, other.start_time]
    opened.storage.set_study_system_attr(opened.study_id, "hpo:initial_trials", said)
    done = threading.Event()

    def go() -> None:
        begin(spec, opened.space, opened.storage, opened.study)
        done.set()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        if holder == "alive":
            assert not done.wait(1.0)
            assert own(opened) == []
            opened.storage.set_study_system_attr(opened.study_id, "hpo:begun", True)
        thread.join(PATIENCE)
        assert done.is_set()
        assert len(own(opened)) == (holder == "dead")
    finally:
        opened.storage.close()


# ---- another study's trials


@pytest.fixture(scope="module")
def trained_pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of six trials that ran."""
    study = make_study(tmp_path_factory.mktemp("trained") / "pilot")
    with workers_in_process():
        hpo("run", study, "--workers", 2, "study.name=pilot", "loss.nan=false")
    study.write_text(study.read_text().replace("name: tiny", "name: pilot"))
    return study


@pytest.fixture
def pilot(trained_pilot: Path, tmp_path: Path) -> Path:
    """A copy of it in the test's own folder."""
    shutil.copytree(trained_pilot.parent, tmp_path / "pilot")
    return tmp_path / "pilot" / trained_pilot.name


@pytest.mark.usefixtures("in_process")
def test_trials_of_another_study_are_known_and_do_not_count(pilot: Path, tmp_path: Path) -> None:
    study = make_study(tmp_path / "next")
    warm = ("study.warm_start=../pilot/study.yaml", "search_space[model.hidden].high=6")
    fitting = [trial for trial in hpo_json("trials", pilot) if trial["params"]["model.hidden"] <= 6]
    assert 0 < len(fitting) < 6
    out = hpo("run", study, "--n-trials", 2, "--workers", 1, *warm)
    assert f"{are(len(fitting), 'trial')} known from ../pilot/study.yaml; {6 - len(fitting)} more lie outside" in (
        out.stdout + out.stderr
    )
    assert [trial["outcome"] for trial in hpo_json("trials", study, *warm)] == ["complete"] * 2
    with load_study(load_spec(study, warm)) as opened:
        imported = [trial for trial in own(opened) if ORIGIN_ATTR in trial.system_attrs]
        assert [trial.system_attrs[ORIGIN_ATTR] for trial in imported] == [["pilot", t["trial"]] for t in fitting]
        assert [trial.value for trial in imported] == [trial["value"] for trial in fitting]
        assert all(trial.distributions == opened.space.distributions for trial in imported)
    hpo("run", study, "--n-trials", 3, "--workers", 1, *warm)
    assert len(hpo_json("trials", study, *warm)) == 3


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("study.warm_start=../nothing.yaml", "there is no such file"),
        ("study.warm_start=..", "study.warm_start: is a folder"),
        ("study.warm_start=~no-such-user/study.yaml", "there is no such file"),
        ("study.warm_start=study.yaml", "names this study itself"),
        (
            "study.metric=val_mae study.direction=minimize study.warm_start=../pilot/study.yaml",
            "optimises val_loss",
        ),
    ],
)
def test_a_study_that_can_not_be_started_from_is_refused(
    pilot: Path, tmp_path: Path, override: str, problem: str
) -> None:
    study = make_study(tmp_path / "next")
    result = hpo("run", study, *override.split(), code=2)
    assert result.stderr.startswith(("command line: study.warm_start: ", f"{study}"))
    assert problem in result.stderr
    assert not (study.parent / "runs").exists()


@pytest.mark.usefixtures("in_process")
def test_a_study_of_another_name_starts_from_that_of_its_own_file(pilot: Path) -> None:
    """As `--widen` advises where it can't be: the overrides make another study of the file."""
    other = ("study.name=second", "study.warm_start=study.yaml", "search_space[model.hidden].low=4")
    done = hpo("run", pilot, "--n-trials", 1, *other)
    assert "trials are known from study.yaml" in done.stdout + done.stderr


def test_a_study_that_never_ran_is_no_start(tmp_path: Path) -> None:
    make_study(tmp_path / "pilot")
    study = make_study(tmp_path / "next")
    spec = load_spec(study, ["study.warm_start=../pilot/study.yaml"])
    with pytest.raises(StudyError, match="hpo run"):
        start_study(spec)
    assert not (study.parent / "runs").exists()


@pytest.mark.usefixtures("in_process")
def test_a_trial_keeps_the_name_of_the_study_that_trained_it(pilot: Path, tmp_path: Path) -> None:
    second, third = make_study(tmp_path / "second"), make_study(tmp_path / "third")
    second.write_text(second.read_text().replace("name: tiny", "name: second\n  warm_start: ../pilot/study.yaml"))
    hpo("run", second, "--n-trials", 1)
    spec = load_spec(third, ["study.warm_start=../second/study.yaml"])
    trials, _ = known_trials(spec, SearchSpace.from_spec(spec))
    origins = [trial.system_attrs[ORIGIN_ATTR][0] for trial in trials]
    assert origins == ["pilot"] * len(hpo_json("trials", pilot)) + ["second"]


@pytest.mark.usefixtures("in_process")
def test_a_study_that_has_begun_needs_the_other_one_no_more(pilot: Path, tmp_path: Path) -> None:
    study = make_study(tmp_path / "next")
    warm = "study.warm_start=../pilot/study.yaml"
    hpo("run", study, "--n-trials", 1, warm)
    shutil.rmtree(pilot.parent)
    hpo("run", study, "--n-trials", 2, warm)
    assert [trial["outcome"] for trial in hpo_json("trials", study, warm)] == ["complete"] * 2


@pytest.mark.usefixtures("in_process")
def test_a_result_of_another_study_is_never_taken_over(pilot: Path, tmp_path: Path) -> None:
    study = make_study(tmp_path / "next")
    options = ("study.warm_start=../pilot/study.yaml", "study.duplicates=reuse")
    known = hpo_json("best", pilot)["params"]
    spec = load_spec(study, options)
    opened = start_study(spec)
    opened.study.enqueue_trial(known)
    opened.storage.close()
    hpo("run", study, "--n-trials", 1, *options)
    best = hpo_json("best", study, *options)
    assert best["params"] == known
    assert Path(best["checkpoint"]).is_file()


def test_objectives_in_another_order_are_refused(studies: Studies) -> None:
    count = "callbacks={parameter_count: true}"
    with studies.open(count, "study.objectives={val_loss: minimize, parameters: minimize}", at="pilot"):
        pass
    pilot = studies.folder / "pilot/study.yaml"
    swapped = "  objectives: {val_loss: minimize, parameters: minimize}\n"
    pilot.write_text(STUDY.replace("  pruner: none\n", f"  pruner: none\n{swapped}"))
    options = ("study.objectives={parameters: minimize, val_loss: minimize}", count)
    spec = studies.spec("study.warm_start=../pilot/study.yaml", *options, at="next")
    with pytest.raises(InputError, match="optimises val_loss"):
        start_study(spec)


def test_another_studys_trials_are_held_to_this_studys_bounds(studies: Studies) -> None:
    text = STUDY.replace("  pruner: none\n", '  pruner: none\n  constraints: {val_mae: "<= 10"}\n')
    with studies.open(text=text, at="pilot") as (view,):
        for violation, metrics in ((-7.0, {}), (0.5, {}), (-7.0, {"val_mae": 3.0, "lr": 0.5})):
            trial, _ = ask(view)
            trial.set_constraint("val_mae", violation)
            trial.set_user_attr("hpo:best", {"metrics": metrics})
            view.study.tell(trial, 1.0)
    bounds = 'study.constraints={val_mae: "<= 2", lr: "<= 1"}'
    spec = studies.spec("study.warm_start=../pilot/study.yaml", bounds, at="next")
    trials, _ = known_trials(spec, SearchSpace.from_spec(spec))
    assert [trial.constraints for trial in trials] == [
        {"val_mae": 1.0, "lr": FARTHEST},
        {"val_mae": 8.5, "lr": FARTHEST},
        {"val_mae": 1.0, "lr": -0.5},
    ]


# ---- hpo enqueue


@pytest.mark.usefixtures("in_process")
def test_an_enqueued_trial_runs_first(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    assert "trial 0 waits" in hpo("enqueue", study, "optimizer.lr=1e-2", "model.hidden=5").stdout
    queued = hpo_json("enqueue", study, "optimizer.lr=1e-2", "model.hidden=5.0")
    assert queued == {
        "study": "tiny",
        "trial": 1,
        "params": {"optimizer.lr": 0.01, "model.hidden": 5.0},
        "same_as": [0],
    }
    hpo("enqueue", study, "model.hidden=7")
    waiting = hpo_json("trials", study)
    assert [(trial["outcome"], trial["params"]) for trial in waiting[1:]] == [
        ("waiting", {"optimizer.lr": 0.01, "model.hidden": 5}),
        ("waiting", {"model.hidden": 7}),
    ]
    hpo("run", study, "--workers", 1, "--n-trials", 4)
    trials = hpo_json("trials", study)
    assert [trial["params"]["model.hidden"] for trial in trials][:3] == [5, 5, 7]
    assert [trial["params"]["optimizer.lr"] for trial in trials][:2] == [0.01, 0.01]
    assert [trial["outcome"] for trial in trials] == ["complete"] * 4
    full = hpo("enqueue", study, "model.hidden=7", "trainer.max_epochs=3", code=2)
    assert "is not searched" in full.stderr


@pytest.mark.usefixtures("in_process")
def test_what_the_study_is_run_with_is_given_to_enqueue_too(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    overrides = ("study.name=other", "search_space[model.hidden].high=16", f"run.output_dir={tmp_path / 'there'}")
    assert hpo_json("enqueue", study, *overrides, "model.hidden=12")["params"] == {"model.hidden": 12}
    hpo("run", study, *overrides, "--workers", 1, "--n-trials", 2)
    assert hpo_json("trials", study, *overrides)[0]["params"]["model.hidden"] == 12
    assert hpo_json("enqueue", study, *overrides, "study.n_trials=3", "model.hidden=12")["trial"] == 2
    full = hpo("enqueue", study, *overrides, "study.n_trials=3", "model.hidden=12", code=3)
    assert "study.n_trials" in full.stderr
    assert not (tmp_path / "runs").exists()


def test_the_budget_holds_for_enqueued_trials(tmp_path: Path) -> None:
    study = make_study(tmp_path, STUDY.replace("n_trials: 6", "n_trials: 1"))
    hpo("enqueue", study, "model.hidden=7")
    result = hpo("enqueue", study, "model.hidden=6", code=3)
    assert "study.n_trials" in result.stderr


@pytest.mark.parametrize(
    ("given", "first", "fix"),
    [
        ("model.hiden=5", "command line: model.hiden: is not searched", "did you mean `model.hidden`?"),
        ("model.hidden=50", "command line: model.hidden: is not in the search space", "from 2 to 8"),
        ("model.hidden=2.5", "command line: model.hidden: is not in the search space", "from 2 to 8"),
        ("model.hidden=many", "command line: model.hidden: is not in the search space", "from 2 to 8"),
        ("model.hidden", "command line: model.hidden: is not a parameter with its value", "path=value"),
        ("model.hidden=5 model.hidden=6", "command line: model.hidden: is given twice", "leave one"),
        ("study.n_trials=9", "command line: enqueue: no value of a parameter is given", "add one"),
        ("model.hidden=[", "command line: model.hidden: not a YAML value", "quote"),
        ("model.hidden=#5", "command line: model.hidden: YAML reads nothing of it", "quote"),
        (
            "optimizer.momentum=0.5",
            "command line: optimizer.momentum: is searched only under",
            "give `optimizer._t",
        ),
    ],
)
def test_what_can_not_be_enqueued_makes_no_study(tmp_path: Path, given: str, first: str, fix: str) -> None:
    text = STUDY + (
        "  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}\n"
        "  optimizer.momentum: {type: float, low: 0.0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}\n"
    )
    study = make_study(tmp_path, text)
    result = hpo("enqueue", study, *given.split(), code=2)
    assert result.stderr.startswith(first)
    assert fix in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("in_process")
def test_the_budget_of_a_study_that_runs_stays(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 1)
    opened = start_study(load_spec(study).with_options(n_trials=3))  # as another `hpo run` has it
    opened.storage.close()
    hpo("enqueue", study, "model.hidden=7")
    assert hpo_json("status", study)["n_trials"] == 3


@pytest.mark.usefixtures("in_process")
def test_a_study_whose_trials_are_claimed_gets_one_more_if_its_file_has_more(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 1)
    assert hpo_json("enqueue", study, "model.hidden=7")["trial"] == 1
    assert hpo_json("status", study)["n_trials"] == 2


def test_a_trial_that_a_worker_takes_at_once_keeps_its_number(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studies.open() as (view,):
        add = StudyStorage.create_new_trial

        def add_and_lose(*arguments: Any) -> int:
            made = add(*arguments)
            view.study.ask()
            return made

        monkeypatch.setattr(StudyStorage, "create_new_trial", add_and_lose)
        with start_study(view.spec) as opened:
            assert enqueue(view.spec, opened.storage, opened.study, {"model.hidden": 7}) == (0, [])


def test_two_that_are_enqueued_at_once_both_wait(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    with studies.open("study.n_trials=1", views=2) as (first, second):
        first.study.ask()
        add, numbers = StudyStorage.create_new_trial, []

        def add_after_the_other(*arguments: Any) -> int:
            monkeypatch.setattr(StudyStorage, "create_new_trial", add)
            numbers.append(enqueue(studies.spec(), second.storage, second.study, {"model.hidden": 7})[0])
            return add(*arguments)

        monkeypatch.setattr(StudyStorage, "create_new_trial", add_after_the_other)
        numbers.append(enqueue(studies.spec(), first.storage, first.study, {"model.hidden": 6})[0])
        assert numbers == [1, 2]
        assert first.budget() == 3


GRID = STUDY.replace(
    "{type: float, low: 1e-3, high: 1e-1, log: true}", "{type: categorical, choices: [0.01, 0.2]}"
).replace("{name: random, seed: 3}", "grid")


@pytest.mark.parametrize("kind", ["conv: 3", "- lin"])
def test_a_colon_or_dash_within_text_is_enqueued_as_an_override_reads_it(tmp_path: Path, kind: str) -> None:
    text = STUDY + f"  data.kind: {{type: categorical, choices: [{kind!r}, plain]}}\n"
    study = make_study(tmp_path, text, MODEL.replace("def load(", "def load(kind='plain', "))
    override = f"data.kind={kind}"
    assert load_spec(study, [override]).base_config()["data"]["kind"] == kind
    assert hpo_json("enqueue", study, override)["params"] == {"data.kind": kind}


@pytest.mark.usefixtures("in_process")
def test_a_grid_is_walked_whole_beside_what_it_begins_with(tmp_path: Path) -> None:
    study = make_study(tmp_path, GRID.replace("n_trials: 6", "n_trials: 100").replace("high: 8}", "high: 4}"))
    hpo("enqueue", study, "model.hidden=3", "optimizer.lr=0.01", code=0)
    assert hpo_json("status", study)["n_trials"] == 7
    other = make_study(
        tmp_path / "other", GRID.replace("n_trials: 6", "n_trials: 100").replace("high: 8}", "high: 4}")
    )
    hpo("run", other, "--workers", 2, BASELINE)
    trials = hpo_json("trials", other, BASELINE)
    assert len(trials) == 6
    assert len({tuple(trial["params"].values()) for trial in trials}) == 6


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("trials", [5, 9])
def test_a_grid_that_is_through_takes_no_trial_and_says_what_to_do(tmp_path: Path, trials: int) -> None:
    study = make_study(
        tmp_path, GRID.replace("n_trials: 6", f"n_trials: {trials}").replace("high: 8}", "high: 3}")
    )
    point = ("model.hidden=3", "optimizer.lr=0.01")
    hpo("run", study, "--n-trials", 2)
    assert hpo_json("enqueue", study, *point)["trial"] == 2  # points are left, and the file has more trials
    hpo("run", study)
    error = hpo("enqueue", study, *point, code=3).stderr
    assert "the grid has no point left: every trial of it has been claimed" in error
    assert "n_trials" not in error
    assert "fix: train them again with `hpo train --trial " in error
    hpo("train", study, *error.split("`hpo train ")[1].split("`")[0].split())


def test_a_grid_draws_no_single_values(tmp_path: Path) -> None:
    text = STUDY.replace(
        "{type: float, low: 1e-3, high: 1e-1, log: true}", "{type: categorical, choices: [0.1, 0.2]}"
    )
    study = make_study(tmp_path, text.replace("{name: random, seed: 3}", "grid"))
    assert "a grid draws no single values" in hpo("enqueue", study, "model.hidden=3", code=2).stderr
    hpo("enqueue", study, "model.hidden=3", "optimizer.lr=0.1")


def test_a_stored_config_tells_no_password(studies: Studies) -> None:
    spec = studies.spec("run.storage=postgresql://me:s3cret@host/db")
    study = optuna.create_study()
    keep_code_and_config(spec, study)
    assert study.user_attrs[CONFIG_ATTR]["run"]["storage"] == "postgresql://me:***@host/db"
    assert "s3cret" not in str(study.user_attrs)


def test_only_keys_of_the_file_are_overrides() -> None:
    overrides = ["study.n_trials=3", "run.storage=x", "search_space[a.b].low=1", "search_space.a=1"]
    assert all(map(_is_override, overrides))
    # A function may call its own parameters so.
    assert not any(map(_is_override, ["run.length=3", "study.size=4", "model.hidden=4", "search_spaces.low=1"]))
