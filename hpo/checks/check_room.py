"""Checks entries below another entry: each needs a place in every value that the other entry may set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpo.config.paths import Keys, PathError, assign, copy_plain, join_path, show, split_path
from hpo.config.schema_space import CategoricalParam, label
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.errors import InputError


def check_room(spec: StudySpec, space: SearchSpace) -> Iterator[InputError]:
    """An error for each entry that may be active together with a value that has no place for it."""
    places = {split_path(path): path for path in space.params}
    for keys, path in places.items():
        for depth in range(1, len(keys)):
            above = places.get(keys[:depth], "")
            entry = spec.config.search_space.get(above)
            for choice in entry.choices if isinstance(entry, CategoricalParam) else ():
                if not _has_room(choice, keys, depth) and space.may_meet(path, above, label(choice)):
                    here = join_path(("search_space", path))
                    problem = f"is drawn where `{above}` is {show(choice)}, which has no such part"
                    fix = f"add `when: {{{above}: …}}`, with the choices that it is a part of"
                    yield spec.error(problem, path=here, fix=fix)


def _has_room(choice: Any, keys: Keys, depth: int) -> bool:
    """Whether a value set at the first ``depth`` keys has a place for all `keys`."""
    if choice is None:
        return keys[0] == "callbacks"  # null is a callback with its defaults
    try:
        assign({"choice": copy_plain(choice)}, ("choice", *keys[depth:]), None)
    except PathError:
        return False
    return True
