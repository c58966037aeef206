"""`hpo init`: what it writes, and what it leaves alone."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from hpo.checks.checks import check_search, check_study
from hpo.checks.preflight import preflight
from hpo.config.spec import load_spec
from hpo.config.yaml_source import read_yaml
from hpo.search.auto_sampler import chosen_sampler
from hpo.trial.resources import Slot
from tests.support.commands import hpo

TEMPLATES = ("classification", "regression")
FILES = {"study.yaml", "model.py", "data.py", "README.md", "study.schema.json"}

each = pytest.mark.parametrize("template", TEMPLATES)


@each
def test_a_template_is_a_whole_study(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "study"
    printed = hpo("init", folder, "--template", template, code=0).stdout
    assert {path.name for path in folder.iterdir()} == FILES
    for command in ("check", "run", "train"):
        assert f"  hpo {command} {folder}/study.yaml" in printed
    spec = load_spec(folder / "study.yaml", require_search_space=True)
    assert check_study(spec) == []
    check_search(spec)
    (found,) = preflight(spec, [Slot("cpu", "cpu", None, 1)])
    assert found.warnings == []
    assert found.largest is not None
    assert {path.name for path in folder.iterdir()} == FILES


@each
def test_an_editor_finds_the_schema_and_it_fits(template: str, tmp_path: Path) -> None:
    hpo("init", tmp_path, "--template", template, code=0)
    header, *lines = (tmp_path / "study.yaml").read_text().splitlines()
    name = header.removeprefix("# yaml-language-server: $schema=")
    validator = Draft202012Validator(json.loads((tmp_path / name).read_text()))
    assert list(validator.iter_errors(read_yaml(tmp_path / "study.yaml").data)) == []
    assert sum("#" in line for line in lines) >= 10


@each
def test_the_scheduler_that_a_template_has_in_a_comment_fits(template: str, tmp_path: Path) -> None:
    hpo("init", tmp_path, "--template", template, code=0)
    study = tmp_path / "study.yaml"
    lines = study.read_text().splitlines()
    assert chosen_sampler(load_spec(study)).name == "curve_gp"
    kept = [line for line in lines if not line.strip().startswith(("n_trials:", "pruner:"))]
    keys = ("  # epochs:", "  # scheduler:")
    study.write_text("\n".join(line.replace("# ", "", 1) if line.startswith(keys) else line for line in kept))
    spec = load_spec(study)
    assert spec.study.scheduler is not None
    assert spec.study.scheduler.name == "freeze_thaw"
    assert spec.study.epochs == 200
    assert check_study(spec) == []


@each
def test_a_template_needs_torch_only(template: str, tmp_path: Path) -> None:
    hpo("init", tmp_path, "--template", template, code=0)
    for name in ("model.py", "data.py"):
        tree = ast.parse((tmp_path / name).read_text())
        found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert {module.partition(".")[0] for module in found} <= {"torch", "math", "itertools"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine as well")
    refused = hpo("init", tmp_path, code=2)
    assert "has model.py already, and nothing is overwritten" in refused.stderr
    assert "fix: give a new folder" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model.py", "notes.txt"}
    assert (tmp_path / "model.py").read_text() == "mine"


def test_a_folder_with_other_files_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    hpo("init", tmp_path, code=0)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"notes.txt"}


def test_a_folder_that_can_not_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = hpo("init", tmp_path / "file" / "study", code=2)
    assert "can't be written to: " in refused.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in hpo("init", tmp_path / "study", code=2).stderr


def test_an_unknown_template_is_refused_with_those_there_are(tmp_path: Path) -> None:
    refused = hpo("init", tmp_path / "study", "--template", "vision", code=2)
    assert all(name in refused.stderr for name in TEMPLATES)
    assert not (tmp_path / "study").exists()
