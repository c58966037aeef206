"""Selects parameters by patterns of their names, and builds an optimizer's parameter groups from such patterns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from trainer.step.parts import bare_model

#: The key of a group that names its parameters, where the group's own name is not a pattern.
PARAMETERS: Final = "parameters"


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a parameter or module, or of a module that contains it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def parameters_of(model: nn.Module, patterns: str | Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters of a model whose names match one of the patterns, by name.

    Args:
        model: Also one inside torch's wrappers, whose names count then.
        patterns: Names of parameters or modules as ``model.named_parameters()`` has them, or shell-style patterns:
            ``"encoder"`` and ``"encoder.*"`` are all of a module, ``"*.bias"`` all biases.

    Raises:
        ValueError: A pattern matches no parameter; the nearest name is given.
    """
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    named = dict(bare_model(model).named_parameters())
    for pattern in patterns:
        if not any(matches(name, pattern) for name in named):
            raise ValueError(f"no parameter of the model is called {pattern!r}{_nearest(pattern, named)}")
    return {name: item for name, item in named.items() if any(matches(name, pattern) for pattern in patterns)}


def parameter_groups(model: nn.Module, groups: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer, such as layers with their own learning rate.

    ```python
    torch.optim.AdamW(parameter_groups(model, {"encoder": {"lr": 1e-5}, "*.bias": {"weight_decay": 0.0}}), lr=1e-3)
    ```

    Args:
        model: The model; each of its parameters is put into exactly one group.
        groups: Pattern (see `parameters_of`) → arguments of the optimizer for the parameters that match. If the
            arguments contain ``parameters``, a pattern or a list of patterns, the key is only a name. A parameter
            belongs to the first group that matches it.

    Returns:
        First a group of all parameters that match no pattern, which has the optimizer's general arguments (left
        out if it is empty); then the given groups, in their order. The metric ``lr`` is that of the first group.

    Raises:
        ValueError: A pattern matches no parameter, or only parameters of earlier groups.
    """
    left = dict(bare_model(model).named_parameters())
    made: list[dict[str, Any]] = []
    for name, arguments in groups.items():
        found = parameters_of(model, arguments.get(PARAMETERS, name))
        taken = {key: item for key, item in found.items() if key in left}
        if not taken:
            raise ValueError(
                f"the group {name!r} gets no parameter: the groups before it have taken all that match, such as "
                f"{next(iter(found))!r}; put it before them"
            )
        left = {key: item for key, item in left.items() if key not in taken}
        own = {key: value for key, value in arguments.items() if key != PARAMETERS}
        made.append({"params": list(taken.values()), **own})
    return [{"params": list(left.values())}, *made] if left else made


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """The end of an error text: the parameter or module with the nearest name, or else the top-level names."""
    known = [name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)]
    close = difflib.get_close_matches(pattern.removesuffix(".*"), dict.fromkeys(known), n=1)
    top = dict.fromkeys(name.partition(".")[0] for name in known)
    return f": did you mean {close[0]!r}?" if close else f": its parts are {', '.join(top)}"
