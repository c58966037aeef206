"""Resolves import paths to callables, and builds objects from config nodes."""

import functools
import importlib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hpo.config.interpolation import escaped
from hpo.config.paths import split_path, suggest_name
from hpo.config.schema import FREE_SECTIONS, StudyFile
from hpo.config.schema_space import CategoricalParam
from hpo.config.schema_types import TARGET as TARGET
from hpo.config.study_modules import holds_module, open_folder, public_name
from hpo.errors import InputError

PARTIAL, RECURSIVE, ARGS = "_partial_", "_recursive_", "_args_"

#: Keys of a node that are instructions for Hydra, and not arguments of the target.
HYDRA_KEYS = frozenset({TARGET, PARTIAL, RECURSIVE, ARGS, "_convert_"})

_LISTED = 30
#: Modules by the short names under which people import them.
_SHORT = {
    "F": "torch.nn.functional",
    "functional": "torch.nn.functional",
    "lr_scheduler": "torch.optim.lr_scheduler",
    "nn": "torch.nn",
    "np": "numpy",
    "optim": "torch.optim",
}
#: Parts of a text that OmegaConf would interpret.
_SPECIAL = re.compile(r"\$\{|\?\?\?|\\\\")


def named_targets(config: StudyFile) -> Iterator[str]:
    """Every import path in a study file, in the file's order; the choices of the search space come last."""
    for section in FREE_SECTIONS:
        yield from _targets_in(getattr(config, section))
    yield from _targets_in(config.loader.collate_fn)
    for path, entry in config.search_space.items():
        if isinstance(entry, CategoricalParam):
            yield from _targets_in(entry.choices)
            if split_path(path)[-1] == TARGET:
                yield from (choice for choice in entry.choices if isinstance(choice, str))


def _targets_in(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get(TARGET), str):
            yield node[TARGET]
        node = list(node.values())
    for item in node if isinstance(node, list | tuple) else ():
        yield from _targets_in(item)


class TargetResolver:
    """Finds what an import path names: in the study's folder first, then among installed packages.

    Args:
        folder: The folder of the YAML file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._root = open_folder(self.folder)

    def resolve(self, path: str) -> Callable[..., Any]:
        """The class or function of an import path such as ``model.MLP`` or ``torch.optim.SGD``.

        Raises:
            InputError: A part of the path can't be imported, or the path names nothing callable.
        """
        *_, (_, found) = self._parts(path)
        if not callable(found):
            fix = "name a class or a function"
            raise InputError(f"`{path}` is not callable ({type(found).__name__})", value=path, fix=fix)
        return found  # type: ignore[no-any-return]

    def module_of(self, path: str) -> str:
        """The part of an import path that names the module.

        Raises:
            InputError: A part of the path can't be imported.
        """
        *_, module = (name for name, found in self._parts(path) if isinstance(found, ModuleType))
        return module

    def _parts(self, path: str) -> Iterator[tuple[str, Any]]:
        """Each prefix of an import path, and what it names."""
        first, *rest = path.split(".")
        local = holds_module(self.folder, first)
        found: Any = self._import(f"{self._root}.{first}" if local else first, path)
        if found is None:
            known = sorted({item.stem for item in self.folder.glob("*.py")})
            fix = suggest_name(first, known, what=f"modules in {self.folder} are") + "; or install the package"
            if first in _SHORT:
                fix = f"write `{'.'.join((_SHORT[first], *rest))}`"
            raise InputError(f"can't import `{first}`: there is no such module", value=path, fix=fix)
        yield first, found
        for at, name in enumerate(rest, start=1):
            found = self._member(found, name, path)
            yield ".".join((first, *rest[:at])), found

    def _member(self, owner: Any, name: str, path: str) -> Any:
        try:
            return getattr(owner, name)
        except AttributeError:
            pass
        module = self._import(f"{owner.__name__}.{name}", path) if isinstance(owner, ModuleType) else None
        if module is not None:
            return module
        label = public_name(getattr(owner, "__name__", str(owner)))
        known = [item for item in dir(owner) if not item.startswith("_")]
        fix = suggest_name(name, known[:_LISTED] if len(known) <= _LISTED else _close(name, known))
        if isinstance(owner, ModuleType) and self._stands_for_a_package(label):
            fix = f"rename `{label}` in {self.folder}: it hides the installed package"
        raise InputError(f"`{label}` has no `{name}`", value=path, fix=fix)

    def _stands_for_a_package(self, module: str) -> bool:
        """Whether a module of the folder has the name of an installed package."""
        if "." in module or not holds_module(self.folder, module):
            return False
        try:
            found = importlib.util.find_spec(module)
        except ValueError:  # a module without a spec, such as `__main__`
            return False
        return found is not None and not Path(found.origin or self.folder).is_relative_to(self.folder)

    def _import(self, name: str, path: str) -> ModuleType | None:
        """Import a module; None if this module itself does not exist."""
        try:
            return importlib.import_module(name)
        except KeyboardInterrupt:  # Ctrl-C
            raise
        except BaseException as error:
            from trainer.error_text import error_text

            if isinstance(error, ModuleNotFoundError) and error.name is not None:
                missing = error.name
                if name == missing or name.startswith(f"{missing}."):
                    return None
            where = self._where(error)
            problem = f"importing `{public_name(name)}` failed: {error_text(error)}"
            fix = f"correct {where}" if where else "check that the package is installed whole"
            raise InputError(problem.replace("\n", " "), value=path, fix=fix) from error

    def _where(self, error: BaseException) -> str:
        """The innermost line of the study's own code that an exception came through; empty if there is none."""
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).is_relative_to(self.folder)]
        return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def instantiate(
    resolver: TargetResolver, node: Mapping[str, Any], /, *args: Any, _as_function: bool = False, **kwargs: Any
) -> Any:
    """Build what a resolved config node describes, including nested nodes, as Hydra's `instantiate` does.

    For a node with plain arguments, Hydra only decides whether the target may be called.

    An exception of the target keeps its own type.

    Args:
        resolver: Finds the import paths.
        node: A mapping with ``_target_`` and the target's arguments.
        *args: Positional arguments in addition to the config's, passed as they are.
        _as_function: Do not call a plain function but bind its arguments (metrics, loss, step); a class is
            instantiated all the same.
        **kwargs: Keyword arguments that replace those of the config.

    Raises:
        InputError: An import path can't be resolved.
    """
    tree = _with_callables(resolver, node)
    target = tree[TARGET]
    partial = bool(tree.get(PARTIAL)) or (_as_function and not inspect.isclass(target))
    arguments = {key: value for key, value in tree.items() if key not in HYDRA_KEYS}
    plain = _is_plain(tree, arguments) and not is_refused(target)
    bound = functools.partial(target, **arguments) if plain else _bound(tree, target)
    return functools.partial(bound, *args, **kwargs) if partial else bound(*args, **kwargs)


def _is_plain(tree: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a node has only plain values, and no keys or texts that need Hydra."""
    if any(key in tree for key in (RECURSIVE, ARGS, "_convert_")):
        return False
    if not (inspect.isclass(tree[TARGET]) or inspect.isroutine(tree[TARGET])):  # others may not be hashable
        return False
    return all(isinstance(key, str) for key in arguments) and all(
        value is None or isinstance(value, int | float) or (isinstance(value, str) and not _SPECIAL.search(value))
        for value in arguments.values()
    )


def _bound(tree: dict[str, Any], target: Callable[..., Any]) -> Callable[..., Any]:
    """A target with its node's arguments as Hydra builds them."""
    from hydra.errors import InstantiationException

    # Always a partial first: so args reach the target without a copy, and its exceptions are not wrapped.
    # Text is escaped twice: Hydra resolves the node, and then resolves it again as it reads its values.
    settings = {**escaped(escaped(tree)), PARTIAL: True, "_convert_": tree.get("_convert_", "all")}
    try:
        made = _by_hydra(settings)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from cause.__cause__
    return functools.partial(target, *made.args, **made.keywords)


@functools.lru_cache(maxsize=256)
def is_refused(target: Callable[..., Any]) -> bool:
    """Whether Hydra refuses to call a target because it runs code or changes the system."""
    from hydra.errors import InstantiationException

    try:
        _by_hydra({TARGET: target, PARTIAL: True})  # a partial: nothing is called
    except (InstantiationException, IndexError):  # IndexError: its check of `setattr` reads the missing arguments
        return True
    return False


def _by_hydra(tree: Mapping[str, Any]) -> Any:
    """Instantiate a node with Hydra; its targets are callables already."""
    from hydra.utils import instantiate as hydra_instantiate
    from omegaconf import OmegaConf

    return hydra_instantiate(OmegaConf.create(_as_nodes(tree), flags={"allow_objects": True}))


def _as_nodes(node: Any) -> Any:
    """A tree with wrapped targets: OmegaConf would read a dataclass as a schema, and refuse `dict`."""
    from omegaconf import AnyNode

    if isinstance(node, list):
        return [_as_nodes(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    tree = {key: _as_nodes(value) for key, value in node.items()}
    if callable(node.get(TARGET)):  # below `_recursive_: false` it is text
        tree[TARGET] = AnyNode(node[TARGET], flags={"allow_objects": True})
    return tree


def _with_callables(resolver: TargetResolver, node: Any) -> Any:
    if isinstance(node, Mapping):
        if node.get(RECURSIVE) is False:  # the target gets nested nodes as plain data
            return {**node, TARGET: resolver.resolve(node[TARGET])} if TARGET in node else dict(node)
        return {
            key: resolver.resolve(value) if key == TARGET else _with_callables(resolver, value)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_with_callables(resolver, item) for item in node]
    return node


def _close(name: str, known: list[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, known, n=5) or known[:_LISTED]
