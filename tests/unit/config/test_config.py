"""Reading study files: defaults, interpolation, overrides, hashing, and what import it takes."""

import functools
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from hpo.checks.check import check_spec
from hpo.checks.check_metrics import check_metric, recorded_metrics
from hpo.config.interpolation import plainly_resolved
from hpo.config.paths import assign, copy_plain, diff_configs, join_path, leaves, nearest, split_path
from hpo.config.schema import StudyFile
from hpo.config.spec import StudySpec, load_spec
from hpo.config.targets import TargetResolver, instantiate, is_refused
from hpo.errors import InputError
from tests.support import commands as support

STUDY = """\
study: {name: digits, n_trials: 40, sampler: tpe, pruner: {n_startup_trials: 5}}
data: {_target_: data.load}
loader: {batch_size: 64}
model: {_target_: model.MLP, hidden: 64}
loss: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-3, weight_decay: 1e-4}
lr_scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: ${trainer.max_epochs}}
metrics: {accuracy: {_target_: model.accuracy}}
callbacks: {early_stopping: true}
search_space:
  optimizer.lr: {type: float, low: 1e-5, high: 1e-1, log: true}
  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}
  optimizer.momentum: {type: float, low: 0.0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}
"""
DATA = "def load():\n    return {'train': [], 'val': []}\n"
MODEL = """\
import torch
import data
from data import load

class MLP(torch.nn.Module):
    def __init__(self, hidden, dropout=0.0, block=None):
        super().__init__()
        self.hidden, self.block = hidden, block
        self.load = load

def accuracy(outputs, targets, top=1):
    return top

def later():
    import data as found
    return found

class Broken:
    def __init__(self):
        raise KeyError("own type")
"""


def write(folder: Path, text: str = STUDY, **modules: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in {"data": DATA, "model": MODEL, **modules}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    path = folder / "study.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def spec(tmp_path: Path) -> StudySpec:
    return load_spec(write(tmp_path))


def test_defaults_and_shorthands(spec: StudySpec, tmp_path: Path) -> None:
    assert spec.study.direction == "minimize"
    assert spec.study.metric == "val_loss"
    assert (spec.study.sampler.name, spec.study.sampler.seed) == ("tpe", 0)
    assert spec.study.pruner.name == "median"
    assert spec.study.pruner.kwargs == {"n_startup_trials": 5}
    assert spec.trainer.max_epochs == 20
    assert spec.path == tmp_path / "study.yaml"
    assert spec.folder == tmp_path
    assert spec.output_dir == tmp_path / "runs" / "digits"
    assert spec.storage_url == f"sqlite:///{tmp_path}/runs/digits/study.db"


def test_interpolation_follows_a_trials_parameters(spec: StudySpec) -> None:
    assert spec.resolve()["lr_scheduler"]["T_max"] == 20
    config = spec.resolve({"trainer.max_epochs": 3, "optimizer.momentum": 0.5})
    assert config["lr_scheduler"]["T_max"] == 3
    assert config["optimizer"]["momentum"] == 0.5
    assert spec.resolve()["optimizer"] == {"_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 1e-4}
    assert config["step"] is None
    assert not {"study", "run", "search_space"} & set(config)


@pytest.mark.parametrize(
    "texts",
    [
        ["${trainer.max_epochs}", "${study.name}", "${trainer.compile}", "${study.epochs}", "${optimizer.lr}"],
        ["${trainer.max_epochs}", "a ${study.name}"],
        ["${model.key1}", "${study.name}"],
        ["${loader}"],
        ["${oc.decode:3}"],
        [r"\\${study.name}"],
    ],
)
def test_plain_interpolations_mean_what_omegaconf_says(texts: list[str], tmp_path: Path) -> None:
    raw = load_spec(write(tmp_path)).base_config()
    raw["model"] |= {f"key{number}": text for number, text in enumerate(texts)}
    before = copy_plain(raw)
    plain = plainly_resolved(raw)
    assert raw == before
    if plain is None:
        assert len(texts) < 5
    else:
        assert plain == OmegaConf.to_container(OmegaConf.create(raw), resolve=True)


@pytest.mark.parametrize("text", ["${nothing.here}", "${model.key0}", "???", "${.hidden}", "${model}", "$${x.y}"])
def test_what_omegaconf_has_to_judge_is_left_to_it(text: str, tmp_path: Path) -> None:
    raw = load_spec(write(tmp_path)).base_config()
    raw["model"]["key0"] = text
    assert plainly_resolved(raw) is None


def test_defaults_can_be_interpolated(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path), ["model.hidden=${loader.num_workers}", "trainer.seed=${study.sampler.seed}"])
    assert spec.resolve()["model"]["hidden"] == 0
    assert spec.trainer.seed == 0


@pytest.mark.parametrize(
    "text",
    [
        "${study.name}",
        "${ study.name}",
        "${\tstudy.name}",
        "${study[name]}",
        "${[study].name}",
        "${..study.name}",
        "${oc.select:study.name}",
        "${study.${.key}}",
    ],
)
def test_a_section_refers_to_another_one_in_any_notation(text: str, tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path), [f"model.name={json.dumps(text)}", "model.key=name"])
    assert spec.resolve()["model"]["name"] == spec.study.name


def test_an_unknown_section_is_named_also_where_another_one_refers_to_it(tmp_path: Path) -> None:
    file = write(tmp_path, STUDY + "größe: {x: 1}\n")
    with pytest.raises(InputError, match="größe: unknown section"):
        load_spec(file, ["model.name=${größe.x}"])


def test_parameters_of_a_callback_that_is_only_switched_on(spec: StudySpec) -> None:
    assert spec.resolve({"callbacks.early_stopping.patience": 3})["callbacks"] == {
        "early_stopping": {"patience": 3}
    }


def test_resolve_hands_out_copies(spec: StudySpec) -> None:
    spec.resolve()["optimizer"]["lr"] = 7
    spec.base_config()["optimizer"]["lr"] = 7
    assert spec.resolve()["optimizer"]["lr"] == 1e-3


def test_a_bad_parameter_is_refused(spec: StudySpec) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        spec.resolve({"loader.batch_size": 0})
    with pytest.raises(InputError, match="holds a plain value"):
        spec.resolve({"optimizer.lr.x": 0})


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("trainer.max_epochs=3", "trainer.max_epochs", 3),
        ("optimizer.lr=1e-2", "optimizer.lr", 0.01),
        ("model.name=a=b", "model.name", "a=b"),
        ("model.sizes=[1, 2]", "model.sizes", [1, 2]),
        ("model.dropout=", "model.dropout", None),
        ("run.timeout=1h30m", "run.timeout", 5400.0),
        ("run.agents=2..8", "run.agents", [2, 8]),
        ("run.agents=3", "run.agents", [3, 3]),
        ("run.resources={gpu: 0.5, memory: 1GiB}", "run.resources", {"gpu": 0.5, "cpu": None, "memory": 2**30}),
        ("run.resources.cpu=4", "run.resources.cpu", 4.0),
        ("study.pruner=none", "study.pruner", {"name": "none"}),
        ("study.sampler.multivariate=true", "study.sampler.multivariate", True),
        ("run.devices=cuda:0,cuda:1", "run.devices", ["cuda:0", "cuda:1"]),
        ("search_space[optimizer.lr].high=0.01", "search_space[optimizer.lr].high", 0.01),
        ("metrics.top={_target_: model.accuracy}", "metrics.top._target_", "model.accuracy"),
    ],
)
def test_overrides(tmp_path: Path, text: str, path: str, value: object) -> None:
    config = load_spec(write(tmp_path), [text]).base_config()
    found = dict(leaves(config))
    node = {
        keys[len(split_path(path)) :]: leaf
        for keys, leaf in found.items()
        if keys[: len(split_path(path))] == split_path(path)
    }
    if node == {}:
        pytest.fail(f"{path} is not in {found}")
    rebuilt: dict[str, object] = {}
    assign(rebuilt, ("x",), value)
    assert node == {keys[1:]: leaf for keys, leaf in leaves(rebuilt)}


def test_options_are_seen_from_the_current_folder(
    spec: StudySpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    changed = spec.with_options(
        output_dir="out", storage="sqlite:///s.db", n_trials=3, timeout="2m", devices=["cpu"]
    )
    assert changed.output_dir == tmp_path / "here" / "out"
    assert changed.storage_url == f"sqlite:///{tmp_path}/here/s.db"
    assert (changed.study.n_trials, changed.run.timeout, changed.run.devices) == (3, 120.0, ("cpu",))
    assert changed.config_hash() == spec.config_hash()
    assert spec.study.n_trials == 40
    with pytest.raises(InputError, match=r"^command line: run.workers: must be at least 1"):
        spec.with_options(workers=0)


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("study.workers=8", "study.workers: belongs in `run`", "write `run.workers=8`"),
        ("run.n_trials=8", "run.n_trials: belongs in `study`", "write `study.n_trials=8`"),
        (
            "run.workrs=8",
            "run.workrs: unknown key",
            "did you mean `workers`? the keys here are: workers, devices, ",
        ),
        ("workers=8", "workers: names nothing in the config", "write `run.workers`"),
        ("loader.max_epochs=8", "loader.max_epochs: names nothing in the config", "write `trainer.max_epochs`"),
        ("scheduler.T_max=8", "scheduler.T_max: names nothing in the config", "did you mean `lr_scheduler`? "),
        ("study.search_space={}", "study.search_space: is a section of its own, ", "write `search_space={}`"),
    ],
)
def test_an_override_in_the_wrong_section_hears_of_the_right_one(
    tmp_path: Path, text: str, problem: str, fix: str
) -> None:
    with pytest.raises(InputError) as raised:
        load_spec(write(tmp_path), [text])
    assert str(raised.value).startswith(f"command line: {problem}")
    assert raised.value.fix.startswith(fix)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("+trainer.max_epochs=10", "leave the `+` out: `trainer.max_epochs=10`"),
        ("++optimizer.lr=0.1", "leave the `++` out: `optimizer.lr=0.1`"),
        ("+callbacks.ema", "leave the `+` out: `callbacks.ema=…`"),
        ("~callbacks.early_stopping", "write `callbacks.early_stopping=false`"),
        ("~lr_scheduler", "write `lr_scheduler=null`"),
        ("~optimizer.weight_decay=0", "remove `optimizer.weight_decay` in the study file, or give"),
    ],
)
def test_an_override_as_hydra_has_it_hears_how_it_is_written_here(tmp_path: Path, text: str, fix: str) -> None:
    with pytest.raises(InputError, match="begins with a sign, as in Hydra") as raised:
        load_spec(write(tmp_path), [text])
    assert raised.value.path == text.partition("=")[0]
    assert raised.value.fix.startswith(fix)


def test_the_key_on_needs_no_quotes(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "run: {on: local, agents: 2..8}\n" + STUDY))
    assert (spec.run.on, spec.run.agents) == ("local", (2, 8))


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("run.agents=8..2", "run.agents: must be MIN..MAX with 0 ≤ MIN", "write a number of agents, such as 4"),
        ("run.agents=many", "run.agents: is not a number of agents", "write a number of agents, such as 4"),
        ("run.resources.gpus=1", "run.resources.gpus: unknown key", "did you mean `gpu`?"),
        ("run.resources.memory=lots", "run.resources.memory: is not a size", "write bytes, or a size"),
        ("run.resources.memory='1.5'", "run.resources.memory: is 2 bytes", 'write a unit: "1.5GiB"'),
        ("run.resources.memory=16i", "run.resources.memory: is 16 bytes", 'write a unit: "16GiB"'),
    ],
)
def test_what_an_engine_is_asked_for_is_checked(tmp_path: Path, text: str, problem: str, fix: str) -> None:
    with pytest.raises(InputError) as raised:
        load_spec(write(tmp_path), [text])
    assert str(raised.value).startswith(f"command line: {problem}")
    assert raised.value.fix.startswith(fix)


def test_the_command_lines_options_stand_over_the_run_section(tmp_path: Path) -> None:
    path = write(tmp_path, "run: {workers: 2, devices: [cpu], timeout: 1h, storage: sqlite:///file.db}\n" + STUDY)
    run = load_spec(path).with_options(workers=8, devices="auto", timeout="2h").run
    assert (run.workers, run.devices, run.timeout, run.storage) == (8, None, 7200.0, "sqlite:///file.db")


def test_paths_in_the_file_are_seen_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "inner")
    monkeypatch.chdir(tmp_path)
    spec = load_spec(Path("inner/study.yaml"), ["run.output_dir=../out", "run.storage=sqlite:///s.db"])
    assert spec.path == path
    assert spec.output_dir == tmp_path / "out"
    assert spec.storage_url == f"sqlite:///{tmp_path}/inner/s.db"
    assert spec.error("bad", path="model.hidden").file == os.path.join("inner", "study.yaml")  # noqa: PTH118


@pytest.mark.parametrize("url", ["sqlite:////a/b.db", "sqlite:///:memory:", "postgresql+psycopg://u@h/db"])
def test_other_urls_stay(tmp_path: Path, url: str) -> None:
    assert load_spec(write(tmp_path), [f"run.storage={url}"]).storage_url == url


def test_hash_counts_what_makes_the_search(tmp_path: Path) -> None:
    path = write(tmp_path)
    base = load_spec(path).config_hash()
    for text in (
        "study.n_trials=3",
        "study.name=x",
        "trainer.device=cpu",
        "run.workers=2",
        "optimizer.lr=0.001",
    ):
        assert load_spec(path, [text]).config_hash() == base, text
    for text in ("optimizer.lr=0.01", "study.sampler.seed=1", "search_space[optimizer.lr].high=1.0"):
        assert load_spec(path, [text]).config_hash() != base, text


def test_a_section_of_overrides_alone_is_the_command_lines(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^command line: study.objectives: needs at least two objectives"):
        load_spec(write(tmp_path), ["study.objectives.val_loss=minimize"])


def test_diff(tmp_path: Path) -> None:
    path = write(tmp_path)
    old = load_spec(path).base_config()
    new = load_spec(path, ["optimizer.lr=0.01", "model.dropout=0.5"]).base_config()
    assert diff_configs(old, new) == ["optimizer.lr: 0.001 → 0.01", "model.dropout: (absent) → 0.5"]
    assert diff_configs(old, old) == []


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a.b",
        "search_space[optimizer.lr].low",
        "a[0].b",
        "a[0][1]",
        "a.0",
        "search_space[optimizer.betas[0]].low",
        "search_space[model.hidden].when[optimizer.betas[0]]",
        "search_space[optimizer.groups[layers.[01]].lr].low",
    ],
)
def test_paths_round_trip(text: str) -> None:
    assert join_path(split_path(text)) == text


def test_json_schema_knows_the_sections() -> None:
    assert {"study", "model", "search_space"} <= set(StudyFile.model_json_schema()["properties"])


def test_reading_imports_neither_torch_nor_optuna(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hpo.config.spec import load_spec;"
        "from hpo.config.space import SearchSpace;"
        f"SearchSpace.from_spec(load_spec(Path({str(write(tmp_path))!r})));"
        "print(sorted({'torch', 'optuna', 'hydra', 'sqlalchemy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_good_study_checks_without_warnings(spec: StudySpec) -> None:
    before = sorted(item.name for item in spec.folder.iterdir())
    assert check_spec(spec) == []
    assert check_spec(spec, search=False) == []
    check_metric(spec)
    assert sorted(item.name for item in spec.folder.iterdir()) == before


def test_recorded_metrics_come_from_metrics_steps_and_callbacks(tmp_path: Path) -> None:
    extra = "def step(model, batch):\n    ...\nstep.records = ('kl',)\nclass Own:\n    writes = ('gap',)\n"
    path = write(tmp_path, extra=extra)
    spec = load_spec(path, ["step={_target_: extra.step}", "callbacks.own={_target_: extra.Own}"])
    assert check_spec(spec) == []
    found = recorded_metrics(spec, ["predicted"])
    assert {"train_loss", "val_loss", "lr", "val_accuracy", "val_kl", "gap", "predicted"} <= set(found)


def test_two_studies_keep_their_modules_apart(tmp_path: Path) -> None:
    write(tmp_path / "one", data="WHO = 1\ndef load(): return 1\n")
    write(tmp_path / "two", data="WHO = 2\ndef load(): return 2\n")
    before = {"path": list(sys.path), "modules": set(sys.modules)}
    found = {}
    for name, who in (("one", 1), ("two", 2), ("one", 1)):
        resolver = TargetResolver(tmp_path / name)
        assert resolver.resolve("model.load")() == who
        assert who == resolver.resolve("model.later")().WHO, "an import inside a function"
        found[name] = resolver.resolve("model.MLP")
    assert found["one"] is not found["two"]
    assert pickle.loads(pickle.dumps(found["two"])) is found["two"]
    assert sys.path == before["path"]
    assert {name for name in set(sys.modules) - before["modules"] if not name.startswith("_hpo_study_")} == set()


def test_packages_and_relative_imports(tmp_path: Path) -> None:
    write(tmp_path)
    package = tmp_path / "nets"
    package.mkdir()
    (package / "__init__.py").write_text("from nets.parts import Part\nimport nets.parts as again\n")
    (package / "parts.py").write_text(
        "from . import other\nfrom ..data import load\nclass Part:\n    n = other.N\n"
    )
    (package / "other.py").write_text("import nets\nimport os.path\nN = os.path.sep and 5\n")
    resolver = TargetResolver(tmp_path)
    assert resolver.resolve("nets.Part").n == 5  # type: ignore[attr-defined]
    assert resolver.resolve("nets.parts.Part") is resolver.resolve("nets.Part")
    assert not list(tmp_path.rglob("__pycache__"))


def test_plain_arguments_reach_a_target_as_hydra_would_hand_them_over(tmp_path: Path) -> None:
    resolver = TargetResolver(tmp_path)
    node = {"_target_": "types.SimpleNamespace", "number": 3, "text": "a", "flag": True, "nothing": None, "x": 0.5}
    expected = SimpleNamespace(**{key: value for key, value in node.items() if key != "_target_"})
    assert instantiate(resolver, node) == expected
    assert instantiate(resolver, {**node, "_convert_": "all"}) == expected, "as Hydra builds it"
    assert instantiate(resolver, {**node, "list": [1, {"a": 2}]}).list == [1, {"a": 2}]
    assert instantiate(resolver, {**node, "_partial_": True})() == expected


@pytest.mark.parametrize("text", ["a ${x} b", r"a \${x}", r"\\${x} c\\ ", "$${a.b}"])
@pytest.mark.parametrize("convert", ["all", "none", "partial"])
def test_text_that_looks_like_an_interpolation_reaches_a_target_as_it_is(
    text: str, convert: str, tmp_path: Path
) -> None:
    inner = {"_target_": "types.SimpleNamespace", "text": text, "list": [text, {"text": text}]}
    node = {"_target_": "types.SimpleNamespace", "_convert_": convert, "text": text, "inner": inner}
    built = instantiate(TargetResolver(tmp_path), node)
    assert (built.text, built.inner.text, built.inner.list) == (text, text, [text, {"text": text}])


_DATA = """
from dataclasses import dataclass, field
@dataclass
class Data:
    width: int
    depth: int = 1
    names: list = field(default_factory=list)
"""
_ATTRS = """
import attrs
@attrs.define
class Attrs:
    width: int
    depth: int = 1
    names: list = attrs.field(factory=list)
"""


@pytest.mark.parametrize("target", ["widths.Data", "widths.Attrs", "builtins.dict"])
@pytest.mark.parametrize("convert", ["all", "none", "partial", "object"])
def test_a_dataclass_is_a_target_like_any_other(target: str, convert: str, tmp_path: Path) -> None:
    if target == "widths.Attrs":
        pytest.importorskip("attrs")
    (tmp_path / "widths.py").write_text(_ATTRS if target == "widths.Attrs" else _DATA)
    resolver = TargetResolver(tmp_path)
    made = resolver.resolve(target)
    assert not is_refused(made)
    plain = {"_target_": target, "width": 3}
    assert instantiate(resolver, plain) == made(width=3)
    assert instantiate(resolver, {**plain, "_partial_": True})(depth=2) == made(width=3, depth=2)
    node = {"_target_": target, "_convert_": convert, "width": 3, "names": ["a", {"b": 1}]}
    assert instantiate(resolver, node) == made(width=3, names=["a", {"b": 1}])
    inner = {**node, "depth": {"_target_": target, "width": 1}}
    outer = instantiate(resolver, {"_target_": "types.SimpleNamespace", "inner": inner, "list": [1, plain]})
    assert outer.inner == made(width=3, names=["a", {"b": 1}], depth=made(width=1))
    assert outer.list == [1, made(width=3)]


def test_hydra_refuses_what_sets_attributes() -> None:
    assert is_refused(setattr)
    assert is_refused(delattr)


@pytest.mark.parametrize("argument", [{"command": "true"}, {"command": ["true"]}])
def test_what_hydra_refuses_is_refused_with_any_arguments(argument: dict[str, object], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(InstantiationException):
            instantiate(TargetResolver(tmp_path), {"_target_": "os.system", **argument})


def test_instantiate_builds_nested_nodes(tmp_path: Path) -> None:
    write(tmp_path)
    resolver = TargetResolver(tmp_path)
    node = {"_target_": "model.MLP", "hidden": [1, {"a": "x"}], "block": {"_target_": "torch.nn.ReLU"}}
    model = instantiate(resolver, node)
    assert (type(model.hidden), model.hidden) == (list, [1, {"a": "x"}])
    assert isinstance(model.block, torch.nn.ReLU)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = instantiate(
        resolver, {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.5}, [weight], lr=0.2
    )
    assert optimizer.param_groups[0]["params"][0] is weight
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_functions_are_bound_and_classes_built(tmp_path: Path) -> None:
    write(tmp_path)
    resolver = TargetResolver(tmp_path)
    metric = instantiate(resolver, {"_target_": "model.accuracy", "top": 3}, _as_function=True)
    assert isinstance(metric, functools.partial)
    assert metric(None, None) == 3
    loss = instantiate(resolver, {"_target_": "torch.nn.MSELoss"}, _as_function=True)
    assert isinstance(loss, torch.nn.MSELoss)


def test_a_targets_exception_keeps_its_type(tmp_path: Path) -> None:
    write(tmp_path)
    resolver = TargetResolver(tmp_path)
    with pytest.raises(KeyError, match="own type"):
        instantiate(resolver, {"_target_": "model.Broken"})
    with pytest.raises(KeyError, match="own type"):
        instantiate(resolver, {"_target_": "model.MLP", "hidden": 1, "block": {"_target_": "model.Broken"}})


def test_interpolations_need_no_quotes_in_flow_style(tmp_path: Path) -> None:
    text = "{a: ${model.hidden}, b: [x${model.hidden}y, ${oc.select:no.where, 3}], c: 1}"
    spec = load_spec(write(tmp_path, STUDY.replace("hidden: 64", f"hidden: 64, extra: {text}")))
    assert spec.resolve()["model"]["extra"] == {"a": 64, "b": ["x64y", 3], "c": 1}


@pytest.mark.parametrize(
    ("written", "overrides", "epochs"),
    [
        ("", (), 20),
        ("trainer: {max_steps: 1000}", (), None),
        ("trainer: {max_steps: 1000, max_epochs: 5}", (), 5),
        ("trainer: {max_epochs: 5}", ("trainer.max_steps=1000",), 5),
        ("trainer: {max_steps: 1000}", ("trainer.max_epochs=5",), 5),
        ("", ("trainer.max_steps=1000",), None),
        ("", ("trainer={max_steps: 1000}", "loader.batch_size=8"), None),
        ("trainer: {max_steps: 1000}", ("trainer.max_steps=null",), 20),
    ],
)
def test_steps_alone_limit_a_run_that_names_only_them(
    tmp_path: Path, written: str, overrides: tuple[str, ...], epochs: int | None
) -> None:
    lines = [line for line in STUDY.splitlines() if not line.startswith("trainer:") and "T_max" not in line]
    (tmp_path / "study.yaml").write_text("\n".join([*lines, written]) + "\n")
    spec = load_spec(tmp_path / "study.yaml", overrides)
    assert spec.trainer.max_epochs == epochs
    assert spec.resolve()["trainer"]["max_epochs"] == epochs


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ({"epochs": 50}, (), ("freeze_thaw", "none", 50)),
        ({"epochs": 50, "sampler": {"seed": 3}}, (), ("freeze_thaw", "none", 50)),
        ({"epochs": 50, "sampler": "tpe"}, (), (None, "median", 50)),
        ({"epochs": 50, "pruner": "hyperband"}, (), (None, "hyperband", 50)),
        ({"epochs": 50, "scheduler": None}, (), ("freeze_thaw", "none", 50)),
        ({"epochs": 50, "pruner": None}, (), ("freeze_thaw", "none", 50)),
        ({"epochs": 50, "sampler": None}, (), ("freeze_thaw", "none", 50)),
        ({"epochs": 50, "scheduler": "none"}, (), (None, "median", 50)),
        ({"epochs": 50, "scheduler": {"name": "none", "factor": 3}}, (), (None, "median", 50)),
        ({"pruner": None}, (), (None, "median", 100)),
        ({"epochs": 50, "scheduler": "asha"}, (), ("asha", "none", 50)),
        ({"epochs": 50, "n_trials": 7}, (), (None, "median", 7)),
        ({"epochs": 50}, ("study.n_trials=7",), (None, "median", 7)),
        ({"epochs": 50}, ("study.pruner=median",), (None, "median", 50)),
        ({"epochs": 50}, ("study.pruner.n_warmup_steps=2", "study.pruner.name=median"), (None, "median", 50)),
        ({"epochs": 50}, ("study.scheduler.switch=0",), ("freeze_thaw", "none", 50)),
        ({"epochs": 50}, ("study.epochs=60",), ("freeze_thaw", "none", 60)),
        ({"epochs": 50}, ("study.epochs=null",), (None, "median", 100)),
        ({"epochs": 50}, ("study.sampler=tpe",), (None, "median", 50)),
        ({}, ("study.epochs=50",), ("freeze_thaw", "none", 50)),
        ({"n_trials": 7}, ("study.epochs=50",), (None, "median", 7)),
        ({"n_trials": 7}, ("study.epochs=50", "study.n_trials=null"), ("freeze_thaw", "none", 50)),
        ({"n_trials": 7}, ("study.n_trials=null", "study.epochs=50"), ("freeze_thaw", "none", 50)),
        (
            {"n_trials": 7},
            ("study.n_trials=null", "study.epochs=50", "study.pruner=null"),
            ("freeze_thaw", "none", 50),
        ),
        (
            {"n_trials": 7},
            ("study.n_trials=null", "study.epochs=50", "study.epochs=60", "trainer.max_epochs=5"),
            ("freeze_thaw", "none", 60),
        ),
        ({"n_trials": 7, "pruner": "hyperband"}, ("study.pruner=null",), (None, "median", 7)),
        ({"n_trials": 7, "pruner": "hyperband"}, ("study.pruner=none",), (None, "none", 7)),
        ({"epochs": 50, "scheduler": "asha"}, ("study.scheduler=null",), ("freeze_thaw", "none", 50)),
        ({"epochs": 50, "scheduler": "asha"}, ("study.scheduler=none",), (None, "median", 50)),
        ({"epochs": 50}, ("study.scheduler=none", "study.n_trials=9"), (None, "median", 9)),
        ({}, ("study={name: x, epochs: 50, pruner: none}",), (None, "none", 50)),
        ({}, ("study={name: x, n_trials: 7}", "trainer.max_epochs=5"), (None, "median", 7)),
        ({"n_trials": 7}, ("study={name: x}",), (None, "median", 100)),
        ({"n_trials": None, "epochs": 50}, (), ("freeze_thaw", "none", 50)),
        ({}, (), (None, "median", 100)),
    ],
)
def test_a_study_that_is_given_epochs_alone_is_scheduled(
    tmp_path: Path,
    written: dict[str, Any],
    overrides: tuple[str, ...],
    expected: tuple[str | None, str, int],
) -> None:
    lines = [line for line in STUDY.splitlines() if not line.startswith("study:")]
    (tmp_path / "study.yaml").write_text("\n".join([f"study: {json.dumps({'name': 'x', **written})}", *lines]))
    study = load_spec(tmp_path / "study.yaml", overrides).study
    assert (study.scheduler and study.scheduler.name, study.pruner.name, study.n_trials) == expected


@pytest.mark.parametrize(
    ("written", "override", "expected"),
    [
        ("freeze_thaw", "study.scheduler.switch=0", {"name": "freeze_thaw", "switch": 0}),
        ("none", "study.scheduler.name=asha", {"name": "asha"}),
        ("asha", "study.scheduler.name=none", None),
    ],
)
def test_an_override_below_a_scheduler_that_is_written_by_name(
    tmp_path: Path, written: str, override: str, expected: dict[str, Any] | None
) -> None:
    text = STUDY.replace("pruner: {n_startup_trials: 5}", f"scheduler: {written}")
    scheduler = load_spec(write(tmp_path, text), [override]).study.scheduler
    assert (scheduler and scheduler.model_dump()) == expected


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("#fff", "nothing of it"),
        (" # none", "nothing of it"),
        ("a #b", "only `a` of it"),
        ("[1, 2] # two", "only `[1, 2]` of it"),
        ("'a' #b", "only `'a'` of it"),
        ("--- b", "only `b` of it"),
        ("---", "nothing of it"),
        ("b\n...", "only `b` of it"),
    ],
)
def test_an_override_of_which_yaml_reads_a_part_is_refused(tmp_path: Path, value: str, read: str) -> None:
    with pytest.raises(InputError, match=r"^command line: model\.name: ") as caught:
        load_spec(write(tmp_path), [f"model.name={value}"])
    assert read in caught.value.problem
    assert caught.value.fix.startswith("quote the value")


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("'#fff'", "#fff"),
        ("a#b", "a#b"),
        ("sqlite:///s.db#x", "sqlite:///s.db#x"),
        ("a: b #c", "a: b #c"),
        (" 'a #b' ", "a #b"),
        ("  ", None),
        ("!!str 5 ", "5"),
        ("&x 5", 5),
        ("|\n a\n b\n", "a\nb\n"),
        ("a\n  b", "a b"),
        ("-", "-"),
        ("[\n1, # one\n2]\n", [1, 2]),
    ],
)
def test_an_override_that_yaml_reads_whole_is_taken(tmp_path: Path, given: str, value: object) -> None:
    assert load_spec(write(tmp_path), [f"model.name={given}"]).base_config()["model"]["name"] == value


@pytest.mark.parametrize("written", ["0", "false", "[]", '""'])
def test_resources_that_are_no_mapping_are_refused(tmp_path: Path, written: str) -> None:
    with pytest.raises(InputError, match=r"study\.yaml:1: run\.resources: "):
        load_spec(write(tmp_path, f"run: {{resources: {written}}}\n{STUDY}"))


def test_resources_that_are_null_are_as_left_out(tmp_path: Path) -> None:
    given = load_spec(write(tmp_path, f"run: {{resources: null}}\n{STUDY}"))
    assert given.run.resources == load_spec(write(tmp_path)).run.resources


@pytest.mark.parametrize("written", ["${model.hidden}", "${ model.hidden }"])
def test_a_length_follows_what_is_searched_however_it_is_spaced(tmp_path: Path, written: str) -> None:
    spec = load_spec(
        write(tmp_path),
        [f"trainer.max_epochs={written}", "search_space[model.hidden]={type: int, low: 2, high: 99}"],
    )
    assert (spec.searches_length, spec.trial_epochs, spec.longest_trial) == (True, None, 99)


def test_a_function_s_epochs_are_not_scheduled_unasked(tmp_path: Path) -> None:
    # It may start again where it would resume.
    study = "{name: x, epochs: 50, metric: loss}"
    (tmp_path / "study.yaml").write_text(f"{{study: {study}, objective: {{_target_: fit.run, lr: 1}}}}")
    assert load_spec(tmp_path / "study.yaml").study.scheduler is None


def test_objectives_by_an_override_take_the_place_of_defaults(tmp_path: Path) -> None:
    study = support.make_study(tmp_path, support.STUDY.replace("  pruner: none\n", ""))
    both = "study.objectives={val_loss: minimize, parameters: maximize}"
    spec = load_spec(study, [both])
    assert spec.study.goals == {"val_loss": "minimize", "parameters": "maximize"}
    assert (spec.study.metric, spec.study.pruner.name) == ("val_loss", "none")
    assert load_spec(study, [both, "study.n_trials=3"]).study.goals == spec.study.goals
    with pytest.raises(InputError, match="can't be used with several"):
        load_spec(study, [both, "study.pruner=median"])


def test_the_environment_gives_the_database_where_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql://user:secret@host/db"
    monkeypatch.setenv("HPO_STORAGE", url)
    spec = load_spec(write(tmp_path))
    assert spec.storage_url == url
    assert "secret" not in str(spec.base_config()), "what is stored and shown of a config has no password"
    assert load_spec(spec.path, ["run.storage=sqlite:///s.db"]).storage_url == f"sqlite:///{tmp_path}/s.db"
    assert load_spec(spec.path, ["run.storage=sqlite:///~/s.db"]).storage_url == f"sqlite:///{Path.home()}/s.db"
    in_query = "mysql://host/db?user=ann&password=secret"
    for mistyped in (f"run.storag={url}", f"run.storage=[{url}]", url, f"run.storage=[{in_query}]"):
        with pytest.raises(InputError) as refused:
            load_spec(spec.path, [mistyped])
        assert "secret" not in str(refused.value)
    assert spec.with_options(storage="sqlite:////s.db").storage_url == "sqlite:////s.db"


def test_the_nearest_name_is_one_that_differs_in_case_alone() -> None:
    known = ["Adam", "AdamW", "SGD"]
    assert [nearest(word, known) for word in ("Adamw", "sgd", "Adan", "LBFGS")] == ["AdamW", "SGD", "Adam", None]


def test_of_two_names_as_near_the_one_of_the_same_letters_is_nearest() -> None:
    known = ["type", "low", "high", "log", "step"]
    assert [nearest(word, known) for word in ("lgo", "lwo", "tpye", "x")] == ["log", "low", "type", None]


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"b\xe4d")
    folder.mkdir()
    study = support.make_study(folder)
    with pytest.raises(InputError, match=r"study\.yaml: its path holds bytes that are no text") as refused:
        load_spec(study)
    assert refused.value.fix.startswith("rename the file or folder")


def test_a_module_with_the_name_of_an_installed_package_is_said_to_stand_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("here = 1\n")
    (tmp_path / "mine.py").write_text("here = 1\n")
    with pytest.raises(InputError, match="`yaml` has no `safe_load`") as refused:
        TargetResolver(tmp_path).resolve("yaml.safe_load")
    assert refused.value.fix == f"rename `yaml` in {tmp_path}: it hides the installed package"
    with pytest.raises(InputError, match="`mine` has no `there`") as refused:
        TargetResolver(tmp_path).resolve("mine.there")
    assert refused.value.fix.endswith("known here: here")
