"""The shape of the house: which way imports go, and that no file grows past reading."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("trainer", "hpo") for path in (ROOT / package).rglob("*.py"))
#: Past this a file is several.
_LONGEST = 450


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
    """Imports under TYPE_CHECKING count: a cycle of names is a cycle to whoever reads.

    Those in functions don't: they run late, and are there so that `hpo --help` needs no torch.
    """
    graph = {
        name: {item.target for item in imports(path) if not item.lazy and item.target in MODULES} - {name}
        for name, path in MODULES.items()
        if name.partition(".")[0] == package
    }
    assert not _cycle(graph)


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of the graph, or nothing: what is left when modules without imports are taken away in turn."""
    left = {name: targets & graph.keys() for name, targets in graph.items()}
    while leaves := {name for name, targets in left.items() if not targets}:
        left = {name: targets - leaves for name, targets in left.items() if name not in leaves}
    return sorted(left)


def test_a_cycle_would_be_found() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: name_of(path))
def test_every_file_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= _LONGEST
    if text.strip():
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring
        assert len(docstring.splitlines()[0]) <= 120
