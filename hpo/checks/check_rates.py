"""Checks that a study's learning rates are numbers, in its optimizer's section and in what is searched there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hpo.config.paths import Keys, join_path, split_path
from hpo.config.schema_errors import is_quoted
from hpo.config.schema_space import CategoricalParam
from hpo.config.spec import StudySpec

_SECTION: Final = "optimizer"
_RATE: Final = "lr"


def check_rates(spec: StudySpec, *, search: bool) -> None:
    """Refuse a learning rate that is a text, true or a list: torch's own error does not name the place.

    Args:
        spec: The study.
        search: Also look at the choices of the search space.

    Raises:
        InputError: A learning rate is not a number.
    """
    rates = list(_rates(spec.base_config()[_SECTION], (_SECTION,)))
    for path, entry in spec.config.search_space.items() if search else ():
        keys = split_path(path)
        if isinstance(entry, CategoricalParam) and keys[0] == _SECTION:
            for at, choice in enumerate(entry.choices):
                place: Keys = ("search_space", path, "choices", at)
                rates += [(place, choice)] if keys[-1] == _RATE else _rates(choice, place)
    for keys, rate in rates:
        if isinstance(rate, str | bool | list):
            quoted = is_quoted(rate, "float_type")
            fix = "leave the quotes out" if quoted else "write a number, 1e-3 for example"
            value = f'"{rate}"' if quoted else rate
            raise spec.error("a learning rate is a number", path=join_path(keys), value=value, fix=fix)


def _rates(node: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """All learning rates in a section, including those of groups and of nested optimizers."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key == _RATE:
            yield (*keys, key), value
        else:
            yield from _rates(value, (*keys, key))
