"""Loads samplers and pruners from OptunaHub by name, such as ``optunahub:samplers/auto_sampler``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hpo.config.spec import StudySpec

PREFIX: Final = "optunahub:"
#: The key for a local registry in place of the public one: a folder that contains ``samplers`` and ``pruners``.
REGISTRY: Final = "registry"


def find_in_hub(spec: StudySpec, path: str, node: Mapping[str, Any], base: type) -> type:
    """The class that a package of OptunaHub offers.

    OptunaHub downloads the package to its cache at the first use and reads it from there afterwards. With
    ``registry`` beside the name, the package is read from that folder, relative to the study file.

    Args:
        spec: The study file.
        path: The node's path in it.
        node: ``name``, and optionally ``registry``. Where a package has several classes, the name says which one
            after a ``#``.
        base: `optuna.samplers.BaseSampler` or `optuna.pruners.BasePruner`.

    Raises:
        InputError: OptunaHub is not installed, the package can't be loaded, or it is not clear which class of it
            is meant.
    """
    package, _, wanted = str(node["name"]).removeprefix(PREFIX).partition("#")
    module = _load(spec, path, package, node.get(REGISTRY))
    offered = {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and name in getattr(module, "__all__", [name])
    }
    offered = {name: kind for name, kind in offered.items() if not kind.__module__.startswith("optuna.")}
    if wanted in offered:
        return offered[wanted]
    if len(offered) == 1 and not wanted:
        return next(iter(offered.values()))
    named = ", ".join(f"`{PREFIX}{package}#{name}`" for name in offered)
    raise spec.error(
        f"the package has {len(offered)} classes of this kind" + (f", and no `{wanted}`" if wanted else ""),
        path=f"{path}.name",
        value=node["name"],
        fix=f"write one of {named}" if named else f"name a package with a subclass of {base.__name__}",
    )


def _load(spec: StudySpec, path: str, package: str, registry: object) -> ModuleType:
    try:
        import optunahub
    except ImportError as error:
        fix = "install it: pip install 'hpo-service[hub]'"
        raise spec.error("needs the package optunahub", path=f"{path}.name", value=package, fix=fix) from error
    try:
        if registry is None:
            return optunahub.load_module(package)
        return optunahub.load_local_module(package, registry_root=str(spec.folder / Path(str(registry))))
    except Exception as error:  # its code and the network may raise anything
        raise spec.error(
            f"can't be loaded from OptunaHub: {type(error).__name__}: {error}",
            path=f"{path}.name",
            value=package,
            fix="check the package's name and the network, or give a folder of packages with `registry: DIR`",
        ) from error
