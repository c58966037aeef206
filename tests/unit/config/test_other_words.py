"""Search-space entries in the words of other tools."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from hpo.config.other_words import _NOT_NEEDED, _OF_OPTUNA, _OF_TRAINERS, place_here, translated
from hpo.config.schema import known_keys
from hpo.config.schema_space import ParamSpec
from hpo.config.spec import load_spec
from hpo.config.yaml_source import parse_value
from hpo.errors import InputError
from hpo.trial.callbacks import CALLBACKS
from tests.support.commands import make_study


@pytest.mark.parametrize(
    ("entry", "ours"),
    [
        ({"min": 1, "max": 3}, "{type: int, low: 1, high: 3}"),
        ({"min": 1, "max": 3.5}, "{type: float, low: 1, high: 3.5}"),
        ({"type": "double", "min": 0.0, "max": 1.0}, "{type: float, low: 0.0, high: 1.0}"),
        ({"values": ["a", True, [1, 2]]}, '{type: categorical, choices: ["a", true, [1, 2]]}'),
        ({"type": "loguniform", "lower": 1e-5, "upper": 1.0}, "{type: float, low: 1e-05, high: 1.0, log: true}"),
        ({"type": "lograndint", "low": 1, "high": 64}, "{type: int, low: 1, high: 64, log: true}"),
        ({"type": "quniform", "low": 0, "high": 1, "q": 0.1}, "{type: float, low: 0, high: 1, step: 0.1}"),
        ({"type": "int", "min": 1, "max": 9, "when": {"a.b": ["c"]}}, None),
    ],
)
def test_what_is_written_in_its_place_is_valid_and_the_same(entry: dict[str, Any], ours: str | None) -> None:
    text = translated(entry)
    assert ours in (text, None)
    TypeAdapter(ParamSpec).validate_python(parse_value(text))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"type": "float", "low": 0, "high": 1},
        {"type": "categorical", "choices": [1, 2]},
        {"type": "float", "low": 0},
        {"low": 0, "high": 1},
        {"type": "log_uniform", "min": -9, "max": 0},
        {"distribution": "normal", "mu": 0, "sigma": 1},
        {"type": "float", "low": 0, "min": 0, "high": 1},
        {"min": 1},
        {"type": ["float"], "min": 0, "max": 1},
    ],
)
def test_what_is_in_our_words_or_in_words_that_say_too_little_is_left(entry: dict[str, Any]) -> None:
    assert translated(entry) == ""


@pytest.mark.parametrize("name", _OF_TRAINERS)
def test_an_argument_of_another_trainer_has_a_place_that_is_there(name: str) -> None:
    assert ("trainer", name) not in known_keys()
    section, key, *below = place_here(("trainer", name)).split(".")
    if section == "callbacks":
        assert set(below) <= inspect.signature(CALLBACKS[key].offered).parameters.keys()
    elif section not in ("optimizer", "lr_scheduler"):  # whose keys are those of the classes named there
        assert (section, key) in known_keys()


@pytest.mark.parametrize("name", _OF_OPTUNA)
def test_an_argument_of_optuna_has_a_place_that_is_there(name: str) -> None:
    assert ("study", name) not in known_keys()
    assert tuple(place_here(("study", name)).split(".")) in known_keys()


@pytest.mark.parametrize("name", _NOT_NEEDED)
@pytest.mark.parametrize("section", ["", "study."])
def test_an_argument_of_optuna_that_is_not_needed_is_answered_with_what_happens(
    tmp_path: Path, section: str, name: str
) -> None:
    assert (name,) not in known_keys()
    assert ("study", name) not in known_keys()
    with pytest.raises(InputError) as refused:
        load_spec(make_study(tmp_path), [f"{section}{name}=true"])
    assert refused.value.path == f"{section}{name}"
    assert refused.value.fix == f"leave it out: {_NOT_NEEDED[name]}"


def test_only_the_section_that_it_belongs_in_is_asked_for_these() -> None:
    assert place_here(("loader", "lr")) == place_here(("study", "lr")) == ""
    assert place_here(("trainer", "max_epochs")) == place_here(("trainer",)) == ""


def test_a_key_of_the_same_section_is_meant_rather_than_one_elsewhere(tmp_path: Path) -> None:
    spec = load_spec(make_study(tmp_path))
    with pytest.raises(InputError, match="names nothing") as refused:
        load_spec(spec.path, ["trainer.epochs=3"])
    assert refused.value.fix.startswith("did you mean `trainer.max_epochs`?")
    with pytest.raises(InputError, match="names nothing") as refused:
        load_spec(spec.path, ["trainer.patience=3"])
    assert refused.value.fix == "that is `callbacks.early_stopping.patience` here"


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("16-mixed", "fp16"),
        ("bf16-mixed", "bf16"),
        ("32", "fp32"),
        ("32-true", "fp32"),
        ("torch.bfloat16", "bf16"),
    ],
)
def test_a_precision_in_the_words_of_another_tool_is_answered_with_ours(
    tmp_path: Path, written: str, ours: str
) -> None:
    path = make_study(tmp_path)
    with pytest.raises(InputError, match=r"trainer\.precision: must be") as refused:
        load_spec(path, [f"trainer.precision={written}"])
    assert refused.value.fix == f"did you mean `{ours}`? choose from: fp32, bf16, fp16"


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("callbacks=[ema, early_stopping]", "write `callbacks: {ema: true, early_stopping: true}`"),
        (
            "callbacks=[{early_stopping: {patience: 3}}]",
            "leave the dashes out: each entry is a key of `callbacks`",
        ),
        ("metrics=[accuracy]", "write `metrics: {accuracy: {_target_: …}}`"),
        ("metrics=model.accuracy", "write `metrics: {accuracy: {_target_: …}}`"),
        ("optimizer=[AdamW]", "write `optimizer: {…}`"),
    ],
)
def test_a_list_in_place_of_a_mapping_is_answered_with_its_keys(tmp_path: Path, written: str, fix: str) -> None:
    with pytest.raises(InputError, match="must be a mapping") as refused:
        load_spec(make_study(tmp_path), [written])
    assert refused.value.fix == fix


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("study.direction=min", "did you mean `minimize`? choose from: minimize, maximize"),
        ("study.direction=max", "did you mean `maximize`? choose from: minimize, maximize"),
        ("study.pruner=false", "write `pruner: none`"),
        ("study.scheduler=false", "write `scheduler: none`"),
    ],
)
def test_a_word_that_is_cut_short_and_a_part_that_is_switched_off_are_understood(
    tmp_path: Path, written: str, fix: str
) -> None:
    with pytest.raises(InputError, match="must be") as refused:
        load_spec(make_study(tmp_path), [written])
    assert refused.value.fix == fix
