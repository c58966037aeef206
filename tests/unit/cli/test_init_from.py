"""`hpo init --from`: a study file around code that is there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from hpo.checks.checks import check_study
from hpo.checks.preflight import preflight
from hpo.config.spec import StudySpec, load_spec
from hpo.draft.arguments import arguments_of
from hpo.draft.data import Look
from hpo.draft.losses import Loss, loss_for
from hpo.trial.resources import Slot, deal
from tests.support.commands import hpo, hpo_json

MODEL = """
import abc

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, in_features, num_classes, hidden=16, layers=2, dropout=0.1, activation="relu", norm=False):
        super().__init__()
        known = {"relu": nn.ReLU, "tanh": nn.Tanh}
        blocks, width = [], in_features
        for _ in range(layers):
            blocks += [nn.Linear(width, hidden), known[activation](), nn.Dropout(dropout)]
            width = hidden
        self.layers = nn.Sequential(*blocks, nn.LayerNorm(width) if norm else nn.Identity())
        self.last = nn.Linear(width, num_classes)

    def forward(self, inputs):
        return self.last(self.layers(inputs))


class Odd(Net):
    def __init__(self, in_features, num_classes, flavour, kernel_size=3):
        super().__init__(in_features, num_classes)


class Even(Net):
    def __init__(self, in_features, num_classes, kernel_size=5):
        if kernel_size != 5:
            raise ValueError("no")
        super().__init__(in_features, num_classes)


def make(hidden=16) -> nn.Module:
    return Net(4, 3, hidden)


class Half(nn.Module):
    pass


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def encode(self, x): ...

    def forward(self, x):
        return x


class LightningModule(nn.Module):
    pass


class Lit(LightningModule):
    pass


class Plain:
    pass


net = make()


def fit(lr=1e-3, hidden=32, epochs=5, momentum=0.9, batch_size=32, label="x", seed=0):
    return lr


def loop(trial, lr, hidden=32, epochs=5):
    for epoch in range(1, epochs + 1):
        trial.report(epoch, val_loss=lr + epoch)


def draws(t):
    return t.suggest_float("x", 0, 1)


def nothing():
    return 1.0
"""
DATA = """
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

generator = torch.Generator().manual_seed(0)
x = torch.randn(120, 4, generator=generator)
y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def ready():
    return {"train": TensorDataset(x[:80], y[:80]), "val": TensorDataset(x[80:], y[80:])}


def pair():
    return ready()["train"], ready()["val"]


def triple():
    return (*pair(), ready()["val"])


def arrays():
    return x.double().numpy(), y.to(torch.int32).numpy()


class Shelf:
    @staticmethod
    def load():
        return arrays()

    def pair(self):
        return pair()


class train:
    load = Shelf.load


shelf = Shelf()
load = arrays  # named as the function that is made around it


def numbers():
    return x.numpy(), x.sum(1).numpy()


def loaders():
    return {name: DataLoader(data, batch_size=10) for name, data in ready().items()}


def _in_batches(data, place):
    def collated(items):
        return torch.stack([item[0] for item in items]), torch.stack([item[place] for item in items])

    return {name: DataLoader(data, batch_size=10, collate_fn=collated) for name in ("train", "val")}


def collated():
    return _in_batches(TensorDataset(x, x, y), 2)


def encoded():
    return _in_batches(TensorDataset(x), 0)


class Holed(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, at):
        if at == 40:
            raise KeyError("sample 40")
        return x[at], y[at]


def holed():
    return {"train": Holed(), "val": Holed()}


class Points(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, at):
        return x[at], y[at]


class Named:
    # Items by number, of no class of torch's.

    def __len__(self):
        return len(x)

    def __getitem__(self, at):
        return {"x": x[at], "y": y[at]}


class Rooted(Points):
    def __init__(self, root):
        self.root = root


def rooted(root):
    return ready()


def of_dicts():
    return {"train": Named(), "val": Named()}


def of_lists():
    return {"train": [1, 2], "val": [3]}


def broken():
    raise OSError("no file points.csv")


def odd():
    return 7


def none():
    return TensorDataset(x[:0], y[:0])


def words():
    return x.numpy(), y.numpy().astype(object)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "points.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written() -> StudySpec:
    return load_spec(Path("study.yaml"), require_search_space=True)


def model_of(spec: StudySpec) -> dict[str, Any]:
    return spec.config.model or {}


@pytest.mark.parametrize("data", ["ready", "pair", "triple", "arrays", "load", "Points", "loaders", "collated"])
def test_a_model_and_data_of_any_shape_become_a_study_that_passes_the_check(data: str, folder: Path) -> None:
    printed = hpo("init", "--from", "net:Net", "--data", f"points:{data}").stdout
    assert "fill in" not in printed
    spec = written()
    assert check_study(spec) == []
    assert (model_of(spec)["in_features"], model_of(spec)["num_classes"]) == (4, 3)
    assert spec.config.loss == {"_target_": "torch.nn.CrossEntropyLoss"}
    (found,) = preflight(spec, [Slot("cpu", "cpu", None, 1)])
    assert found.warnings == []
    assert found.base.outputs == [(found.base.inputs[0][0], 3)]
    in_batches = data in ("loaders", "collated")
    assert ("loader.batch_size" in spec.search_space) == (not in_batches)
    assert (folder / "study_parts.py").exists() == (not in_batches and data != "ready")
    assert "targets are the numbers of 3 classes" in Path("study.yaml").read_text()


def test_it_says_how_many_workers_a_study_has_by_itself(folder: Path) -> None:
    hpo("init", "--from", "net:Net", "--data", "points:ready")
    (line,) = (line for line in written().path.read_text().splitlines() if line.startswith("# run: {workers"))
    assert line.endswith("by default one worker per GPU, or one in all without a GPU")
    assert len(deal(["cpu"], None)) == 1


def test_the_search_space_is_what_the_names_and_defaults_say(folder: Path) -> None:
    hpo("init", "--from", "net:Net", "--data", "points:ready")
    space = {path: entry.model_dump(exclude_defaults=True) for path, entry in written().search_space.items()}
    assert space["model.hidden"] == {"type": "int", "low": 4, "high": 64, "log": True}
    assert space["model.layers"] == {"type": "int", "low": 1, "high": 4}
    assert space["model.dropout"] == {"type": "float", "low": 0.0, "high": 0.5}
    assert space["model.norm"] == {"type": "categorical", "choices": (False, True)}
    # Of the usual names of activations those stay that the model knows.
    assert space["model.activation"] == {"type": "categorical", "choices": ("relu", "tanh")}
    assert {"optimizer.lr", "optimizer.weight_decay", "loader.batch_size"} < space.keys()


def test_numbers_as_targets_get_a_loss_for_their_shape(folder: Path) -> None:
    """Targets [batch] against outputs [batch, 1]: torch's own loss would compare each with each."""
    hpo("init", "--from", "net:Net", "--data", "points:numbers")
    assert written().config.loss == {"_target_": "study_parts.loss"}
    assert check_study(written()) == []
    (found,) = preflight(written(), [Slot("cpu", "cpu", None, 1)])
    assert found.base.outputs == [(32, 1)]


@pytest.mark.usefixtures("in_process")
def test_such_a_study_runs(folder: Path) -> None:
    hpo("init", "--from", "net:Net", "--data", "points:arrays")
    study = folder / "study.yaml"
    small = ("trainer.max_epochs=2", "callbacks.early_stopping=false")
    hpo("run", study, *small, "--n-trials", 2, "--workers", 1)
    assert hpo_json("best", study, *small)["value"] < 2


def test_a_function_that_makes_a_model(folder: Path) -> None:
    hpo("init", "--from", "net.make", "--data", "points.ready")
    assert model_of(written()) == {"_target_": "net.make", "hidden": 16}
    assert check_study(written()) == []


def test_what_can_not_be_known_is_left_to_fill_in(folder: Path) -> None:
    printed = hpo("init", "--from", "net:Odd", "--data", "points:ready").stdout
    assert "fill in model.flavour: neither its name nor the data say what it is" in printed
    refused = hpo("check", "study.yaml", code=2).stdout
    line = (folder / "study.yaml").read_text().splitlines().index("  flavour: ???   # fill in `model.flavour`") + 1
    assert f"study.yaml:{line}: model.flavour: `???` stands for a value that is still missing" in refused


def test_without_data_the_file_says_what_is_missing(folder: Path) -> None:
    printed = hpo("init", "--from", "net:Net").stdout
    for place in ("data: none is named; `--data module:load` does", "model.in_features", "loss: the data are"):
        assert f"fill in {place}" in printed
    assert "`???` stands for a value" in hpo("check", "study.yaml", code=2).stdout


def test_data_that_need_an_argument(folder: Path) -> None:
    printed = hpo("init", "--from", "net:make", "--data", "points:rooted").stdout
    assert "fill in data.root: it has no default" in printed
    refused = hpo("check", "study.yaml", code=2).stdout
    assert ": data.root: `???` stands for a value" in refused


def test_batches_that_are_mappings_need_a_step(folder: Path) -> None:
    printed = hpo("init", "--from", "net:make", "--data", "points:of_dicts").stdout
    assert "fill in loss: a batch is a mapping with x, y, and not (inputs, targets)" in printed


def test_targets_that_the_loader_makes_itself_are_read_from_its_batches(folder: Path) -> None:
    (folder / "coder.py").write_text("import torch\n\n\ndef Coder():\n    return torch.nn.Linear(4, 4)\n")
    hpo("init", "--from", "coder:Coder", "--data", "points:encoded")
    assert written().config.loss == {"_target_": "torch.nn.MSELoss"}


@pytest.mark.parametrize("data", ["Shelf.load", "train.load", "shelf.pair"])
def test_data_of_a_method_are_imported_from_its_module(data: str, folder: Path) -> None:
    hpo("init", "--from", "net:Net", "--data", f"points:{data}")
    assert "from points import " in (folder / "study_parts.py").read_text()
    assert check_study(written()) == []
    preflight(written(), [Slot("cpu", "cpu", None, 1)])


def test_a_sample_that_fails_leaves_those_of_the_first_batch_to_count(folder: Path) -> None:
    printed = hpo("init", "--from", "net:Net", "--data", "points:holed").stdout
    assert re.search(r"[23] classes were counted in 8 of the 120 samples", printed)
    assert written().config.loss == {"_target_": "torch.nn.CrossEntropyLoss"}


def test_a_value_that_the_model_fails_with_is_not_searched(folder: Path) -> None:
    printed = hpo("init", "--from", "net:Even", "--data", "points:ready").stdout
    assert "note: not searched, since the model fails with it: kernel_size=3, 7" in printed
    assert "model.kernel_size" not in written().search_space


def test_a_training_function(folder: Path) -> None:
    printed = hpo("init", "--from", "net:fit").stdout
    assert "a trial can't be pruned or resumed until `fit` takes `trial`" in printed
    spec = written()
    assert check_study(spec) == []
    assert spec.config.objective == {
        "_target_": "net.fit",
        "lr": 1e-3,
        "hidden": 32,
        "epochs": 5,
        "momentum": 0.9,
        "batch_size": 32,
        "label": "x",
        "seed": 0,
    }
    searched = {path.removeprefix("objective.") for path in spec.search_space}
    assert searched == {"lr", "hidden", "momentum", "batch_size"}
    lr = spec.search_space["objective.lr"].model_dump(exclude_defaults=True)
    assert lr == {"type": "float", "low": 1e-4, "high": 1e-2, "log": True}


@pytest.mark.parametrize("prompt", [" ".join(["word"] * 30), "two\nlines of text", "one, two: [three"])
def test_a_long_text_as_a_default_stays_as_it_is(prompt: str, folder: Path) -> None:
    (folder / "talk.py").write_text(f"def run(trial, lr=1e-3, prompt={prompt!r}):\n    return lr\n")
    hpo("init", "--from", "talk:run")
    assert written().base_config()["objective"]["prompt"] == prompt


@pytest.mark.parametrize("prompt", ["Dear ${name}", "???"])
def test_a_default_that_a_study_file_reads_otherwise_stays_the_functions(prompt: str, folder: Path) -> None:
    body = "    trial.report(1, val_loss=lr)\n"
    (folder / "talk.py").write_text(f"def run(trial, lr=1e-3, prompt={prompt!r}):\n{body}")
    assert "fill in" not in hpo("init", "--from", "talk:run").stdout
    assert "prompt" not in written().base_config()["objective"]
    assert check_study(written()) == []


@pytest.mark.parametrize(
    ("module", "name"), [("größe", "gr-e"), ("предел", "study"), ("_own", "_own"), ("x" * 240, "x" * 200)]
)
def test_a_study_is_named_after_code_with_the_letters_that_it_can_have(
    module: str, name: str, folder: Path
) -> None:
    (folder / f"{module}.py").write_text("def run(trial, lr=1e-3):\n    return lr\n", encoding="utf-8")
    hpo("init", "--from", f"{module}:run")
    assert written().study.name == name


def test_a_study_is_named_after_a_class_with_other_letters(folder: Path) -> None:
    with (folder / "net.py").open("a", encoding="utf-8") as file:
        file.write("\n\nclass Größe(Net):\n    pass\n")
    hpo("init", "--from", "net:Größe")
    assert yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))["study"]["name"] == "gr-e"


def test_a_training_function_with_a_session(folder: Path) -> None:
    hpo("init", "--from", "net:loop")
    spec = written()
    assert check_study(spec) == []
    assert spec.config.objective == {"_target_": "net.loop", "lr": 1e-3, "hidden": 32, "epochs": 5}
    assert spec.trainer.max_epochs == 5
    assert spec.study.pruner.name == "median"


SCRIPT = """
import optuna


def objective(trial):
    return trial.suggest_float("x", 0, 1)


def both(trial, share=0.5):
    return share * trial.suggest_float("x", 0, 1), 1.0


if __name__ == "__main__":
    study = optuna.create_study(CREATED)
    study.optimize(objective, OPTIMIZED)
"""


@pytest.mark.parametrize(
    ("created", "optimized", "goals", "n_trials"),
    [
        ('direction="maximize", storage="sqlite:///x.db"', "n_trials=7", {"value": "maximize"}, 7),
        ("", "7", {"value": "minimize"}, 7),
        ("direction=optuna.study.StudyDirection.MAXIMIZE", "timeout=60", {"value": "maximize"}, 20),
        ("direction=wanted", "n_trials=count", None, 20),
        ("**options", "7", None, 7),
        (
            'directions=["minimize", "maximize"]',
            "n_trials=7",
            {"value_0": "minimize", "value_1": "maximize"},
            7,
        ),
    ],
)
def test_an_optuna_objective(
    created: str, optimized: str, goals: dict[str, str] | None, n_trials: int, folder: Path
) -> None:
    (folder / "digits.py").write_text(SCRIPT.replace("CREATED", created).replace("OPTIMIZED", optimized))
    printed = hpo("init", "--from", f"digits:{'both' if goals and len(goals) > 1 else 'objective'}").stdout
    text = (folder / "study.yaml").read_text()
    assert ("direction: minimize, since no create_study in its file says which" in printed) == (goals is None)
    assert ("or `maximize`, such as for an accuracy" in text) == (goals is None)
    assert "???" not in text
    spec = written()
    assert (spec.study.name, spec.study.n_trials, spec.search_space) == ("digits", n_trials, {})
    assert spec.study.goals == (goals or {"value": "minimize"})
    hpo("check", folder / "study.yaml")


@pytest.mark.parametrize(
    ("optimized", "n_trials", "timeout"),
    [
        ("timeout=600", 20, 600),
        ("7, 0.5 * 60", 7, 30),
        ("n_trials=7, timeout=2 * 60 * 60", 7, 7200),
        ("n_trials=7, timeout=wanted", 7, None),
        ("n_trials=7, timeout=None", 7, None),
        ("n_trials=3.5", 20, None),
        ("n_trials=True, timeout=-1", 20, None),
    ],
)
def test_how_long_an_optuna_script_searches(
    optimized: str, n_trials: int, timeout: float | None, folder: Path
) -> None:
    (folder / "digits.py").write_text(SCRIPT.replace("CREATED", "").replace("OPTIMIZED", optimized))
    hpo("init", "--from", "digits:objective")
    assert (written().study.n_trials, written().run.timeout) == (n_trials, timeout)
    said = "the script says no number" in (folder / "study.yaml").read_text()
    assert said == (timeout is not None and n_trials == 20)


def test_an_objective_that_is_an_object_in_a_file_that_is_named_by_its_path(folder: Path) -> None:
    called = "\nclass Called:\n    def __call__(self, trial):\n        return objective(trial)\nitself=Called()\n"
    text = SCRIPT.replace("CREATED", 'direction="maximize"').replace("OPTIMIZED", "7")
    (folder / "digits.py").write_text(text.replace("\n\nif __name__", called + "\n\nif __name__"))
    hpo("init", "--from", f"{folder / 'digits.py'}:itself")
    spec = written()
    assert (spec.config.objective, spec.study.n_trials) == ({"_target_": "digits.itself"}, 7)
    assert spec.study.goals == {"value": "maximize"}


def test_a_script_that_searches_at_import_is_not_imported(folder: Path) -> None:
    text = (
        SCRIPT.replace('if __name__ == "__main__":', "if True:").replace("CREATED", "").replace("OPTIMIZED", "7")
    )
    (folder / "digits.py").write_text(text)
    refused = hpo("init", "--from", "digits:objective", code=2).stderr
    line = text.splitlines().index("    study.optimize(objective, 7)") + 1
    assert f"digits.py:{line}: runs a search of its own when it is imported" in refused
    assert not (folder / "study.yaml").exists()


def test_a_script_without_a_study_leaves_the_direction_open(folder: Path) -> None:
    (folder / "digits.py").write_text(SCRIPT.partition("if __name__")[0])
    hpo("init", "--from", "digits:objective")
    lines = [line for line in (folder / "study.yaml").read_text().splitlines() if line and line[0] != "#"]
    assert lines == [
        "study:",
        "  name: digits",
        "  direction: minimize    # of what the function returns; or `maximize`, such as for an accuracy",
        "  n_trials: 20",
        "objective:",
        "  _target_: digits.objective",
    ]


@pytest.mark.parametrize(
    ("source", "data", "message"),
    [
        (
            "nett:Net",
            None,
            "--from: can't import `nett`: there is no such module\n  value: nett:Net\n  fix: did you",
        ),
        ("net:Nett", None, "`net` has no `Nett`\n  value: net:Nett\n  fix: did you mean `Net`?"),
        ("net", None, "names a module, and nothing in it"),
        ("bad:Net", None, "importing `bad` failed: ZeroDivisionError: division by zero"),
        ("net:net", None, "`net` is an object, and each trial needs one of its own"),
        ("net:Plain", None, "`Plain` is neither an nn.Module nor a function"),
        ("net:Half", None, "`Half` is abstract: it has no `forward`"),
        ("net:Abstract", None, "`Abstract` is abstract: it has no `encode`"),
        ("net:Lit", None, "`Lit` is a LightningModule"),
        ("net:Lit", None, "`callbacks=[HPOCallback(trial)]`"),
        ("net:Lit", None, "docs/how-to/from-lightning.md"),
        ("net:draws", None, "`draws` draws its parameters, and takes no `trial`"),
        ("net:nothing", None, "`nothing` takes no argument, so there is nothing to search"),
        ("net:Net", "points:broken", "--data: `points.broken()` failed: OSError: no file points.csv"),
        ("net:Net", "points:odd", "--data: `points.odd` returned an object of type int"),
        ("net:Net", "points:none", "--data: no batch can be made of what `points.none` returned: IndexError"),
        ("net:Net", "points:words", "--data: no batch can be made of what `points.words` returned: TypeError"),
        ("net:Net", "points:Rooted", "`Rooted` needs root, which only you know"),
        ("net:Net", "points:of_lists", "the training set of `points.of_lists` is a list of 2: int, int, and no"),
        ("net:Net", "points:lod", "did you mean `load`?"),
        (
            "../net.py:Net",
            None,
            ", where imports begin\n  value: ../net.py\n  fix: name the modules' folder",
        ),
    ],
)
def test_what_can_not_be_drafted(source: str, data: str | None, message: str, folder: Path) -> None:
    (folder / "bad.py").write_text("x = 1\ny = x / 0\n")
    there = {path.name for path in folder.iterdir()}
    refused = hpo("init", "--from", source, *(["--data", data] if data else []), code=2).stderr
    assert message in refused
    assert "fix: " in refused
    if source.startswith("bad"):
        assert "bad.py:2" in refused
    assert {path.name for path in folder.iterdir()} == there


def test_nothing_is_overwritten_without_force(folder: Path) -> None:
    (folder / "study.yaml").write_text("mine")
    refused = hpo("init", "--from", "net:fit", code=2).stderr
    assert "has study.yaml already, and nothing is overwritten" in refused
    assert "fix: rename what is there, or replace it with `--force`" in refused  # another folder has no `net`
    assert (folder / "study.yaml").read_text() == "mine"
    hpo("init", "--from", "net:fit", "--force")
    assert "net.fit" in (folder / "study.yaml").read_text()


def test_options_that_do_not_go_together(folder: Path) -> None:
    assert "give one of them" in hpo("init", "--from", "net:Net", "--template", "regression", code=2).stderr
    assert "goes with `--from`" in hpo("init", "--data", "points:ready", code=2).stderr
    assert "say where to, or from what" in hpo("init", code=2).stderr


# ---- losses and arguments


def look(targets: Tensor, classes: int | None = None) -> Look:
    binary = bool(((targets == 0) | (targets == 1)).all())
    return Look("ready", 0, False, 100, torch.zeros(4, 2), targets, classes=classes, counted=4, binary=binary)


WHOLE, ONES = torch.tensor([0, 1, 1, 0]), torch.tensor([[0.0], [1.0], [1.0], [0.0]])
SCORES, ONE = torch.tensor([[-1.0, 2.0]] * 4), torch.tensor([[-1.0], [2.0], [3.0], [0.5]])


@pytest.mark.parametrize(
    ("outputs", "targets", "target"),
    [
        (SCORES, WHOLE, "torch.nn.CrossEntropyLoss"),
        (SCORES.log_softmax(1), WHOLE, "torch.nn.NLLLoss"),
        (SCORES, WHOLE.to(torch.int32), "study_parts.loss"),
        (ONE, WHOLE, "study_parts.loss"),
        (torch.zeros(4, 2, 5, 5), torch.zeros(4, 5, 5, dtype=torch.int64), "torch.nn.CrossEntropyLoss"),
        (ONE, ONES, "torch.nn.BCEWithLogitsLoss"),
        (ONE.sigmoid(), ONES, "torch.nn.BCELoss"),
        (ONE, ONES * 2.5, "torch.nn.MSELoss"),
        (ONE, ONES.squeeze(1) * 2.5, "study_parts.loss"),
    ],
)
def test_the_loss_fits_outputs_and_targets(outputs: Tensor, targets: Tensor, target: str) -> None:
    classes = None if targets.is_floating_point() else 2
    chosen = loss_for(outputs, look(targets, classes), outputs)
    assert isinstance(chosen, Loss)
    assert chosen.target == target
    if not chosen.body:
        value = getattr(torch.nn, target.rpartition(".")[2])()(outputs, targets)
    else:
        names: dict[str, Any] = {}
        text = f"from torch.nn.functional import {chosen.imports}\ndef loss(outputs, targets):\n    {chosen.body}"
        exec(textwrap.dedent(text), names)
        value = names["loss"](outputs, targets)
    assert value.ndim == 0


def test_no_loss_is_guessed_where_none_fits() -> None:
    assert "3 classes" in str(loss_for(SCORES, look(torch.tensor([0, 1, 2, 0]), 3)))
    assert "[batch, 2]" in str(loss_for(SCORES, look(torch.rand(4, 3))))
    assert "a tuple" in str(loss_for((SCORES,), look(WHOLE, 2)))


def test_a_softmax_before_cross_entropy_is_said() -> None:
    chosen = loss_for(SCORES.softmax(1), look(WHOLE, 2))
    assert isinstance(chosen, Loss)
    assert "it ends with a softmax" in chosen.warning


def test_widths_beside_attention_heads_are_divided_by_each_number_of_heads() -> None:
    def model(d_model: int = 64, nhead: int = 4, dim_feedforward: int = 256, num_layers: int = 2) -> None: ...

    found = {item.name: item.entry for item in arguments_of(model, trains=False)}
    assert found["d_model"] == {"type": "categorical", "choices": [32, 64, 128]}
    assert found["nhead"] == {"type": "categorical", "choices": [1, 2, 4, 8, 16]}
    assert found["num_layers"] == {"type": "int", "low": 1, "high": 4}
