"""What may change once a study has started is marked in the schema; what was stored is read by today's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpo.config.identity import identity, stored_identity
from hpo.config.paths import assign, copy_plain, diff_configs, join_path, lookup, split_path
from hpo.config.schema import StudyFile, known_keys, model_of
from hpo.config.schema_loader import LoaderSection
from hpo.config.schema_types import MAY_CHANGE
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError
from hpo.storage.attributes import CONFIG_ATTR, HASH_ATTR
from hpo.study.open_study import start_study
from tests.support.commands import STUDY, make_study

ROOT = Path(__file__).parents[3]
SHIPPED = [*sorted(ROOT.glob("studies/*/study.yaml")), *sorted(ROOT.glob("hpo/templates/*/study.yaml"))]
#: What a study of this file would be with another value of a key, where the schema's example is not one.
OTHERS = {
    "study.metric": "val_other_loss",
    "study.direction": "maximize",
    "study.sampler": "random",
    "study.pruner": "percentile",
    "study.sampler.name": "tpe",
    "study.sampler.allow_pickle": True,
    "study.sampler.seed": 7,
    "study.pruner.name": "percentile",
    "loader.batch_size": 8,
    "loader.eval_batch_size": 8,
    "loader.num_workers": 1,
    "loader.drop_last": True,
    "loader.shuffle": False,
    "trainer.max_epochs": 9,
    "trainer.cuda_graph": True,
    "trainer.weights": {"path": "other.pt"},
    "trainer.weights.path": "other.pt",
    "trainer.weights.strict": False,
    "run.workers": 3,
    "run.max_retries": 1,
    "run.lost_after": 61,
    "run.keep_best": 2,
}


#: What a key can't be given without.
NEEDED = {
    f"loader.{key}": {"loader.num_workers": 1} for key in ("persistent_workers", "prefetch_factor", "timeout")
}


def may_change(path: str) -> bool:
    """Whether a key of the schema, or a section above it, has the mark."""
    model: Any = StudyFile
    for key in split_path(path):
        field = model.model_fields[key]
        if MAY_CHANGE in field.metadata:
            return True
        model = model_of(field)
    return False


def keys_with_values() -> list[tuple[str, Any]]:
    """Every key of the sections whose keys are known, with a value that is not its default."""
    found = []
    for keys in known_keys():
        path = join_path(keys)
        above: Any = StudyFile
        for key in keys[:-1]:
            above = model_of(above.model_fields[key])
        field = above.model_fields[keys[-1]]
        if len(keys) > 1 and path != "study.objectives":
            example = OTHERS.get(path, (field.examples or [None])[-1])
            found.append((path, example))
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.mark.parametrize(("path", "value"), keys_with_values())
def test_the_identity_is_what_is_not_marked(file: Path, path: str, value: Any) -> None:
    needed = [f"{key}={json.dumps(needs)}" for key, needs in NEEDED.get(path, {}).items()]
    before = load_spec(file, needed)
    after = load_spec(file, [*needed, f"{path}={json.dumps(value)}"])
    assert after.config != before.config, f"{path}: give the test a value in OTHERS that is not the default"
    same = identity(after.base_config()) == identity(before.base_config())
    assert same == may_change(path)
    assert (after.config_hash() == before.config_hash()) == may_change(path)


def test_how_a_study_is_run_is_marked_as_a_whole_and_what_is_searched_is_not() -> None:
    assert all(may_change(path) for path, _ in keys_with_values() if path.startswith("run."))
    marked = {path for path, _ in keys_with_values() if may_change(path) and not path.startswith("run.")}
    assert marked == {
        *("study.name", "study.n_trials", "study.epochs", "study.target_value", "study.stop_after_no_improvement"),
        *("trainer.device", "trainer.devices", "trainer.strategy"),
    }


class LaterLoader(LoaderSection):
    """The section as a later version may have it."""

    prefetch: int = 2


class LaterFile(StudyFile):
    """The schema as a later version may have it."""

    loader: LaterLoader = LaterLoader()
    hooks: str | None = None


def test_a_file_keeps_its_hash_when_the_schema_gets_a_key(file: Path) -> None:
    spec = load_spec(file)
    given = spec.config.model_dump()
    later = replace(spec, config=LaterFile.model_validate(given))
    assert later.config_hash() == spec.config_hash()
    used = replace(spec, config=LaterFile.model_validate({**given, "loader": {"prefetch": 3}}))
    assert used.config_hash() != spec.config_hash()


# ---- configs that were stored


def stored(spec: StudySpec) -> dict[str, Any]:
    """A base config as it comes back from a storage."""
    config: dict[str, Any] = json.loads(json.dumps(spec.base_config()))
    return config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_a_config_without_any_default_is_the_same(path: Path) -> None:
    """As if every key that has a default had come after the study was started; the schema reads it all."""
    spec = load_spec(path)
    config = json.loads(json.dumps(spec.config.model_dump(mode="json", exclude_defaults=True)))
    config["gone"] = {"a": 1}  # read at all only if today's schema reads it
    assert stored_identity(config) == identity(spec.base_config()) == stored_identity(stored(spec))


def drop(config: dict[str, Any], path: str) -> None:
    *above, key = split_path(path)
    del lookup(config, tuple(above))[key]


def lacks_defaults(config: dict[str, Any]) -> None:
    for path in ("study.duplicates", "study.sampler.allow_pickle", "loader.drop_last", "lr_scheduler.warmup"):
        drop(config, path)
    for path in ("metrics", "trainer.precision", "run"):
        drop(config, path)


def has_gone_keys(config: dict[str, Any]) -> None:
    for path in ("study.workers", "loader.prefetch", "trainer.amp", "search_space[optimizer.lr].prior", "hooks.a"):
        assign(config, split_path(path), 3)
    config["run"]["nice"] = 19


def plant(file: Path, change: Callable[[dict[str, Any]], None], *overrides: str) -> None:
    """Start the study, with a stored config as another version would have stored it."""
    with start_study(load_spec(file, overrides)) as opened:
        config = copy_plain(opened.study.user_attrs[CONFIG_ATTR])
        change(config)
        opened.study.set_user_attr(CONFIG_ATTR, config)
        opened.study.set_user_attr(HASH_ATTR, "of another version")


def reopen(file: Path, *overrides: str) -> None:
    start_study(load_spec(file, overrides)).storage.close()


def without_metrics(tmp_path: Path) -> Path:
    text = yaml.safe_load(STUDY.replace("1e-", "1.0e-"))
    return make_study(tmp_path, yaml.safe_dump({**text, "metrics": {}}))


@pytest.mark.parametrize("change", [lacks_defaults, has_gone_keys])
def test_a_study_of_an_earlier_version_is_continued(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    file = without_metrics(tmp_path)
    plant(file, change)
    reopen(file)
    reopen(file, "run.workers=3", "study.n_trials=9", "study.target_value=0.1")


@pytest.mark.parametrize("change", [lacks_defaults, has_gone_keys])
def test_what_differs_is_refused_and_nothing_else_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    file = without_metrics(tmp_path)
    plant(file, change)
    with pytest.raises(InputError) as raised:
        reopen(file, "optimizer.lr=0.5", "study.duplicates=reuse")
    assert raised.value.problem.splitlines()[1:] == [
        "    study.duplicates: resample → reuse",
        "    optimizer.lr: 0.01 → 0.5",
    ]


def test_several_objectives_are_read_back(tmp_path: Path) -> None:
    file = make_study(tmp_path)
    overrides = ("study.objectives={val_loss: minimize, val_mae: minimize}", "study.pruner=none")
    plant(file, lambda config: drop(config, "study.duplicates"), *overrides)
    reopen(file, *overrides)
    with pytest.raises(InputError, match=r"study.objectives.val_mae: minimize → maximize"):
        reopen(file, "study.objectives={val_loss: minimize, val_mae: maximize}", "study.pruner=none")


def test_a_config_that_can_not_be_read_any_more_is_compared_as_it_is(tmp_path: Path) -> None:
    file = make_study(tmp_path)
    plant(file, lambda config: assign(config, ("trainer", "precision"), "fp8"))
    with pytest.raises(InputError) as raised:
        reopen(file)
    assert raised.value.problem.splitlines()[1:] == ["    trainer.precision: fp8 → fp32"]


def test_a_whole_number_is_the_same_as_a_real_one(tmp_path: Path) -> None:
    file = make_study(tmp_path)
    plant(file, lambda config: None, "model.delay=0")
    reopen(file, "model.delay=0.0")


# ---- numbers without an end


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_not_null(tmp_path: Path, number: float) -> None:
    file = make_study(tmp_path)
    written = {math.inf: ".inf", -math.inf: "-.inf"}.get(number, ".nan")
    given, null = (f"data.limits=[{written}, 1]", "data.limits=[null, 1]")
    spec, text = load_spec(file, [given]), load_spec(file, [f"data.limits=['{json.dumps(number)}', 1]"])
    limits = spec.base_config()["data"]["limits"]
    assert limits == pytest.approx([number, 1], nan_ok=True)
    assert len({one.config_hash() for one in (spec, load_spec(file, [null]), text)}) == 3
    assert diff_configs(identity(spec.base_config()), stored_identity(stored(spec))) == []
    assert diff_configs(identity(spec.base_config()), identity(text.base_config())) != []


def test_a_study_with_an_infinite_argument_is_continued_and_with_null_refused(tmp_path: Path) -> None:
    text = STUDY.replace("_target_: parts.load", "_target_: limited.load, limit: .inf")
    file = make_study(tmp_path, text)
    assert file.with_name("limited.py").write_text(
        "def load(limit):\n    from parts import load\n    return load()\n"
    )
    reopen(file)
    reopen(file)
    with pytest.raises(InputError, match=r"data.limit: Infinity → null"):
        reopen(file, "data.limit=null")


def test_a_part_of_a_config_has_the_identity_of_its_sections() -> None:
    part: Mapping[str, Any] = {"trainer": {"max_epochs": 3, "device": "cpu"}, "data": {"device": "cpu"}}
    assert identity(part) == {"trainer": {"max_epochs": 3}, "data": {"device": "cpu"}}
    assert identity({"trainer": {"device": "cpu"}, "metrics": {}}) == {"metrics": {}}
