"""Bad input: the first line names file, line and path; a fix follows; nothing is written."""

from pathlib import Path

import pytest

from hpo.checks.check import check_spec
from hpo.checks.check_metrics import check_metric
from hpo.config.spec import load_spec
from hpo.errors import InputError

GOOD = """\
study:
  name: digits
  n_trials: 40
data: {_target_: data.load}
loader: {batch_size: 64}
model: {_target_: model.MLP, hidden: 64}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-3}
lr_scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 5}
metrics: {accuracy: {_target_: model.accuracy}}
search_space:
  optimizer.lr: {type: float, low: 1e-5, high: 0.1, log: true}
  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}
  optimizer.momentum: {type: float, low: 0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}
"""
MODEL = """\
class MLP:
    def __init__(self, hidden, dropout=0.0): ...
class Open:
    def __init__(self, **kwargs): ...
def accuracy(outputs, targets, top=1): ...
def alone(outputs): ...
"""
LR = "{type: float, low: 1e-5, high: 0.1, log: true}"
WHEN = "when: {optimizer._target_: torch.optim.SGD}"

# (what is replaced, by what, first line after the file, what the fix says)
TABLE = [
    ("n_trials", "n_trails", "3: study.n_trails: unknown key", "did you mean `n_trials`?"),
    ("loader:", "loadr:", "5: loadr: unknown section", "did you mean `loader`?"),
    ("n_trials: 40", "n_trials: many", "3: study.n_trials: must be a whole number", "n_trials: 100"),
    ("n_trials: 40", "n_trials: 0", "3: study.n_trials: must be at least 1", "n_trials: 100"),
    ("n_trials: 40", "workers: 4", "3: study.workers: belongs in `run`", "write `run: {workers: 4}`"),
    ("n_trials: 40", "timeout: 2h", "3: study.timeout: belongs in `run`", "write `run: {timeout: 2h}`"),
    (
        "n_trials: 40",
        "seed: 4",
        "3: study.seed: belongs in `study.sampler` or `trainer`",
        "write `study: {sampler: {seed: 4}}` or `trainer: {seed: 4}`",
    ),
    (
        "n_trials: 40",
        "callbacks: {csv: true}",
        "3: study.callbacks: is a section of its own, beside `study`",
        "write `callbacks: …`",
    ),
    ("loader:", "workers: 4\nloader:", "5: workers: belongs in `run`", "write `run: {workers: 4}`"),
    (
        "loader: {",
        "loader: {max_epochs: 3, ",
        "5: loader.max_epochs: belongs in `trainer`",
        "trainer: {max_epochs: 3}",
    ),
    (
        "loader:",
        "scheduler: {}\nloader:",
        "5: scheduler: unknown section: the learning",
        "write `lr_scheduler:` in",
    ),
    ("loader:", "run: {timeout: 2 hours}\nloader:", "5: run.timeout: is not a duration", '"2h"'),
    ("loader:", "run: {timeout: 0s}\nloader:", "5: run.timeout: must be more than zero seconds", '"2h"'),
    (
        "n_trials: 40",
        "direction: minimise",
        "3: study.direction: must be `minimize` or `maximize`",
        "did you mean",
    ),
    (
        "n_trials: 40",
        "metric: val_accuracy",
        "1: study.direction: required key is missing; only a metric named …loss has a default",
        "direction: maximize",
    ),
    ("n_trials: 40", "metric: val_los", "1: study.direction: required key is missing", "val_los"),
    ("name: digits", "name: -x", "2: study.name: may hold only letters", "digits-mlp"),
    ("name: digits", "direction: minimize", "1: study.name: required key is missing", "name: digits"),
    ("name: digits", "name: 7", "2: study.name: must be text", "name: digits"),
    ("name: digits", "name: a\n  name: b", "3: study.name: this key is written twice", "the other is on line 2"),
    ("model: {_target_: model.MLP, hidden: 64}\n", "", "1: model: required section is missing", "model.Net"),
    ("loss: {_target_: torch.nn.CrossEntropyLoss}\n", "", "1: loss: required section is missing", "step"),
    ("_target_: model.MLP, hidden", "hidden", "6: model._target_: required key is missing", "import path"),
    ("model.MLP, ", "MLP, ", "6: model._target_: is not an import path", "model.MLP"),
    ("model.MLP", "modle.MLP", "6: model._target_: can't import `modle`: there is no such module", "`model`"),
    ("model.MLP", "model.MPL", "6: model._target_: `model` has no `MPL`", "did you mean `MLP`?"),
    ("torch.nn.Cross", "torch.nnn.Cross", "7: loss._target_: `torch` has no `nnn`", "nn"),
    ("hidden: 64", "hiden: 64", "6: model.hiden: `model.MLP` takes no argument `hiden`", "did you mean `hidden`?"),
    (", hidden: 64", "", "6: model._target_: `model.MLP` needs the argument `hidden`", "model.hidden"),
    (
        ", step_size: 5",
        "",
        "9: lr_scheduler._target_: `torch.optim.lr_scheduler.StepLR` needs",
        "lr_scheduler.step_size",
    ),
    (
        "torch.optim.lr_scheduler.StepLR, step_size: 5",
        (
            "torch.optim.lr_scheduler.SequentialLR, milestones: [], "
            "schedulers: [{_target_: torch.optim.lr_scheduler.ConstantLR}]"
        ),
        "9: lr_scheduler.schedulers[0]._target_: `torch.optim.lr_scheduler.ConstantLR` needs the argument",
        "let a function beside the study file make them all",
    ),
    (
        "step_size: 5",
        "step_size: 5, warmup: -1",
        "9: lr_scheduler.warmup: must be a whole number",
        "counts epochs",
    ),
    (
        "step_size: 5",
        "step_size: 5, interval: day",
        "9: lr_scheduler.interval: must be `epoch` or `step`",
        "epoch",
    ),
    ("lr: 1e-3}", "lr: 1e-3, params: 3}", "8: optimizer.params: the trainer itself passes `params`", "remove it"),
    ("lr: 1e-3}", "lr: 1e-3, betas: 3}", "8: optimizer.betas: `torch.optim.SGD` takes no argument", "when"),
    ("lr: 1e-3}", "lr: ${model.hiddn}", "9: not YAML: while parsing a flow mapping", "quotes"),
    ("lr: 1e-3}", 'lr: "${model.hiddn}"}', "8: optimizer.lr: Interpolation key 'model.hiddn' not found", "write"),
    ("lr: 1e-3}", 'lr: "???"}', "8: optimizer.lr: `???` stands for a value that is still missing", "write"),
    *(
        ("metrics: {acc", f"trainer: {{{written}}}\nmetrics: {{acc", f"10: trainer{problem}", fix)
        for written, problem, fix in [
            ("max_epoch: 3", ".max_epoch: unknown key", "did you mean `max_epochs`?"),
            ("max_epochs: 0", ".max_epochs: must be at least 1", "max_epochs: 20"),
            ("max_epochs: null", ".max_epochs: nothing ends the training", "max_steps"),
            ("max_steps: 2.5", ".max_steps: must be a whole number", "max_steps: 10000"),
            ("validate_every: 1.5", ".validate_every: is neither steps nor a fraction", "below 1"),
            ("validate_every: 0", ".validate_every: is neither steps nor a fraction", "such as 500"),
            ("validate_every: often", ".validate_every: is neither steps", "such as 0.25"),
            ("precision: half", ".precision: must be `fp32`, `bf16` or `fp16`", "fp32, bf16, fp16"),
            ("compile: fast", ".compile: must be true, false or a mapping", "compile: true"),
            ("cuda_graph: 3", ".cuda_graph: must be true or false", "cuda_graph: false"),
        ]
    ),
    (
        "model.accuracy",
        "model.alone",
        "10: metrics.accuracy._target_: `model.alone` can't be called",
        "2 positional",
    ),
    ("{accuracy:", "{loss:", "10: metrics.loss: `loss` is recorded already", "another name"),
    (
        LR,
        "{type: float, low: 1, high: 0.1}",
        "12: search_space[optimizer.lr].low: low 1.0 is more than high",
        "swap",
    ),
    (LR, "{type: float, low: 0, high: 1, log: true}", "12: search_space[optimizer.lr].low: a log", "raise low"),
    (
        LR,
        "{type: float, low: 1, high: 2, log: true, step: 1}",
        "12: search_space[optimizer.lr].step: log and",
        "drop",
    ),
    (LR, "{type: float, low: 0, high: 1, step: 0.3}", "12: search_space[optimizer.lr].high: steps of 0.3", "0.9"),
    (LR, "{type: float, low: 0, high: .inf}", "12: search_space[optimizer.lr].high: must be finite", "0.1"),
    (LR, "{type: float, low: 0}", "12: search_space[optimizer.lr].high: required key is missing", "high: 0.1"),
    (LR, "{type: flaot, low: 0}", "12: search_space[optimizer.lr].type: is not a type", "`float`"),
    (LR, "{type: int, low: 1.5, high: 3}", "12: search_space[optimizer.lr].low: must be a whole number", "low: 8"),
    (LR, "{type: categorical, choices: []}", "12: search_space[optimizer.lr].choices: is empty", "one choice"),
    (
        LR,
        "{type: categorical, choices: [1, 1.0]}",
        "12: search_space[optimizer.lr].choices: holds 1.0 twice",
        "once",
    ),
    (
        LR,
        "{type: categorical, choices: [[1, .inf]]}",
        "12: search_space[optimizer.lr].choices: must be finite",
        "inf and nan",
    ),
    (LR, "7", "12: search_space[optimizer.lr]: must be a mapping", "type: float, low: 1e-5"),
    (
        "  optimizer.lr:",
        "  optimzer.lr:",
        "12: search_space[optimzer.lr]: names nothing in the config",
        "`optimizer`",
    ),
    (
        "  optimizer.lr:",
        "  study.n_trials:",
        "12: search_space[study.n_trials]: `study` can't be searched",
        "model",
    ),
    ("  optimizer.lr:", "  loader.batch:", "12: search_space[loader.batch]: names nothing", "`loader.batch_size`"),
    ("  optimizer.lr:", "  model.hiden:", "12: search_space[model.hiden]: `model.MLP` takes no", "`hidden`"),
    (
        "  optimizer.lr:",
        "  optimizer.lr.x:",
        "12: search_space[optimizer.lr.x]: names nothing: `optimizer.lr`",
        "end",
    ),
    ("  optimizer.lr:", "  step.x:", "12: search_space[step.x]: names nothing in the config", "_target_"),
    ("  optimizer.lr:", "  a..b:", "12: search_space[a..b]: `a..b` is not a dotted path", "optimizer.lr"),
    (
        WHEN,
        "when: {optimizer._target_: torch.optim.SDG}",
        "14: search_space[optimizer.momentum].when",
        "torch.optim.SGD",
    ),
    (
        WHEN,
        "when: {optimizer.traget: 1}",
        "14: search_space[optimizer.momentum].when[optimizer.traget]: the",
        "_target_",
    ),
    (
        WHEN,
        "when: {model.hidden: 3}",
        "14: search_space[optimizer.momentum].when[model.hidden]: never holds",
        "add",
    ),
    (
        WHEN,
        "when: {optimizer.momentum: 0.5}",
        "14: search_space[optimizer.momentum].when[optimizer.momentum]: c",
        "remove",
    ),
    (", " + WHEN, "", "14: search_space[optimizer.momentum]: `torch.optim.AdamW` takes no argument", "when"),
    (
        "[torch.optim.AdamW, ",
        "[torch.optim.AdmW, ",
        "13: search_space[optimizer._target_].choices[0]: `torch",
        "AdamW",
    ),
]


def study(folder: Path, text: str, model: str = MODEL) -> Path:
    (folder / "model.py").write_text(model)
    (folder / "data.py").write_text("def load(): ...\n")
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def read_and_check(path: Path, overrides: tuple[str, ...]) -> None:
    spec = load_spec(path, overrides)
    check_spec(spec)
    check_metric(spec)


def refused(path: Path, overrides: tuple[str, ...] = ()) -> InputError:
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(InputError) as caught:
        read_and_check(path, overrides)
    assert sorted(path.parent.rglob("*")) == before, "bad input leaves nothing behind"
    assert caught.value.fix
    assert caught.value.exit_code == 2
    return caught.value


def test_the_good_study_is_good(tmp_path: Path) -> None:
    spec = load_spec(study(tmp_path, GOOD), require_search_space=True)
    assert check_spec(spec) == []
    check_metric(spec)


@pytest.mark.parametrize(("old", "new", "line", "fix"), TABLE, ids=[row[1][:40] or row[0][:40] for row in TABLE])
def test_bad_file(tmp_path: Path, old: str, new: str, line: str, fix: str) -> None:
    assert old in GOOD
    path = study(tmp_path, GOOD.replace(old, new, 1))
    first, *rest = str(refused(path)).splitlines()
    assert first.startswith(f"{path}:{line}")
    assert fix in rest[-1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ":1: the file is empty"),
        ("- a\n", ":1: the top level is not a mapping"),
        ("a: [1\nb: 2\n", ":2: not YAML: while parsing a flow sequence"),
        ("\tx: 1\n", ":1: not YAML:"),
        ("study: {true: 1}\n", ":1: study: the key `true` is not text"),
        ("study: {1: 1}\n", ":1: study: the key `1` is not text"),
        ("a: !!python/name:os.system x\n", ":1: a: the YAML tag"),
        ("a: &a [*a]\n", ":1: a[0]: an alias that contains itself"),
        ('study:\n  name: "a\\ud800"\n', ":2: study.name: holds half of a character"),
        ('a: [1,\n "b\\0"]\n', ":2: a[1]: holds the character NUL"),
        ('"a\\0": 1\n', ":1: holds the character NUL"),
        ("a: 1\n---\nb: 2\n", ":2: not YAML: expected a single document"),
    ],
)
def test_files_that_are_no_study(tmp_path: Path, text: str, line: str) -> None:
    path = study(tmp_path, text)
    assert str(refused(path)).startswith(f"{path}{line}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert str(refused(tmp_path / "none.yaml")).splitlines()[0] == f"{tmp_path}/none.yaml: no such file"
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "can't be read" in str(refused(folder))
    (tmp_path / "latin.yaml").write_bytes(b"study: \xe9")
    assert "is not UTF-8 text" in str(refused(tmp_path / "latin.yaml"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trainer.max_epochs", "trainer.max_epochs: is not an override"),
        ("trainer.max_epoch=3", "trainer.max_epoch: names nothing in the config"),
        ("trainer.max_epochs=many", "trainer.max_epochs: must be a whole number"),
        ("optimzer.lr=3", "optimzer.lr: names nothing in the config"),
        ("optimizer.lrr=3", "optimizer.lrr: `torch.optim.AdamW` takes no argument `lrr`"),
        ("search_space.optimizer.lr.low=1", "search_space.optimizer.lr.low: an entry's path goes in brackets"),
        ("search_space[optimizer.lr].lo=1", "search_space[optimizer.lr].lo: unknown key"),
        ("search_space[optimizer.lr].low=1", "search_space[optimizer.lr].low: low 1.0 is more than high 0.1"),
        ("a..b=1", "`a..b` is not a dotted path"),
        ("model.hidden={a", "model.hidden: not a YAML value"),
        ("study.metric=val_los", "study.direction: required key is missing"),
        ("trainer=3", "trainer: must be a mapping"),
        ("model.activation=\udcff", "holds half of a character (a lone surrogate)"),
        ('model.activation="\\0"', "model.activation: holds the character NUL"),
    ],
)
def test_bad_overrides(tmp_path: Path, text: str, line: str) -> None:
    error = refused(study(tmp_path, GOOD), (text,))
    where = f"{tmp_path}/s.yaml:1: " if line.startswith("study.direction") else "command line: "
    assert str(error).startswith(where + line)


def test_json_in_yaml_keeps_its_characters(tmp_path: Path) -> None:
    spec = load_spec(study(tmp_path, GOOD), ('model.activation="\\ud83d\\ude00"',))
    assert spec.base_config()["model"]["activation"] == "😀"


def test_a_metric_that_nothing_records(tmp_path: Path) -> None:
    text = GOOD.replace("n_trials: 40", "{metric: val_acuracy}".strip("{}") + "\n  direction: maximize")
    path = study(tmp_path, text)
    assert str(refused(path)).splitlines() == [
        f"{path}:3: study.metric: nothing records this metric",
        "  value: val_acuracy",
        "  fix: did you mean `val_accuracy`? recorded are: train_loss, val_loss, lr, train_accuracy, val_accuracy",
    ]


def test_several_problems_are_all_said(tmp_path: Path) -> None:
    error = refused(study(tmp_path, GOOD.replace("40", "x").replace("64", "y", 1)))
    assert error.path == "study.n_trials"
    assert "loader.batch_size: must be a whole number" in str(error)


def test_nothing_to_search(tmp_path: Path) -> None:
    path = study(tmp_path, GOOD[: GOOD.index("search_space:")])
    assert load_spec(path).search_space == {}
    with pytest.raises(InputError, match="there is nothing to search"):
        load_spec(path, require_search_space=True)


@pytest.mark.parametrize(
    ("model", "problem", "line"),
    [
        ("\nraise ValueError('own words')\n", "importing `model` failed: ValueError: own words", "model.py:2"),
        ("def f(:\n", "importing `model` failed: SyntaxError", "model.py:1"),
        (
            "import data\nimport nowhere_to_be_found\n",
            "importing `model` failed: ModuleNotFoundError",
            "model.py:2",
        ),
        ("import sys\nsys.exit(3)\n", "importing `model` failed: SystemExit: 3", "model.py:2"),
    ],
)
def test_a_module_that_fails(tmp_path: Path, model: str, problem: str, line: str) -> None:
    error = refused(study(tmp_path, GOOD, model))
    assert error.problem.startswith(problem)
    assert error.line == 6
    assert error.fix == f"correct {tmp_path}/{line}"
    assert error.__cause__ is not None


def test_callbacks_are_checked_by_name(tmp_path: Path) -> None:
    path = study(tmp_path, GOOD + "callbacks:\n  early_stopping: {patience: 3}\n")
    assert check_spec(load_spec(path)) == []
    misspelt = r"callbacks.early_stoping: unknown callback\n  fix: did you mean `early_stopping`"
    with pytest.raises(InputError, match=misspelt):
        check_spec(load_spec(path, ["callbacks.early_stoping=true"]))
    with pytest.raises(InputError, match="takes no argument `patienc`"):
        check_spec(load_spec(path, ["callbacks.early_stopping={patienc: 3}"]))


def test_any_argument_is_a_warning(tmp_path: Path) -> None:
    spec = load_spec(study(tmp_path, GOOD), ["model={_target_: model.Open, width: 3}"])
    (warning,) = check_spec(spec)
    expected_text = "command line: model.width: `model.Open` takes any argument, so `width` can't be checked"
    assert str(warning) == expected_text
