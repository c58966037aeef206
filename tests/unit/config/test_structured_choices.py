"""Lists and mappings as choices: stored and shown as text, set in a config as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from optuna.trial import FixedTrial

import hpo as package
from hpo.checks.check import check_spec
from hpo.config.schema_space import label
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError
from hpo.search.schedulers.pbt.parameters import perturbed_parameters
from hpo.study.initial_trials import base_point
from hpo.study.queue import checked_point
from hpo.wording import shown
from tests.support.commands import MODEL, hpo, hpo_json, make_study
from tests.support.studies import Studies

SGD = "{_target_: torch.optim.SGD, momentum: 0.9, lr: 0.01}"
ADAM = "{_target_: torch.optim.AdamW, betas: [0.8, 0.99], lr: 0.01}"
TEXT = f"""
study: {{name: lists, n_trials: 4, sampler: {{name: random, seed: 1}}}}
data: {{_target_: parts.load}}
model: {{_target_: parts.Wide, widths: [8, 16]}}
loss: {{_target_: torch.nn.MSELoss}}
optimizer: {SGD}
trainer: {{max_epochs: 1}}
search_space:
  model.widths: {{type: categorical, choices: [[8, 16], [16, 32, 8], []]}}
  optimizer: {{type: categorical, choices: [{SGD}, {ADAM}]}}
  optimizer.weight_decay: {{type: float, low: 0.0, high: 0.1, when: {{optimizer: [{ADAM}]}}}}
"""
CODE = (
    MODEL
    + """

class Wide(nn.Sequential):
    def __init__(self, widths):
        assert type(widths) is list and all(type(width) is int for width in widths), widths
        sizes = [4, *widths, 1]
        super().__init__(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))
"""
)
ADAM_LABEL = '{"_target_": "torch.optim.AdamW", "betas": [0.8, 0.99], "lr": 0.01}'


def spec_of(folder: Path, old: str = "", new: str = "", *overrides: str) -> StudySpec:
    assert old in TEXT
    return load_spec(make_study(folder, TEXT.replace(old, new) if old else TEXT, CODE), overrides)


def test_a_label_is_the_same_for_the_same_choice() -> None:
    assert label([8, 16]) == "[8, 16]"
    assert label({"b": [1], "a": "ü"}) == label({"a": "ü", "b": [1]}) == '{"a": "ü", "b": [1]}'
    assert [label(each) for each in ("[8]", 3, None, True)] == ["[8]", 3, None, True]


def test_a_trial_is_configured_with_what_the_label_stands_for(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    space = SearchSpace.from_spec(spec)
    assert space.distributions["model.widths"].choices == ("[8, 16]", "[16, 32, 8]", "[]")  # type: ignore[attr-defined]
    params = space.suggest(
        FixedTrial({"model.widths": "[16, 32, 8]", "optimizer": ADAM_LABEL, "optimizer.weight_decay": 0.05})
    )
    config = spec.resolve(params)
    assert config["model"]["widths"] == [16, 32, 8]
    # One mapping replaces the other: of the base config's optimizer nothing is left.
    assert config["optimizer"] == {
        "_target_": "torch.optim.AdamW",
        "betas": [0.8, 0.99],
        "lr": 0.01,
        "weight_decay": 0.05,
    }
    assert spec.resolve(params)["optimizer"]["betas"] is not config["optimizer"]["betas"]
    # The order in which parameters come does not matter: a section is set before what is in it.
    assert spec.resolve(dict(reversed(params.items()))) == config
    assert space.contains(params)
    assert not space.contains({**params, "optimizer": label({"_target_": "torch.optim.SGD"})})


def test_people_give_the_list_or_its_text(tmp_path: Path) -> None:
    space = SearchSpace.from_spec(spec_of(tmp_path))
    sampler: Any = None
    for widths in ([16, 32, 8], "[16, 32, 8]"):
        assert checked_point(space, sampler, {"model.widths": widths}) == {"model.widths": "[16, 32, 8]"}
    with pytest.raises(InputError, match=r"value: \[16, 32\]\n  fix: did you mean `\[16, 32, 8\]`"):
        checked_point(space, sampler, {"model.widths": [16, 32]})
    assert base_point(spec_of(tmp_path), space)["model.widths"] == "[8, 16]"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("momentum: 0.9", "momentun: 0.9", r"study.yaml:5: optimizer.momentun: .*takes no argument"),
        ("betas", "betass", r"optimizer\]?.choices\[1\].betass: `torch.optim.AdamW` takes no argument `betass`"),
        ("torch.optim.AdamW", "torch.optim.AdamX", r"choices\[1\]: `torch.optim` has no `AdamX`"),
        (
            "{type: categorical, choices: [{_t",
            "{type: categorical, choices: [{_x",
            r"\[0\]: required key is missing",
        ),
        ("when: {optimizer: [", "when: {optimizer: [{}, ", r"`optimizer` never is \{\}"),
        (", []]", ", [.inf]]", "must be finite"),
        (", []]", ", {1: 2}]", "is not text"),
        ("weight_decay: {type", "wight_decay: {type", "takes no argument `wight_decay`"),
        (
            "[]]}",
            "[]]}\n  model.widths[1]: {type: int, low: 2, high: 8}",
            r"`model.widths` is \[\], which has no such",
        ),
        ("[]]}", "null]}\n  model.widths[1]: {type: int, low: 2, high: 8}", "is null, which has no such part"),
    ],
)
def test_what_a_choice_holds_is_checked(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_spec(spec_of(tmp_path, old, new))


def test_what_is_part_of_some_choices_is_searched_with_these(tmp_path: Path) -> None:
    part = "{type: int, low: 2, high: 8, when: {model.widths: [[16, 32, 8]]}}"
    spec = spec_of(tmp_path, "[]]}", f"[]]}}\n  model.widths[1]: {part}")
    check_spec(spec)
    assert spec.resolve({"model.widths": "[16, 32, 8]", "model.widths[1]": 3})["model"]["widths"] == [16, 3, 8]


def test_a_fork_may_change_lists_of_numbers(tmp_path: Path) -> None:
    text = TEXT[: TEXT.index("search_space")] + (
        "search_space:\n  optimizer.betas: {type: categorical, choices: [[0.9, 0.999], [0.8, 0.99]]}\n"
    )
    spec = load_spec(
        make_study(tmp_path, text.replace("torch.optim.SGD, momentum: 0.9", "torch.optim.AdamW"), CODE)
    )
    assert perturbed_parameters(spec, None) == ("optimizer.betas",)


@pytest.mark.usefixtures("in_process")
def test_they_are_shown_as_they_are_written(tmp_path: Path) -> None:
    study = make_study(tmp_path, TEXT, CODE)
    hpo("enqueue", study, "model.widths=[16, 32, 8]", f"optimizer={ADAM}")
    hpo("run", study, "--workers", 2)
    first, *others = hpo_json("trials", study)
    assert first["params"]["model.widths"] == [16, 32, 8]
    assert first["params"]["optimizer"] == yaml.safe_load(ADAM)
    assert first["outcome"] == "complete", first
    assert len(others) == 3
    best = package.best_params(study)
    assert isinstance(best["model.widths"], list)
    assert isinstance(best["optimizer"], dict)
    model = package.load_best_model(study)
    assert isinstance(model, torch.nn.Sequential)
    assert hpo_json("best", study)["params"] == best
    assert all(shown(value, 4) in hpo("best", study).stdout for value in best.values())
    exported = json.loads(hpo("export", study, "--format", "json").stdout)
    assert exported[0]["params.model.widths"] == [16, 32, 8]
    assert '"[16, 32, 8]"' in hpo("export", study).stdout
    assert "[16, 32, 8]" in hpo("trials", study).stdout


def test_a_study_of_classes_has_them(tmp_path: Path) -> None:
    make_study(tmp_path, TEXT, CODE)
    (tmp_path / "study.yaml").unlink()
    study = package.Study(
        "classes",
        folder=tmp_path,
        data="parts.load",
        model=package.Call("parts.Wide", widths=[8]),
        loss=torch.nn.MSELoss,
        optimizer=package.Call(torch.optim.SGD, lr=0.1),
        search_space={
            "model.widths": package.Categorical([(8,), (8, 16)]),
            "optimizer": package.Categorical(
                [package.Call(torch.optim.SGD, lr=0.1), package.Call(torch.optim.AdamW)]
            ),
            "optimizer.weight_decay": package.Float(0.0, "optimizer.lr / 2"),
            "optimizer.lr": package.Float(1e-3, 0.1),
        },
        where=["optimizer.lr < 0.09"],
    )
    space = SearchSpace.from_spec(study.spec())
    assert space.params["optimizer"].choices[1] == '{"_target_": "torch.optim.AdamW"}'  # type: ignore[union-attr]
    assert space.params["model.widths"].choices == ("[8]", "[8, 16]")  # type: ignore[union-attr]
    assert [condition.text for condition in space.where] == [
        "optimizer.lr < 0.09",
        "optimizer.weight_decay ≤ optimizer.lr / 2",
    ]


def test_a_database_keeps_them(studies: Studies) -> None:
    with studies.open(text=TEXT, code=CODE, views=2) as (view, other):
        trial = view.study.ask()
        params = view.space.suggest(trial)
        read = other.study.get_trials(deepcopy=False)[0]
        assert read.params == params
        assert other.space.contains(read.params)


def test_an_interpolation_in_a_choice_follows_what_else_is_set(tmp_path: Path) -> None:
    cosine = '{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: "${trainer.max_epochs}"}'
    own = '[["${optimizer.momentum}", 8], [16, 32, 8], []]'  # of the base config's optimizer
    added = f"search_space.lr_scheduler={{type: categorical, choices: [null, {cosine}]}}"
    spec = spec_of(tmp_path, "[[8, 16], [16, 32, 8], []]", own, added)
    chosen = {
        "lr_scheduler": '{"T_max": 1, "_target_": "torch.optim.lr_scheduler.CosineAnnealingLR"}',
        "model.widths": "[0.9, 8]",
        "optimizer": ADAM_LABEL,
    }
    assert set(chosen) < set(SearchSpace.from_spec(spec).params)
    assert spec.resolve(chosen)["lr_scheduler"]["T_max"] == 1
    longer = spec.resolve({**chosen, "trainer.max_epochs": 7})
    assert (longer["lr_scheduler"]["T_max"], longer["model"]["widths"]) == (7, [0.9, 8])
    assert spec.values(chosen)["lr_scheduler"]["T_max"] == 1


_ESCAPED = r"""
study: {name: prompts, metric: v, direction: minimize}
objective: {_target_: train.run, prompt: plain, lr: 1.0}
search_space:
  objective.lr: {type: float, low: 0.1, high: 1.0}
  objective.prompt: {type: categorical, choices: CHOICES}
"""


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'\${objective.lr} is it'", "${objective.lr} is it"),
        (r"'\${name}, hello'", "${name}, hello"),
        (r"'a \\\${name}'", r"a \${name}"),
        (r"['\${objective.lr}', '${study.name} \${b}']", ["${objective.lr}", "prompts ${b}"]),
        (r"{a: '\${b}'}", {"a": "${b}"}),
    ],
)
def test_a_choice_with_an_escaped_interpolation_is_that_text_in_the_trial(
    tmp_path: Path, written: str, value: object
) -> None:
    (tmp_path / "study.yaml").write_text(_ESCAPED.replace("CHOICES", f"[{written}, plain, '\\${{other}}']"))
    spec = load_spec(tmp_path / "study.yaml")
    for choice, expected in ((label(value), value), ("plain", "plain"), ("${other}", "${other}")):
        assert choice in spec.search_space["objective.prompt"].choices  # type: ignore[union-attr]
        found = spec.resolve({"objective.prompt": choice, "objective.lr": 0.5})["objective"]
        assert (found["prompt"], found["lr"]) == (expected, 0.5)
