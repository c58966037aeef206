"""The shape of the house: which way imports go, what has one place, and that no file grows past reading."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from optuna.storages import RDBStorage

from hpo.storage.optuna_private import OVERRIDDEN
from hpo.storage.study_storage import StudyStorage

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("trainer", "hpo") for path in (ROOT / package).rglob("*.py"))
#: Past this a file is several.
_LONGEST = 450

#: hpo's packages by the lines of the tour in CONTRIBUTING.md, behind what Python starts with; each imports from
#: lines below its own only, never from its own line.
LAYERS = (
    ("__init__", "__main__"),
    ("cli", "api"),
    ("console",),
    ("execution",),
    ("checks", "draft", "final", "report", "dashboard", "integrations"),
    ("trial",),
    ("study",),
    ("search",),
    ("storage", "config"),
    ("errors", "signals", "wording"),
)
#: What `hpo init` copies for a new study: it runs there, and belongs to no layer.
_COPIED = "templates"


@dataclass(frozen=True)
class Import:
    """One import statement's module; ``lazy`` where it stands in a function, and runs only when that is called."""

    target: str
    lazy: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file, those under TYPE_CHECKING and in functions included."""
    return tuple(_imports(ast.parse(path.read_text()), path, lazy=False))


def _imports(node: ast.AST, path: Path, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: write the whole name"
            assert child.module is not None
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield Import(inner if inner in MODULES else child.module, lazy)
        inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(child, path, lazy=inside)


def imported_by(package: str) -> set[tuple[str, str]]:
    """(file, top-level package) of everything that a package imports, wherever in the file it stands."""
    return {
        (name, item.target.partition(".")[0])
        for name, path in MODULES.items()
        if name.partition(".")[0] == package
        for item in imports(path)
    }


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "trainer",
            {"hpo", "optuna", "sqlalchemy", "pydantic", "omegaconf", "hydra", "studies", "tests"},
        ),
        ("hpo", {"studies", "tests", "benchmarks"}),
    ],
)
def test_imports_go_one_way(package: str, forbidden: set[str]) -> None:
    assert not {(file, name) for file, name in imported_by(package) if name in forbidden}


def test_the_scan_sees_what_is_there() -> None:
    assert ("hpo.storage.cache", "optuna") in imported_by("hpo")
    assert ("hpo.trial.builder", "trainer") in imported_by("hpo")
    assert ("trainer.callbacks.wandb_logging", "wandb") in imported_by("trainer")
    assert Import("hpo.config.spec", lazy=True) in imports(MODULES["hpo.cli.options"])
    assert Import("hpo.storage.guarded", lazy=False) in imports(MODULES["hpo.storage.study_storage"])


@pytest.mark.parametrize("package", ["trainer", "hpo"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    """Imports under TYPE_CHECKING and in functions count: a cycle of names is a cycle to the reader."""
    graph = {
        name: {item.target for item in imports(path) if item.target in MODULES} - {name}
        for name, path in MODULES.items()
        if name.partition(".")[0] == package
    }
    assert not _cycle(graph)


def layer_breaks(imported: Mapping[str, Iterable[str]]) -> list[str]:
    """A sentence for each import of ``imported`` (module → what it imports) that goes up or to a neighbour."""
    lines = {package: line for line, packages in enumerate(LAYERS) for package in packages}
    found = []
    for name, targets in sorted(imported.items()):
        for target in sorted(set(targets)):
            package, other = (_package_of(each) for each in (name, target))
            if other == package or lines[other] > lines[package]:
                continue
            where = "beside" if lines[other] == lines[package] else "above"
            found.append(
                f"{name} ({package}, line {lines[package]} of the layers) imports {target} ({other}, line "
                f"{lines[other]}), {where} it: move what both need to a lower line"
            )
    return found


def _package_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0] or "__init__"


def test_imports_go_down_the_layers() -> None:
    """Imports in functions and under TYPE_CHECKING count."""
    imported = {
        name: [
            item.target
            for item in imports(path)
            if item.target in MODULES and item.target.partition(".")[0] == "hpo"
        ]
        for name, path in MODULES.items()
        if name.partition(".")[0] == "hpo" and _package_of(name) != _COPIED
    }
    packages = {_package_of(name) for name in imported}
    assert packages == {package for line in LAYERS for package in line}, "a package without a line in the layers"
    assert not layer_breaks(imported), "\n".join(layer_breaks(imported))


def test_an_import_upwards_or_sideways_is_caught(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "def late():\n    from hpo.cli import app\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hpo.config.spec import StudySpec\n"
        "from hpo import errors\n"
    )
    targets = [item.target for item in imports(planted) if item.target in MODULES]
    assert targets == ["hpo.cli.app", "hpo.config.spec", "hpo.errors"]
    up, sideways = layer_breaks({"hpo.storage.ledger": targets})
    start, fix = (
        "hpo.storage.ledger (storage, line 8 of the layers) imports",
        "move what both need to a lower line",
    )
    assert up == f"{start} hpo.cli.app (cli, line 1), above it: {fix}"
    assert sideways == f"{start} hpo.config.spec (config, line 8), beside it: {fix}"


def test_the_tour_has_the_layers_and_names_no_module_that_is_gone() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tour = text.partition("### hpo/: the service")[2].partition("\n### A trial")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (.*) \|$", tour, re.MULTILINE)
    in_tour = {(int(line), name) for line, names, _ in rows for name in re.findall(r"`(\w+)/?`", names)}
    held = {(line, name) for line, names in enumerate(LAYERS) for name in names if line}
    assert in_tour == held, "the tour in CONTRIBUTING.md and LAYERS here differ"
    known = {path.stem for path in FILES} | {path.parent.name for path in FILES} | {"templates"}
    for line, names, files in rows:
        gone = {name for name in re.findall(r"`(\w+)(?:/|\*)?`", files) if name not in known}
        assert not gone, f"CONTRIBUTING.md, line {line} ({names}): no module is named {', '.join(sorted(gone))}"


#: What only one module may hold, and the pattern of what says so elsewhere.
_PLACES = [
    (
        "hpo/storage/optuna_private.py",
        r"\boptuna(\.\w+)*\._[a-z]|\._(trial_id|study_id|cached_frozen_trial)\b|study\._storage",
    ),
    ("hpo/storage/attributes.py", r"[\"']hpo:"),
]


@pytest.mark.parametrize(("home", "pattern"), _PLACES, ids=["Optuna's private parts", "keys of attributes"])
def test_what_has_one_place_is_nowhere_else(home: str, pattern: str) -> None:
    others = {
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if path != ROOT / home and re.search(pattern, line)
    }
    assert re.search(pattern, (ROOT / home).read_text()), "the pattern finds nothing any more"
    assert not others, f"these belong into {home}:\n" + "\n".join(sorted(others))


def test_no_other_private_method_of_optunas_storage_is_replaced() -> None:
    ours = {
        name
        for kind in StudyStorage.__mro__
        if kind.__module__.startswith("hpo.")
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and hasattr(RDBStorage, name)
    }
    assert ours - {"_abc_impl"} == OVERRIDDEN


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of the graph, or nothing: what is left when modules without imports are taken away in turn."""
    left = {name: targets & graph.keys() for name, targets in graph.items()}
    while leaves := {name for name, targets in left.items() if not targets}:
        left = {name: targets - leaves for name, targets in left.items() if name not in leaves}
    return sorted(left)


def test_a_cycle_would_be_found() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_every_file_is_short_and_says_what_it_is() -> None:
    texts = {name: path.read_text() for name, path in MODULES.items()}
    assert not [name for name, text in texts.items() if text.count("\n") > _LONGEST]
    said = {name: ast.get_docstring(ast.parse(text)) for name, text in texts.items() if text.strip()}
    assert not [name for name, docstring in said.items() if not docstring]
    assert not [name for name, docstring in said.items() if docstring and len(docstring.splitlines()[0]) > 120]
