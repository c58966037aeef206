"""The card beside an exported model: what it says is so, and its code works."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpo.final.export_model import export_model
from hpo.final.model_card import code_to_load
from hpo.final.models import best_weights, load_model
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from hpo.trial.trackers import Shown
from tests.support.attempts import run
from tests.support.commands import MODEL, hpo
from tests.support.finished import finished_study
from tests.support.studies import Studies


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[OpenStudy]:
    overrides = (
        "callbacks.notifier={url: 'json://127.0.0.1:9/hook-of-ours', retries: 0}",
        "callbacks.early_stopping={patience: 9}",
    )
    with finished_study(tmp_path_factory.mktemp("a study's"), ready_sqlite_file, *overrides, n_trials=2) as opened:
        yield opened


def card_of(view: OpenStudy, path: Path) -> str:
    return Path(export_model(view, "best", path, command="hpo best study.yaml | x")["card"]).read_text()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pt2"])
def test_its_code_loads_the_model(
    view: OpenStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    card = card_of(view, tmp_path / f"model{suffix}")
    match = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert match
    monkeypatch.chdir(tmp_path)
    names: dict[str, torch.nn.Module] = {}
    exec(match[1], names)
    inputs = Builder(view.spec).data(view.spec.resolve())["val"].tensors[0]
    with torch.no_grad():
        assert torch.allclose(names["model"](inputs), load_model(view.spec)(inputs))
    if suffix != ".pt2":
        assert not names["model"].training


def test_its_code_has_numbers_that_are_not_finite() -> None:
    config = {"_target_": "m.Net", "clip": math.inf, "deep": [{"low": -math.inf, "n" * 90: [math.nan, 1.5]}]}
    code = code_to_load(config, Path("model.pt"))
    names: dict[str, Any] = {}
    exec(code.partition("config = ")[2].partition("\nmodel = ")[0].join(("found = (", ")")), names)
    assert repr(names["found"]) == repr(config)


PRINTED = "import torch; print(repr(model(torch.ones(1, 4)).item()))"


@pytest.mark.full
@pytest.mark.parametrize(("suffix", "place"), [(".safetensors", "."), (".pt", "moved")])
def test_moved_without_the_study_it_loads_in_a_process_from_anywhere(
    tmp_path: Path, ready_sqlite_file: Path, suffix: str, place: str
) -> None:
    made, moved = tmp_path / "made", tmp_path / "moved"
    with finished_study(tmp_path / "study", ready_sqlite_file, n_trials=1) as opened:
        card = card_of(opened, made / f"model{suffix}")
        card = card_of(opened, made / f"model{suffix}")  # over the first one
        with torch.no_grad():
            expected = load_model(opened.spec)(torch.ones(1, 4)).item()
    assert str(tmp_path) not in card
    made.rename(moved)
    shutil.rmtree(tmp_path / "study")
    code = card.partition("```python\n")[2].partition("```")[0]
    assert 'Path(".")' in code
    code = code.replace('Path(".")', f'Path("{place}")')
    command = [sys.executable, "-c", f"{code}\n{PRINTED}"]
    folder = moved if place == "." else tmp_path
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(expected, abs=1e-6)
    assert {item.name for item in moved.iterdir()} == {f"model{suffix}{more}" for more in ("", ".md", ".code")}


def test_it_says_what_the_model_is(view: OpenStudy, tmp_path: Path) -> None:
    card, found = card_of(view, tmp_path / "model.pt"), best_weights(view, "best")
    count = sum(parameter.numel() for parameter in load_model(view.spec).parameters())
    for text in (
        f"| Trial | {found.trial}, of 2 that have ended |",
        f"| Seed | {found.seed} |",
        f"| val_loss | {found.metrics['val_loss']:.6g} |",
        f"| `optimizer.lr` | {found.params['optimizer.lr']} |",
        f"| Parameters | {count:,} |",
        "| Data | `parts.load()` |",
        f"| torch | {torch.__version__} |",
        "| Licence | not stated |",
        "hpo best study.yaml | x",
        f"hidden: {found.params['model.hidden']}",
        "patience: 9",
    ):
        assert text in card


def test_a_notifier_s_address_is_not_passed_on(view: OpenStudy, tmp_path: Path) -> None:
    assert "hook-of-ours" not in card_of(view, tmp_path / "model.pt")


def test_what_is_secret_is_not_in_it(tmp_path: Path, ready_sqlite_file: Path) -> None:
    code = MODEL.replace("def load(samples=96, broken=False):", "def load(samples=96, broken=False, **places):")
    given = [
        "data={_target_: parts.load, token: sesame, store: {api_key: sesame, password: 91357, pad_token: x}}",
        "data.url='mysql://h/d?user=me&password=sesame'",
        "data.secret=sesame",
    ]
    studies = Studies(tmp_path, ready_sqlite_file)
    studies.spec(code=code)
    with studies.open(*given) as (view,):
        run(view)
        hpo("best", view.spec.path, *given, "--export", tmp_path / "a.pt")
    card = (tmp_path / "a.pt.md").read_text()
    assert "sesame" not in card
    assert "91357" not in card
    assert "pad_token: x" in card
    assert "data.secret=***" in card


def test_what_is_secret_is_not_among_the_parameters_of_a_run_that_is_shown_elsewhere(tmp_path: Path) -> None:
    config = {"data": {"_target_": "parts.load", "token": "sesame", "samples": 8}}
    shown = Shown(Studies(tmp_path, tmp_path).spec(), RunPlace(tmp_path, "run"), config)
    assert shown.tensorboard({})["hparams"] == {
        "data._target_": "parts.load",
        "data.token": "***",
        "data.samples": 8,
    }
