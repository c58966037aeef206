"""`check_study`, and `hpo check` stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpo.checks.checks import check_imports, check_search, check_study
from hpo.config.spec import load_spec
from hpo.errors import InputError
from tests.support.commands import STUDY, Result, hpo, make_study

pytestmark = pytest.mark.full

STAGES = ["structure", "imports", "meaning", "preflight"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("checked"))


def checked(file: Path, *arguments: str, code: int = 0) -> tuple[dict[str, Any], Result]:
    result = hpo("check", file, "--json", "--device", "cpu", *arguments, code=code)
    return json.loads(result.stdout), result


def test_warnings_of_imports_come_before_those_of_meaning(file: Path) -> None:
    assert check_study(load_spec(file)) == []
    file.with_name("more.py").write_text(
        "import parts\nclass Open(parts.Net):\n    def __init__(self, **more): ...\n"
    )
    odd = ["model={_target_: more.Open, hidden: 4}", "lr_scheduler.T_max=9", "run.workers=7"]
    found = check_study(load_spec(file, odd))
    assert [item.path for item in found] == [
        "model.hidden",
        "search_space[model.hidden]",
        "lr_scheduler.T_max",
        "model.hidden",  # it is searched
        "run.workers",
    ]
    assert str(found[0]).startswith(
        "command line: model.hidden: `more.Open` takes any argument, so `hidden` can't"
    )
    assert [item.path for item in check_study(load_spec(file, odd), search=False)] == [
        "model.hidden",
        "lr_scheduler.T_max",
    ]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (
            "study={name: tiny, pruner: none, objectives: {val_los: minimize, val_mae: minimize}}",
            "study.objectives",
        ),
        ("study={name: tiny, pruner: none, constraints: {val_maee: '<= 1'}}", "study.constraints"),
        ("study.metric=val_maee", "study.metric"),
    ],
)
def test_every_metric_that_a_study_names_is_recorded(file: Path, override: str, path: str) -> None:
    spec = load_spec(file, [override, "study.direction=minimize"] if path == "study.metric" else [override])
    with pytest.raises(InputError, match="nothing records this metric") as caught:
        check_imports(spec)
    assert caught.value.path.startswith(path)
    assert "did you mean `val_" in caught.value.fix


@pytest.mark.parametrize(
    ("loader", "path", "said"),
    [
        ("{persistent_workers: true}", "loader.persistent_workers", "needs worker processes"),
        ("{collate_fn: {_target_: parts.nowhere}}", "loader.collate_fn._target_", "nowhere"),
        ("{collate_fn: {_target_: parts.mae, wide: 3}}", "loader.collate_fn.wide", "wide"),
        ("{limit_train_batches: 1.5}", "loader.limit_train_batches", "is neither batches nor a fraction"),
        ("{overfit_batches: 0}", "loader.overfit_batches", "must be at least 1"),
    ],
)
def test_what_a_loader_can_not_do_is_refused(file: Path, loader: str, path: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        check_imports(load_spec(file, [f"loader={loader}"]))
    assert caught.value.path == path


def test_a_metric_of_a_second_validation_set_is_a_warning_until_the_data_is_there(file: Path) -> None:
    spec = load_spec(file, ["study.metric=val_noisy_loss"])
    (warned,) = [item for item in check_imports(spec) if "validation sets" in str(item)]
    assert "one of them called `noisy`" in str(warned)


@pytest.mark.parametrize(("path", "fits"), [("model.dropout", True), ("model.hidden", False)])
def test_a_parameter_that_gives_the_model_other_weights_can_not_be_perturbed(
    file: Path, path: str, fits: bool
) -> None:
    ranges = "model.dropout: {type: float, low: 0, high: 0.5}, model.hidden: {type: int, low: 2, high: 8}"
    space = f"search_space={{{ranges}}}"
    spec = load_spec(file, [space, "study.pruner=none", f"study.scheduler={{name: pbt, perturb: [{path}]}}"])
    if fits:
        check_imports(spec)
        return
    with pytest.raises(InputError, match="the model has other weights then") as refused:
        check_imports(spec)
    assert (refused.value.path, refused.value.value) == ("study.scheduler.perturb", "model.hidden")


def test_the_search_is_started_in_a_database_that_is_thrown_away(file: Path) -> None:
    check_search(load_spec(file))
    assert not (file.parent / "runs").exists()
    with pytest.raises(InputError, match="the grid sampler needs a step here"):
        check_search(load_spec(file, ["study.sampler=grid"]))


def test_a_good_study_passes_all_stages_and_leaves_nothing(file: Path) -> None:
    before = sorted(file.parent.iterdir())
    data, result = checked(file, "--workers", "2")
    assert sorted(file.parent.iterdir()) == before
    assert [(stage["stage"], stage["status"]) for stage in data["stages"]] == [(name, "ok") for name in STAGES]
    assert (data["study"], data["ok"]) == ("tiny", True)
    (device,) = data["devices"]
    assert (device["device"], device["workers"]) == ("cpu", 2)
    assert device["largest"]["params"] == {"model.hidden": 8}
    # the sum of three trials, which may differ from the product in the last bit
    assert data["estimated_seconds"] >= 3 * device["base"]["trial_s"] * (1 - 1e-9)
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("override", "stage", "path"),
    [
        ("study.n_trials=none", "structure", "study.n_trials"),
        ("model._target_=parts.Nte", "imports", "model._target_"),
        ("study.sampler=grid", "meaning", "search_space[optimizer.lr]"),
        ("run.devices=cuda:99", "meaning", "run.devices"),
        ("data.broken=true", "preflight", "data._target_"),
    ],
)
def test_what_comes_after_an_error_is_not_reached(file: Path, override: str, stage: str, path: str) -> None:
    result = hpo("check", file, "--json", override, code=2)
    data = json.loads(result.stdout)
    at = STAGES.index(stage)
    statuses = [item["status"] for item in data["stages"]]
    after_imports = ["ok", "not reached"]  # what the file means needs no imports
    assert statuses == ["ok"] * at + ["error"] + (after_imports if at == 1 else ["not reached"] * (3 - at))
    assert data["stages"][at]["error"]["path"] == path
    assert data["stages"][at]["error"]["fix"]
    assert (data["ok"], data["devices"], data["estimated_seconds"]) == (False, [], None)
    assert "Traceback" not in result.stderr


def test_warnings_do_not_fail_the_check(file: Path) -> None:
    data, _ = checked(file, "lr_scheduler.T_max=7", "run.workers=9")
    meaning = data["stages"][2]
    assert (meaning["status"], data["ok"]) == ("warnings", True)
    assert [(item["path"], item["value"]) for item in meaning["warnings"]] == [
        ("lr_scheduler.T_max", "7"),
        ("run.workers", "9"),
    ]


def test_people_read_a_line_for_each_stage_and_what_it_costs(file: Path) -> None:
    printed = hpo("check", file, "--device", "cpu", "lr_scheduler.T_max=7").stdout
    lines = printed.splitlines()
    assert lines[:2] == ["structure  ok", "imports    ok"]
    assert lines[2] == "meaning    1 warning"
    assert lines[3].startswith("  warning: command line: lr_scheduler.T_max: CosineAnnealingLR spans 7 epochs")
    assert "preflight  ok" in lines
    assert "  batch: 16 x 4, 16 x 1 → 16 x 1, 25 parameters" in lines
    assert any(line.startswith("the whole study: 6 trials take at most about ") for line in lines)


def test_a_study_that_is_given_epochs_takes_as_long_as_they_do(file: Path) -> None:
    data, _ = checked(file, "study.epochs=6", "--workers", "1")
    device = data["devices"][0]
    slowest = max(device["base"]["trial_s"], device["largest"]["trial_s"])
    assert data["estimated_seconds"] == pytest.approx(6 / load_spec(file).trainer.known_epochs * slowest)  # type: ignore[operator]
    assert "the whole study: 1 trial takes at most about " in hpo("check", file, "study.n_trials=1").stdout
    assert "the whole study: 6 epochs take at most about " in hpo("check", file, "study.epochs=6").stdout
    assert "the whole study: 6 trials take at most about " in hpo("check", file, "study.epochs=600").stdout


def test_an_error_is_shown_whole_with_debug_only(file: Path) -> None:
    plain = hpo("check", file, "data.broken=true", code=2)
    assert "preflight  error" in plain.stdout
    assert "data._target_: building it failed: RuntimeError: the data is broken" in plain.stdout
    assert "Traceback" not in plain.stdout + plain.stderr
    full = hpo("check", file, "data.broken=true", "--debug", code=2)
    assert "Traceback" in full.stderr
    assert 'raise RuntimeError("the data is broken")' in full.stderr


def test_a_file_without_a_search_space_is_refused(tmp_path: Path) -> None:
    path = make_study(tmp_path, STUDY[: STUDY.index("search_space:")])
    result = hpo("check", path, code=2)
    assert "structure  error" in result.stdout
    assert "there is nothing to search" in result.stdout
    assert "imports    not reached" in result.stdout


@pytest.mark.parametrize(
    "override", ["run.devices=[cuda:0, cuda:1]", "trainer.device=cuda", "trainer.cuda_graph=true"]
)
def test_devices_of_other_machines_are_left_to_the_agents_there(
    file: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("HPO_STORAGE", "postgresql://user@host/db")
    said = hpo("check", file, "run.on=slurm", override).stdout
    assert "preflight  left out: cuda" in said
    assert "each agent that `slurm` places checks its own machine's devices" in said
    stage = checked(file, "run.on=slurm", override, code=2 if "graph" in override else 0)[0]["stages"][-1]
    assert stage["status"] == ("not reached" if "graph" in override else "ok")  # the processor was asked for
    for local in ("run.on=local", "study.n_trials=2"):
        assert "fix: " in hpo("check", file, override, local, code=2).stdout


def test_what_is_here_of_the_devices_is_tried_and_the_rest_is_said(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPO_STORAGE", "postgresql://user@host/db")
    said = hpo("check", file, "run.on=slurm", "run.devices=cpu").stdout
    assert "preflight  ok\n  note: each agent that `slurm` places checks" in said
    refused = hpo("check", file, "run.on=slurm", "run.devices=gpu0", code=2).stdout
    assert "command line: run.devices: is not a device name\n    value: gpu0" in refused
