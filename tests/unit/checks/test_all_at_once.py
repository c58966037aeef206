"""What is wrong with a study is said all at once, and each fix points at what is meant."""

from __future__ import annotations

import json
import pickle
import textwrap
from pathlib import Path

import pytest

from hpo.checks.checks import check_study
from hpo.config.fitting import load_fitting
from hpo.config.spec import load_spec
from hpo.errors import InputError, SeveralInputError, each_error, together
from tests.support.commands import MODEL, hpo

GOOD = """
study: {name: five, n_trials: 10, pruner: none}
data: {_target_: parts.load}
model: {_target_: parts.Net, hidden: 8}
loss: {_target_: torch.nn.MSELoss}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-3}
trainer: {max_epochs: 3}
search_space:
  optimizer.lr: {type: float, low: 1e-5, high: 1e-3, log: true}
""".lstrip()
BROKEN = """
study: {name: five, n_trials: ten, metric: val_acc}
data: {_target_: parts.laod}
model: {_target_: parts.Net, hiden: 8}
loss: {_target_: torch.nn.MSELoss, pos_weight: 2.0}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-3}
trainer: {max_epochs: 3, precison: bf16}
callbacks: {early_stopping: {patiense: 3}, emma: {}}
search_space:
  optimizer.lr: {type: float, low: 1e-3, high: 1e-5, log: true}
  model.width: {type: int, low: 1, high: 3}
""".lstrip()
PLACES = [
    "study.yaml:1: study.n_trials: must be a whole number",
    "study.yaml:2: data._target_: `parts` has no `laod`",
    "study.yaml:3: model.hiden: `parts.Net` takes no argument `hiden`",
    "study.yaml:4: loss.pos_weight: `torch.nn.MSELoss` takes no argument `pos_weight`",
    "study.yaml:6: trainer.precison: unknown key",
    "study.yaml:7: callbacks.emma: unknown callback",
    "study.yaml:7: callbacks.early_stopping.patiense: `early_stopping` takes no argument `patiense`",
    "study.yaml:9: search_space[optimizer.lr].low: low 0.001 is more than high 1e-05",
    "study.yaml:10: search_space[model.width]: `parts.Net` takes no argument `width`",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "parts.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str) -> Path:
    study = Path("study.yaml")
    study.write_text(text)
    return study


@pytest.mark.parametrize("command", ["check", "run"])
def test_mistakes_of_many_kinds_are_said_together(command: str, folder: Path) -> None:
    result = hpo(command, write(BROKEN), code=2)
    said = result.stdout + result.stderr
    assert [place for place in PLACES if place not in said] == []
    assert said.count("fix: ") == len(PLACES) + 1
    assert not (folder / "runs").exists()


def test_a_metric_is_looked_for_beside_other_mistakes(folder: Path) -> None:
    study = write(
        GOOD.replace("n_trials: 10", "metric: val_acc, direction: maximize, n_trials: 10").replace(
            "hidden", "hiden"
        )
    )
    with pytest.raises(SeveralInputError) as caught:
        check_study(load_spec(study))
    assert [error.path for error in caught.value.errors] == ["study.metric", "model.hiden"]


def test_each_error_is_in_the_json(folder: Path) -> None:
    structure, *_ = json.loads(hpo("check", write(BROKEN), "--json", code=2).stdout)["stages"]
    paths = [error["path"] for error in structure["errors"]]
    assert len(paths) == len(PLACES) + 1  # the direction of a metric that is no loss, too
    assert {"study.n_trials", "data._target_"} < set(paths)
    assert structure["error"] == structure["errors"][0]


def test_a_section_that_is_misspelt_is_one_mistake(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_spec(write(GOOD.replace("model:", "modle:")))
    assert len(each_error(caught.value)) == 1
    assert "did you mean `model`?" in caught.value.fix


def test_what_names_a_wrong_entry_is_not_wrong_itself(folder: Path) -> None:
    text = GOOD + "  model.hidden: {type: int, low: 8, high: 2}\n"
    text += "  loader.batch_size: {type: int, low: 1, high: model.hidden * 2}\n"
    text += "  optimizer.eps: {type: float, low: 0.0, high: 0.1, when: {loader.batch_size: 3}}\n"
    study = write(text + "where: [model.hidden % 2 == 0]\n")
    (line,) = [line for line in hpo("check", study, code=2).stdout.splitlines() if "study.yaml:" in line]
    assert "study.yaml:9: search_space[model.hidden].low: low 8 is more than high 2" in line


def test_an_entry_whose_name_lies_in_other_words_leaves_them_as_they_are(folder: Path) -> None:
    head = "study: {name: five, direction: minimize}\nobjective: {_target_: fit.run, n: 1, y: 2, low: 3}\n"
    (folder / "fit.py").write_text("def run(trial, n, y, low): ...\n")
    others = "  y: {type: int, low: 2}\n  low: {type: int, low: 9, high: 2}\n"
    study = write(head + "search_space:\n  n: {type: float, low: 1}\n" + others)
    stderr = hpo("run", study, code=2).stderr
    assert [line.split(": ")[1] for line in stderr.splitlines() if line.startswith("study.yaml:")] == [
        "search_space.n.high",
        "search_space.y.high",
        "search_space.low.low",
    ]


def test_what_names_an_entry_that_is_left_out_goes_with_it_alone(folder: Path) -> None:
    text = GOOD + textwrap.dedent("""\
          model.h: {type: int, low: 1}
          model.m: {type: int, low: 1, high: "model.h + ${trainer.max_epochs}"}
          model.when: {type: int, low: 1, high: 5, when: {model.m: 1}}
          model.hh: {type: int, low: 1, high: 5}
          model.k: {type: int, low: 1, high: model.hh}
        where: ["model.h < 3", "${model.hidden} < model.m"]
    """)
    spec, errors = load_fitting(write(text))
    assert [error.path for error in errors] == ["search_space[model.h].high"]
    assert spec is not None
    assert list(spec.search_space) == ["optimizer.lr", "model.hh", "model.k"]
    assert [each.text for each in spec.where] == ["model.k ≤ model.hh"]


def test_every_value_that_is_missing_is_said(folder: Path) -> None:
    with pytest.raises(SeveralInputError) as caught:
        load_spec(write(GOOD.replace("8}", '"???"}').replace("1e-3}", '"???"}')))
    assert [error.path for error in caught.value.errors] == ["model.hidden", "optimizer.lr"]


def test_errors_said_together_survive_a_pipe_and_are_each_said_once() -> None:
    first, second = InputError("odd", file="f", line=2, path="a"), InputError("even", file="f", line=1, path="b")
    both = pickle.loads(pickle.dumps(together([first, second, first])))
    assert isinstance(both, SeveralInputError)
    assert str(both) == "f:1: b: even\nf:2: a: odd"
    assert (both.path, both.line) == ("b", 1)
    assert together([first, first]) is first


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        ("MSELoss", "CrossEntropyLoss, pos_weight: 2.0", "BCEWithLogitsLoss takes it; or did you mean `weight`?"),
        ("MSELoss", "BCELoss, pos_weight: 2.0", "BCEWithLogitsLoss takes it"),
        ("AdamW, lr", "AdamW, momentum: 0.9, lr", "SGD take it; torch.optim.AdamW takes: "),
        ("trainer: {", "callbacks: {checkpoint: {folder: x}}\ntrainer: {", "leave it out: hpo gives it"),
        (
            "trainer: {",
            "callbacks: {checkpoint: {monitor: x}}\ntrainer: {",
            "leave it out: it follows `study.metric`; it takes: every_n_epochs",
        ),
        (
            "optimizer.lr:",
            "callbacks.early_stopping.patience: {type: int, low: 1, high: 3}\n  optimizer.lr:",
            "list it, `callbacks: {early_stopping: {}}`, so that the base config has it too",
        ),
        (
            "optimizer.lr:",
            "callbacks.early_stoping.patience: {type: int, low: 1, high: 3}\n  optimizer.lr:",
            "did you mean `early_stopping`?",
        ),
    ],
)
def test_a_fix_points_at_what_is_meant(old: str, new: str, fix: str, folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        check_study(load_spec(write(GOOD.replace(old, new, 1))))
    assert fix in caught.value.fix


def test_a_key_of_the_same_section_is_meant_rather_than_one_elsewhere(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_spec(write(GOOD.replace("max_epochs", "epochs")))
    assert caught.value.fix.startswith("did you mean `max_epochs`?")


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ("x.double(), y", "the data are float64, and the model float32: return `x.float()`"),
        ("x, y.float()", "return those of classes as `y.long()`"),
        ("x, y + 7", "give the model an output for each, or number them anew"),
        ("x[:, :3], y", "a layer takes 4 features and gets 3: give the model the size of the data"),
    ],
)
def test_data_that_do_not_fit_model_and_loss(change: str, fix: str, folder: Path) -> None:
    code = f"""
        from torch.utils.data import TensorDataset
        import torch
        x, y = torch.randn(40, 4), torch.arange(40) % 2
        def load():
            return dict.fromkeys(("train", "val"), TensorDataset({change}))
        def Net(hidden):
            return torch.nn.Linear(4, 2)
        """
    Path("parts.py").write_text(textwrap.dedent(code))
    study = write(GOOD.replace("MSELoss", "CrossEntropyLoss"))
    assert fix in hpo("check", study, code=2).stdout


def test_tabs_are_named(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_spec(write(GOOD.replace("trainer:", "\ttrainer:")))
    assert caught.value.fix == "indent with spaces: YAML takes no tabs there"


def test_a_module_that_fails_when_it_is_imported_is_said_once_at_its_line(folder: Path) -> None:
    Path("parts.py").write_text(MODEL + "\ndef broken(:\n")
    result = hpo("check", write(GOOD + "metrics: {error: {_target_: parts.error}}\n"), code=2)
    said = [line.strip() for line in result.stdout.splitlines() if "importing `parts` failed" in line]
    assert [line.partition(": importing")[0] for line in said] == ["error: study.yaml:2: data._target_"]


def test_a_choice_that_a_section_refuses_is_said_once_at_its_entry(folder: Path) -> None:
    refused = "  loader.batch_size: {type: categorical, choices: [0, 32]}\nloader: {batch_size: 32}\n"
    result = hpo("check", write(GOOD + refused), code=2)
    said = [line.strip() for line in result.stdout.splitlines() if "must be at least 1" in line]
    assert said == ["error: study.yaml:9: search_space[loader.batch_size]: must be at least 1"]


@pytest.mark.parametrize(
    ("code", "metric", "change"),
    [
        (
            "from trainer import Callback\nclass Best(Callback):\n    writes = ('best_loss')\n",
            "best_loss",
            "callbacks: {best: {_target_: own.Best}}\n",
        ),
        ("def step(model, batch): ...\nstep.records = ('kl')\n", "val_kl", "step: {_target_: own.step}\n"),
    ],
)
def test_a_name_without_the_comma_of_a_tuple_is_one_name(
    code: str, metric: str, change: str, folder: Path
) -> None:
    Path("own.py").write_text(code)
    text = GOOD.replace("n_trials: 10", f"n_trials: 10, metric: {metric}, direction: minimize") + change
    check_study(load_spec(write(text.replace("loss:", "# loss:") if "step" in change else text)))
