"""Hashes the code of a study: finds the modules that its targets reach, without importing any of them.

It starts at each ``_target_`` of the study file, including those among the choices of the search space, and
follows every import statement anywhere in a module. Modules in the study's folder count, and those of packages
in development: packages outside of ``site-packages`` that are not part of Python or of this project. A file
that no module imports does not count.

A module's hash is that of its syntax tree, so comments, blank lines and formatting do not count; nor does the
code under ``if __name__ == "__main__":``, which an import does not execute.

Limits: only Python source counts, not data files or compiled modules. A computed name
(``importlib.import_module(name)``) is not followed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpo.config.study_modules import holds_module, source_of
from hpo.config.targets import named_targets

if TYPE_CHECKING:
    from hpo.config.spec import StudySpec

#: The number of hexadecimal digits of a hash.
_DIGITS: Final = 16
#: Folders of installed packages, as opposed to those in development.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_OURS: Final = frozenset({"hpo", "trainer"})

#: A dotted name of a module, split at its dots.
Name = tuple[str, ...]


@dataclass(frozen=True)
class CodeIdentity:
    """The code that a study runs.

    Attributes:
        files: The hash of each module, by its path in the study's folder (``model.py``), or by its name
            (``project.layers``) if it is in another folder.
    """

    files: Mapping[str, str]

    @property
    def hash(self) -> str:
        """One hash of all modules."""
        return _digest(json.dumps(sorted(self.files.items())))

    def changes_since(self, before: Mapping[str, str]) -> list[str]:
        """One line for each module that differs from earlier `files`; empty if the code is the same."""
        changes = []
        for name in sorted({*before, *self.files}):
            if name not in before:
                changes.append(f"{name} is new")
            elif name not in self.files:
                changes.append(f"{name} is gone")
            elif before[name] != self.files[name]:
                changes.append(f"{name} has changed")
        return changes


def code_identity(spec: StudySpec) -> CodeIdentity:
    """The code that a study's targets reach, as this process would import it; imports nothing."""
    walk = _Walk(spec.folder.resolve())
    for target in named_targets(spec.config):
        walk.reach(tuple(target.split(".")), walk.folder)
    return CodeIdentity(dict(sorted(walk.hashes().items())))


def imported_source(folder: Path, name: Name) -> tuple[Path, ast.Module] | None:
    """The file in a study's folder that a dotted name leads to, and the code that an import of it executes.

    None if the module is not in the folder, or can't be parsed.
    """
    for end in range(len(name), 0, -1):
        file = _file_of(folder.resolve(), name[:end])
        if file is not None:
            source = _source(file, own=True)
            tree = None if source is None else _parsed(source)
            return None if tree is None else (file, tree)
    return None


class _Walk:
    """Follows imports from module to module.

    Args:
        folder: The study's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: deque[tuple[Path, Name]] = deque()
        self._seen: set[tuple[Path, Name]] = set()
        self._base = cache(_development_base)

    def reach(self, name: Name, within: Path) -> None:
        """Follow a name that code below the folder ``within`` imports."""
        own = within == self.folder and holds_module(self.folder, name[0])
        base = self.folder if own else self._base(name[0])
        if base is not None:
            self._add(base, name)

    def hashes(self) -> dict[str, str]:
        """The hash of every module that the walk reaches."""
        found = {}
        while self._waiting:
            base, name = self._waiting.popleft()
            file = _file_of(base, name)
            source = None if file is None else _source(file, own=base == self.folder)
            if file is None or source is None:
                continue
            tree = _parsed(source)
            label = file.relative_to(base).as_posix() if base == self.folder else ".".join(name)
            found[label] = _digest(source) if tree is None else _tree_digest(tree, source)
            self._follow(tree, base, name if file.name == "__init__.py" else name[:-1])
        return found

    def _add(self, base: Path, name: Name) -> None:
        """Queue the packages and the module of a dotted name; it stops at the first part that is not a module."""
        for end in range(1, len(name) + 1):
            module = name[:end]
            if _file_of(base, module) is None and not base.joinpath(*module).is_dir():
                return
            if (base, module) not in self._seen:
                self._seen.add((base, module))
                self._waiting.append((base, module))

    def _follow(self, tree: ast.Module | None, base: Path, package: Name) -> None:
        for node in [] if tree is None else ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.reach(tuple(alias.name.split(".")), base)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else ()
                module = (*above, *(node.module.split(".") if node.module else ()))
                starred = any(alias.name == "*" for alias in node.names)
                names = _submodules(base, module) if starred else [alias.name for alias in node.names]
                for name in [module, *((*module, each) for each in names)]:
                    if node.level:
                        self._add(base, name)
                    else:
                        self.reach(name, base)


def _source(file: Path, *, own: bool) -> bytes | None:
    """A module's source; None if it can't be read, which the import will report."""
    try:
        return source_of(file) if own else file.read_bytes()
    except OSError:
        return None


def is_own_file(file: Path) -> bool:
    """Whether a module's file does not belong to an installed package."""
    return not _INSTALLED & set(file.parts)


def _file_of(base: Path, name: Name) -> Path | None:
    """The file with a module's source, if there is one."""
    path = base.joinpath(*name)
    for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if file.is_file():
            return file
    return None


def _submodules(base: Path, package: Name) -> list[str]:
    """What ``from package import *`` may import, by the package's ``__all__``."""
    folder = base.joinpath(*package)
    inside = sorted(folder.iterdir()) if package and folder.is_dir() else []
    return [item.stem for item in inside if (item.suffix == ".py" and item.stem != "__init__") or item.is_dir()]


def _development_base(top: str) -> Path | None:
    """The folder that holds a package in development; None for installed ones, Python's and this project's."""
    if top in sys.stdlib_module_names or top in _OURS:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):  # a broken finder, or a module without a spec
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    place = Path(places[0]) if places else Path(spec.origin or "")
    if place.suffix not in ("", ".py") or not is_own_file(place):
        return None
    return place.resolve().parent


def _parsed(source: bytes) -> ast.Module | None:
    """The syntax tree without the code that runs only as a script; None if the source can't be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    tree.body = [inner for node in tree.body for inner in _imported(node)]
    return tree


def _imported(node: ast.stmt) -> list[ast.stmt]:
    """The part of a module's statement that an import executes."""
    match node:
        case ast.If(test=ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])):
            return node.orelse
    return [node]


def _tree_digest(tree: ast.Module, source: bytes) -> str:
    try:
        return _digest(_text_of(tree))
    except RecursionError:  # such as a sum of a thousand terms
        return _digest(source)


def _text_of(node: Any) -> str:
    """A syntax tree as text, without positions and empty fields, so that all versions of Python give the same."""
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields)
        kept = (f"{name}={_text_of(value)}" for name, value in fields if value is not None and value != [])
        inner = ",".join(kept)
        return f"{type(node).__name__}({inner})"
    if isinstance(node, list):
        return f"[{','.join(map(_text_of, node))}]"
    return f"{type(node).__name__}:{node!r}"


def _digest(content: str | bytes) -> str:
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(raw).hexdigest()[:_DIGITS]
