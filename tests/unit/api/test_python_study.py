"""Studies written in Python: the file they become, and what is refused on the way there."""

from __future__ import annotations

import enum
import errno
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from optuna.distributions import FloatDistribution
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from torch import nn

import hpo
from hpo.api.function_study import study_of_function
from hpo.config.spec import load_spec
from tests.support.commands import make_study


class Inner(nn.Module):
    class Deeper(nn.Identity):
        pass

    @classmethod
    def made(cls) -> Inner:
        return cls()


class Kind(enum.StrEnum):
    WIDE = "wide"


class Depth(enum.IntEnum):
    DEEP = 8


def load(samples: int = 8) -> dict[str, Any]:
    return {"train": samples, "val": samples}


def study(folder: Path, **changes: Any) -> hpo.Study:
    given: dict[str, Any] = {
        "data": load,
        "model": Inner,
        "loss": nn.MSELoss,
        "optimizer": hpo.Call(torch.optim.AdamW, lr=1e-3),
        "search_space": {"optimizer.lr": hpo.Float(1e-5, 1e-1, log=True)},
    }
    return hpo.Study("tiny", folder=folder, **{**given, **changes})


def written(made: hpo.Study) -> dict[str, Any]:
    return dict(yaml.safe_load(made.yaml()))


HERE = __name__


def test_classes_become_the_shortest_import_paths(tmp_path: Path) -> None:
    config = written(
        study(
            tmp_path,
            model=Inner.Deeper,
            step=Inner.made,
            metrics={"relu": torch.relu},
            lr_scheduler="torch.optim.lr_scheduler.StepLR",
        )
    )
    assert config["data"] == {"_target_": f"{HERE}.load"}
    assert config["model"] == {"_target_": f"{HERE}.Inner.Deeper"}
    assert config["loss"] == {"_target_": "torch.nn.MSELoss"}
    assert config["step"] == {"_target_": f"{HERE}.Inner.made"}
    assert config["metrics"] == {"relu": {"_target_": "torch.relu"}}
    assert config["optimizer"] == {"_target_": "torch.optim.AdamW", "lr": 0.001}
    assert config["lr_scheduler"] == {"_target_": "torch.optim.lr_scheduler.StepLR"}


def test_arguments_are_made_first_or_handed_over(tmp_path: Path) -> None:
    model = hpo.Call(
        nn.Sequential,
        hpo.Call(nn.Linear, 4, 2),
        sizes=(1, np.float64(0.5), np.int64(2), np.float32(0.25)),
        make=nn.ReLU,
        bound=functools.partial(nn.Dropout, p=0.5),
        nested={"path": Path("a/b"), "none": None},
    )
    assert written(study(tmp_path, model=model))["model"] == {
        "_target_": "torch.nn.Sequential",
        "sizes": [1, 0.5, 2, 0.25],
        "make": {"_target_": "torch.nn.ReLU", "_partial_": True},
        "bound": {"_target_": "torch.nn.Dropout", "p": 0.5, "_partial_": True},
        "nested": {"path": "a/b", "none": None},
        "_args_": [{"_target_": "torch.nn.Linear", "_args_": [4, 2]}],
    }
    assert written(study(tmp_path, model=functools.partial(nn.Linear, 4, bias=False)))["model"] == {
        "_target_": "torch.nn.Linear",
        "bias": False,
        "_args_": [4],
    }


def test_every_section_says_what_a_study_file_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same study in YAML and in Python is one study."""
    path = make_study(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    parts = importlib.import_module("parts")
    monkeypatch.delitem(sys.modules, "parts")
    monkeypatch.setitem(sys.modules, "parts", parts)
    made = hpo.Study(
        "tiny",
        n_trials=6,
        sampler={"name": "random", "seed": 3},
        pruner="none",
        data=parts.load,
        model=hpo.Call(parts.Net, hidden=4, delay=0.0, dropout=0.1),
        loss=parts.Explode,
        optimizer=hpo.Call(torch.optim.AdamW, lr=1e-2),
        lr_scheduler=hpo.Call(torch.optim.lr_scheduler.CosineAnnealingLR, T_max="${trainer.max_epochs}"),
        metrics={"mae": parts.mae},
        loader={"batch_size": 16},
        trainer={"max_epochs": 3},
        search_space={"optimizer.lr": hpo.Float(1e-3, 1e-1, log=True), "model.hidden": hpo.Int(2, 8)},
        folder=tmp_path,
    )
    assert made.spec().config_hash() == load_spec(path).config_hash()
    assert made.spec().config.lr_scheduler == load_spec(path).config.lr_scheduler


def test_how_a_study_is_run_is_a_section_too(tmp_path: Path) -> None:
    run = study(tmp_path, run={"workers": 2, "trial_timeout": "2h", "storage": "sqlite:///s.db"}).spec().run
    assert (run.workers, run.trial_timeout, run.storage) == (2, 7200.0, "sqlite:///s.db")


def test_classes_may_be_searched(tmp_path: Path) -> None:
    space = {
        "optimizer._target_": hpo.Categorical([torch.optim.AdamW, torch.optim.SGD]),
        "optimizer.momentum": hpo.Float(0.0, 0.9, step=0.1, when={"optimizer._target_": torch.optim.SGD}),
        "loader.batch_size": hpo.Int(8, 64, step=8),
        "model.bias": {"type": "categorical", "choices": [True, False, None]},
    }
    assert written(study(tmp_path, search_space=space))["search_space"] == {
        "optimizer._target_": {"type": "categorical", "choices": ["torch.optim.AdamW", "torch.optim.SGD"]},
        "optimizer.momentum": {
            "type": "float",
            "low": 0.0,
            "high": 0.9,
            "step": 0.1,
            "when": {"optimizer._target_": "torch.optim.SGD"},
        },
        "loader.batch_size": {"type": "int", "low": 8, "high": 64, "step": 8},
        "model.bias": {"type": "categorical", "choices": [True, False, None]},
    }


def test_a_class_that_is_an_argument_is_searched_as_what_is_called(tmp_path: Path) -> None:
    space = {
        "model.act": hpo.Categorical([nn.ReLU, functools.partial(nn.LeakyReLU, 0.1), hpo.Call(nn.GELU)]),
        "model.size": hpo.Int(1, 8, when={"model.act": [nn.ReLU]}),
        "loss": hpo.Categorical([{"_target_": nn.MSELoss}]),
    }
    relu = {"_target_": "torch.nn.ReLU", "_partial_": True}
    leaky = {"_target_": "torch.nn.LeakyReLU", "_args_": [0.1], "_partial_": True}
    assert written(study(tmp_path, search_space=space))["search_space"] == {
        "model.act": {"type": "categorical", "choices": [relu, leaky, {"_target_": "torch.nn.GELU"}]},
        "model.size": {"type": "int", "low": 1, "high": 8, "when": {"model.act": [relu]}},
        "loss": {"type": "categorical", "choices": [{"_target_": "torch.nn.MSELoss"}]},
    }


def test_callbacks_are_arguments_switches_or_classes(tmp_path: Path) -> None:
    callbacks = {"early_stopping": {"patience": 5}, "csv": False, "own": Inner, "other": hpo.Call(Inner, a=1)}
    assert written(study(tmp_path, callbacks=callbacks))["callbacks"] == {
        "early_stopping": {"patience": 5},
        "csv": False,
        "own": {"_target_": f"{HERE}.Inner"},
        "other": {"_target_": f"{HERE}.Inner", "a": 1},
    }


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    odd = {"number": "1e-3", "date": "2024-01-01", "no": "no", "colon": "a: b", "empty": "", "tilde": "~"}
    spec = study(tmp_path, model=hpo.Call(Inner, **odd, small=1e-7, big=1e22)).spec()
    assert spec.config.model == {"_target_": f"{HERE}.Inner", **odd, "small": 1e-7, "big": 1e22}


def test_an_enums_value_is_written(tmp_path: Path) -> None:
    spec = study(tmp_path, model=hpo.Call(Inner, kind=Kind.WIDE, layers=Depth.DEEP, text=np.str_("a"))).spec()
    assert spec.config.model == {"_target_": f"{HERE}.Inner", "kind": "wide", "layers": 8, "text": "a"}


def test_the_folder_is_that_of_the_file_that_makes_it() -> None:
    made = hpo.Study("tiny", data=load, model=Inner, optimizer=torch.optim.SGD)
    assert made.folder == Path(__file__).parent
    assert made.path == Path(__file__).with_name("tiny.yaml")
    assert repr(made) == f"hpo.Study('tiny', folder='{Path(__file__).parent}')"


def test_what_is_made_in_a_notebook_lies_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell: dict[str, Any] = {"hpo": hpo}
    exec("made = hpo.Study('tiny', data='a.b', model='a.c', optimizer='a.d')", cell)
    assert cell["made"].folder == tmp_path


def in_function() -> Any:
    class Local(nn.Module):
        pass

    return Local


class Twice(nn.Module):
    pass


hidden = Twice


class Twice(nn.Module):  # type: ignore[no-redef]
    pass


@pytest.mark.parametrize(
    ("model", "said", "fix"),
    [
        (lambda: nn.Identity(), "model: is a lambda, so workers can't import it", "move it to the top level"),
        (in_function(), "model: is made inside a function", "move it to the top level of a module"),
        (nn.Identity(), "model: is an object of Identity", "`hpo.Call(Identity, …)`"),
        (hpo.Call(Inner, inner=nn.Identity()), "model.inner: is an object of Identity", "`hpo.Call(Identity, …)`"),
        (hpo.Call(Inner, sizes=[1, {2}]), "model.sizes[1]: is an object of set", "give plain values"),
        (hpo.Call(Inner, names={1: "a"}), "model.names: the key 1 is not text", "use plain words"),
        (hidden, f"model: is not what `{HERE}.Twice` names", "bind it to its own name"),
        (hpo.Call(Inner, at="${nowhere.x}"), 'hpo.Study("tiny"): model.at: ', "with a path that this file has"),
        (hpo.Call(Inner, at="${"), "model.at: ", "correct the text with `${` in it"),
        ("Net", 'hpo.Study("tiny"): model._target_: is not an import path', "write the import path"),
    ],
)
def test_what_workers_could_not_make_is_refused(tmp_path: Path, model: Any, said: str, fix: str) -> None:
    with pytest.raises(hpo.InputError) as error:
        study(tmp_path, model=model).spec()
    assert str(error.value).startswith(said), str(error.value)
    assert fix in error.value.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "given"), [("sampler", TPESampler(seed=1)), ("pruner", MedianPruner())], ids=["sampler", "pruner"]
)
def test_an_object_of_optunas_is_refused_with_how_it_is_named(tmp_path: Path, argument: str, given: Any) -> None:
    with pytest.raises(hpo.InputError, match=f"study.{argument}: is an object of") as error:
        study(tmp_path, **{argument: given}).spec()
    assert f'write `{argument}={{"name": ' in error.value.fix


def test_a_range_of_optunas_own_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    space = {"optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True)}
    with pytest.raises(hpo.InputError, match="is an object of FloatDistribution") as error:
        study(tmp_path, search_space=space).spec()
    assert error.value.fix == "give `hpo.Float(…)`, `hpo.Int(…)` or `hpo.Categorical(…)`"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_trails": 3}, "study.n_trails: unknown key"),
        ({"trainer": {"max_epoch": 3}}, "trainer.max_epoch: unknown key"),
        ({"search_space": {"optimizer.lr": hpo.Float(2, 1)}}, "search_space[optimizer.lr].low: low 2"),
        ({"search_space": {}}, "search_space: there is nothing to search"),
        ({"loss": None}, "loss: required section is missing"),
        ({"workers": 4}, "study.workers: belongs in `run`"),
        ({"run": {"n_trials": 4}}, "run.n_trials: belongs in `study`"),
        ({"where": 3}, "where: must be a list of expressions"),
    ],
)
def test_the_reader_of_study_files_has_the_last_word(tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(hpo.InputError) as error:
        study(tmp_path, **changes).spec()
    # No line: none was written.
    assert str(error.value).startswith(f'hpo.Study("tiny"): {said}'), str(error.value)


@pytest.mark.parametrize("name", ["metrics", "callbacks", "search_space"])
def test_what_goes_by_names_is_a_mapping(tmp_path: Path, name: str) -> None:
    for given in ([Inner], load, "text"):
        with pytest.raises(
            hpo.InputError, match=f"^{name}: must be a mapping\n  value: .*\n  fix: write `{name}="
        ):
            study(tmp_path, **{name: given}).spec()
    with pytest.raises(hpo.InputError) as error:
        study(tmp_path, callbacks=[load]).spec()
    assert error.value.fix.startswith('write `callbacks={"early_stopping": {"patience": 5}, "mine": hpo.Call(')
    with pytest.raises(hpo.InputError, match="search_space: must be a mapping"):
        study_of_function(load, search_space=[hpo.Int(1, 8)]).spec()  # type: ignore[arg-type]


def test_one_expression_stands_alone_as_in_a_study_file(tmp_path: Path) -> None:
    assert study(tmp_path, where="optimizer.lr <= 0.01").spec().config.where == ("optimizer.lr <= 0.01",)


def test_later_errors_have_no_line_either(tmp_path: Path) -> None:
    error = study(tmp_path).spec().error("does not fit", path="model._target_")
    assert str(error).startswith('hpo.Study("tiny"): model._target_: does not fit')


def test_a_class_of_a_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", main)
    cell = type("Net", (nn.Module,), {"__module__": "__main__"})
    with pytest.raises(hpo.InputError, match="is defined in a notebook or an interactive session") as error:
        study(tmp_path, model=cell).spec()
    assert "%%writefile model.py" in error.value.fix


@pytest.mark.parametrize(
    ("script", "inside", "path"),
    [("train.py", True, "train.Net"), ("train.py", False, None), ("my-train.py", True, None)],
)
def test_a_class_of_a_script_goes_by_the_scripts_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, inside: bool, path: str | None
) -> None:
    main = ModuleType("__main__")
    main.__file__ = str((tmp_path if inside else tmp_path.parent) / script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    made = study(tmp_path, model=type("Net", (nn.Module,), {"__module__": "__main__"}))
    if path is not None:
        assert written(made)["model"] == {"_target_": path}
        return
    with pytest.raises(hpo.InputError, match="not a module of the study's folder") as error:
        made.spec()
    assert "move it to the top level of a module" in error.value.fix


@pytest.mark.parametrize(
    ("folder", "said"), [(3, "folder: must be a path"), ("a\0b", "folder: holds the character NUL")]
)
def test_a_folder_that_is_none_is_refused(folder: Any, said: str) -> None:
    with pytest.raises(hpo.InputError, match=said) as error:
        study(folder)
    assert error.value.fix
    assert "\0" not in str(error.value)


def test_it_knows_what_is_written(tmp_path: Path) -> None:
    spec = study(tmp_path, pruner="median").spec()
    assert [spec.is_written(f"study.{name}") for name in ("pruner", "scheduler")] == [True, False]
    assert spec.location("study.pruner") == ('hpo.Study("tiny")', None)


def test_a_namesake_in_the_studys_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests.py").write_text("")
    with pytest.raises(hpo.InputError, match="has a `tests` of its own") as error:
        study(tmp_path).spec()
    assert "rename one of the two" in error.value.fix


def test_each_of_several_errors_is_said_to_be_of_the_study_or_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(hpo.InputError) as error:
        study(tmp_path, n_trials=0, direction="up").spec()
    lines = [line for line in str(error.value).splitlines() if not line.startswith(" ")]
    assert [line.split(": ")[:2] for line in lines] == [
        ['hpo.Study("tiny")', "study.n_trials"],
        ['hpo.Study("tiny")', "study.direction"],
    ]
    with pytest.raises(hpo.InputError) as error:
        hpo.run(study(tmp_path), {"study.n_trials": 0, "study.direction": "up"})
    assert "command line" not in str(error.value)
    assert str(error.value).count("this call: ") == 2


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028"])
def test_a_name_of_two_lines_is_no_error_of_the_file(end: str, tmp_path: Path) -> None:
    with pytest.raises(hpo.InputError, match=r"study\.name: may hold only letters"):
        hpo.Study(f"a{end}b", objective=load, direction="minimize", folder=tmp_path).spec()


def test_its_own_file_is_rewritten_and_no_other_is(tmp_path: Path) -> None:
    made = study(tmp_path / "new")
    assert made.write() == tmp_path / "new/tiny.yaml"
    assert load_spec(made.path).config_hash() == made.spec().config_hash()
    study(tmp_path / "new", n_trials=7).write()
    assert load_spec(made.path).study.n_trials == 7
    made.path.write_text("# written by a person\n")
    with pytest.raises(hpo.InputError, match="is in the way") as error:
        made.write()
    assert "another name" in error.value.fix
    assert made.path.read_text() == "# written by a person\n"


def test_a_folder_that_can_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hpo.InputError, match=r"can't be written \(File exists\)"):
        study(tmp_path / "file").write()


def test_a_write_that_fails_leaves_the_file_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = study(tmp_path).write().read_text()
    monkeypatch.setattr(Path, "replace", refuse)  # the last that a write does
    with pytest.raises(hpo.InputError, match="can't be written"):
        study(tmp_path, n_trials=7).write()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"tiny.yaml": kept}


def test_a_run_that_can_not_write_the_studys_file_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hpo.InputError, match=r"tiny.yaml: can't be written \(Not a directory\)"):
        hpo.run(study(tmp_path / "file"), output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_call_shows_what_it_calls() -> None:
    assert repr(hpo.Call(nn.Linear, 4, bias=False)) == "Call(Linear, 4, bias=False)"
    assert repr(hpo.Call("model.Net")) == "Call('model.Net')"
