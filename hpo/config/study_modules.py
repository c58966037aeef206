"""Loads a study folder's modules under a name private to the folder.

The folder becomes a package with a generated name (``_hpo_study_<hash>``), so that two studies may each have a
``model.py``. Inside its modules, ``import data`` and ``from data import load`` mean the folder's own
``data.py``: each module gets an ``__import__`` that looks in the folder first, at load time and later, while
``sys.path`` and the names of other modules stay as they are. No bytecode is written or read.

A process reads each file of the folder once: an import executes what `source_of` has returned, even if the file
has changed since. So the code that is hashed (`hpo.config.code`) is the code that runs.

Limits: ``importlib.import_module("data")`` inside a study does not look in the folder, and a process that was
spawned rather than forked can't unpickle the study's classes before it has opened the folder, too.
"""

import builtins
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_PREFIX = "_hpo_study_"

#: The sources that this process has read, by path.
_sources: dict[str, bytes] = {}


def open_folder(folder: Path) -> str:
    """Make a folder importable under its private name, and return the name."""
    folder = folder.resolve()
    root = _PREFIX + hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    if not any(isinstance(finder, _StudyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StudyFinder())
    if root not in sys.modules:
        spec = importlib.machinery.ModuleSpec(root, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[root] = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    return root


def source_of(file: Path) -> bytes:
    """The source of a study's module, as this process first read it; raises OSError if it can't be read."""
    source = _sources.get(str(file))
    if source is None:
        source = _sources[str(file)] = file.read_bytes()
    return source


def forget_modules(folder: Path) -> None:
    """Make the next import read the folder's modules again: in a notebook they may have changed."""
    root, inside = open_folder(folder), folder.resolve()
    for name in [name for name in sys.modules if name.startswith(f"{root}.")]:
        del sys.modules[name]
    for path in [path for path in _sources if Path(path).is_relative_to(inside)]:
        del _sources[path]


def holds_module(folder: Path, name: str) -> bool:
    """Whether a folder has a module or package of this name."""
    inside = folder / name
    if inside.with_name(f"{name}.py").is_file() or (inside / "__init__.py").is_file():
        return True
    return inside.is_dir() and any(inside.glob("*.py"))


def public_name(name: str) -> str:
    """A module's name as the study's own code would write it."""
    root, _, rest = name.partition(".")
    return rest if root.startswith(_PREFIX) and rest else name


class _StudyFinder:
    """Finds modules of the private packages, and only those."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = fullname.partition(".")[0]
        if path is None or not root.startswith(_PREFIX) or root not in sys.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _StudyLoader(fullname, spec.loader.path, root)
        return spec


class _StudyLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, root: str) -> None:
        super().__init__(fullname, path)
        self._root = root

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source; cached bytecode may be older."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(source_of(Path(path)), path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        names = dict(vars(builtins))
        names["__import__"] = _import_within(self._root)
        # CPython looks up a module's builtins, including __import__, in this global.
        module.__dict__["__builtins__"] = names
        super().exec_module(module)


def _import_within(root: str) -> Any:
    folder = Path(sys.modules[root].__path__[0])

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not holds_module(folder, top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        private = f"{root}.{name}"
        if fromlist:
            return builtins.__import__(private, globals, locals, fromlist, 0)
        importlib.import_module(private)
        return sys.modules[f"{root}.{top}"]

    return import_
