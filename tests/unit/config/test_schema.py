"""The JSON Schema of study.yaml: it takes every study that runs, and refuses what an editor should mark."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpo.checks.json_schema import study_schema
from hpo.config.paths import assign, split_path
from hpo.config.schema import StudyFile, model_of
from hpo.config.yaml_source import read_yaml
from hpo.trial.callbacks import CALLBACKS
from tests.support.commands import STUDY, hpo
from trainer import BatchOptions

STUDIES = sorted((Path(__file__).parents[3] / "studies").glob("*/study.yaml"))

#: Every section by its shorthand, by an interpolation, or switched off.
ODD = """
study: {name: odd, sampler: tpe, pruner: , n_trials: "${trainer.max_epochs}"}
run: {timeout: 2h, devices: [cpu], workers: "${study.n_trials}"}
data: {_target_: parts.load, samples: 96}
model: {_target_: parts.Net}
step: {_target_: parts.step}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loader: {batch_size: "${data.samples}", shuffle: "${trainer.compile}"}
trainer: {max_epochs: 3, precision: "${study.x}", compile: false}
callbacks: {early_stopping: , checkpoint: {keep_best: 2}, csv: false, mine: {_target_: parts.Mine, more: 1}}
search_space:
  optimizer.lr: {type: float, low: "${optimizer.lr}", high: 1.0, log: true}
  loader.batch_size: {type: categorical, choices: [16, 32]}
"""


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = study_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def complaints(validator: Draft202012Validator, data: Any) -> list[str]:
    return [error.json_path for error in validator.iter_errors(data)]


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.parent.name)
def test_the_studies_that_come_along_fit(study: Path, validator: Draft202012Validator) -> None:
    # Read as this package reads it: 1e-3 is a number there, and plain text to PyYAML.
    assert complaints(validator, read_yaml(study).data) == []


#: Sections that are empty, and what depends on other sections.
EMPTY = """
study: {name: empty, sampler: {name: TPE, seed: "${trainer.seed}"}, scheduler: none, epochs: 50, n_trials: }
run:
data: {_target_: parts.load}
model: {_target_: parts.Net}
loss: {_target_: parts.Explode}
step:
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
lr_scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 2, warmup: "${trainer.max_epochs}"}
metrics:
loader:
trainer:
callbacks:
search_space:
where:
"""


@pytest.mark.parametrize("text", [STUDY, ODD, EMPTY], ids=["interpolated", "odd", "empty"])
def test_what_people_write_fits(text: str, validator: Draft202012Validator) -> None:
    data = yaml.safe_load(text.replace("1e-", "1.0e-"))
    assert complaints(validator, data) == []


def test_pydantics_own_schema_would_refuse_an_interpolation() -> None:
    data = yaml.safe_load(ODD)
    assert "$.loader.batch_size" in complaints(Draft202012Validator(StudyFile.model_json_schema()), data)


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("study.n_trials=many", "$.study.n_trials"),
        ("study.sampler=tep", "$.study.sampler"),
        ("study.pruner={name: mdian}", "$.study.pruner"),
        ("study.n_trails=3", "$.study"),
        ("study.scheduler={factor: 3}", "$.study.scheduler"),
        ("study.scheduler=pbtt", "$.study.scheduler"),
        ("study.sampler={name: tpe, seed: -1}", "$.study.sampler"),
        ("trainer={max_epochs: 0}", "$.trainer.max_epochs"),
        ("lr_scheduler.warmup=-1", "$.lr_scheduler"),
        ("trainer.precision=fp8", "$.trainer.precision"),
        ("trainer.max_epochs=0", "$.trainer.max_epochs"),
        ("trainer.compile=maybe", "$.trainer.compile"),
        ("callbacks={early_stopping: {patince: 3}}", "$.callbacks.early_stopping"),
        ("callbacks={mine: {patience: 3}}", "$.callbacks.mine"),
        ("search_space[optimizer.lr].type=real", "$.search_space"),
        ("model={hidden: 3}", "$.model"),
    ],
)
def test_what_an_editor_should_mark(override: str, place: str, validator: Draft202012Validator) -> None:
    data = yaml.safe_load(STUDY.replace("1e-", "1.0e-"))
    path, _, value = override.partition("=")
    assign(data, split_path(path), yaml.safe_load(value))
    found = complaints(validator, data)
    assert found
    assert all(path.startswith(place) for path in found)


def test_a_study_without_loss_and_step_is_marked(validator: Draft202012Validator) -> None:
    data = yaml.safe_load(STUDY.replace("1e-", "1.0e-"))
    del data["loss"]
    assert complaints(validator, data) == ["$"]


def test_an_editor_is_told_what_things_are(validator: Draft202012Validator) -> None:
    schema: Any = validator.schema
    callbacks = schema["properties"]["callbacks"]["properties"]
    assert set(callbacks) == set(CALLBACKS)
    assert all(callback["description"] for callback in callbacks.values())
    patience = callbacks["early_stopping"]["anyOf"][0]["properties"]["patience"]
    assert patience == {"description": "Epochs without improvement before the end, at least 1.", "default": 20}
    assert "monitor" not in callbacks["checkpoint"]["anyOf"][0]["properties"]  # the service gives it
    trials = schema["$defs"]["StudySection"]["properties"]["n_trials"]
    assert trials["description"] == "Trials to finish. If only `epochs` is given, the default is that number."
    assert {"minimum": 1, "maximum": 2**31 - 1, "type": "integer"} in trials["anyOf"]


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = model_of(field)
        if inner is not None:
            yield from keys_of(inner, f"{above}{name}.")
        elif above:  # a section that is free has its page
            yield f"{above}{name}", name, field


def test_every_key_is_described_and_read_by_code() -> None:
    package = Path(inspect.getfile(StudyFile)).parents[1]
    code = "\n".join(file.read_text() for file in package.rglob("*.py") if not file.name.startswith("schema"))
    for path, name, field in keys_of(StudyFile):
        place = f"`{path}` in hpo/config/schema*.py"
        assert field.description, f"{place} has no description, which editors and the reference show"
        assert field.examples, f"{place} has no example, which the reference shows"
        # `loader` is handed over whole, as the Trainer's BatchOptions.
        handed_over = path.startswith("loader.") and name in BatchOptions.__dataclass_fields__
        assert handed_over or re.search(rf"\.{name}\b|[\"']{name}[\"']", code), f"{place} is read nowhere in hpo/"


def test_the_command_prints_and_writes_it(tmp_path: Path) -> None:
    printed = hpo("schema", code=0)
    assert json.loads(printed.stdout) == study_schema()
    assert hpo("schema", "-o", tmp_path / "s.json", code=0).stdout == ""
    assert json.loads((tmp_path / "s.json").read_text()) == study_schema()
    refused = hpo("schema", "-o", tmp_path, code=2)
    assert refused.stderr.startswith("--output: can't be written: ")
