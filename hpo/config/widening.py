"""Decides whether a study file's search space is a wider version of a started study's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from hpo.config.conditions import widest
from hpo.config.paths import diff_configs, join_path, same, show
from hpo.config.schema_space import CategoricalParam, FloatParam, IntParam, ParamSpec
from hpo.config.spec import StudySpec

_ENTRIES: TypeAdapter[dict[str, ParamSpec]] = TypeAdapter(dict[str, ParamSpec])
_PARTS = ("search_space", "where")


def not_wider(spec: StudySpec, stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Why a search space is not a wider version of a stored one, one reason a line; empty if it is.

    In a wider version every point of the stored space is a point of the new one: ranges and choices keep all their
    values, the parameters and their conditions are the same, and `where` has no new expression.

    Args:
        spec: The study file.
        stored: The identity of the stored config, see `hpo.config.identity`.
        now: The identity of the file's config.
    """
    rest = ({key: value for key, value in each.items() if key not in _PARTS} for each in (stored, now))
    problems = diff_configs(*rest)
    added = [text for text in now.get("where", ()) if text not in stored.get("where", ())]
    problems += [f"where: `{text}` is new, and trials may violate it" for text in added]
    old = _ENTRIES.validate_python(stored.get("search_space", {}))
    for path in dict.fromkeys((*old, *spec.search_space)):
        here = join_path(("search_space", path))
        if path not in old or path not in spec.search_space:
            problems.append(f"{here}: is {'new' if path not in old else 'gone'}")
    if not problems:
        before = widest(old, spec.base_config(), spec.error)
        for path, entry in spec.search_space.items():
            here, written = join_path(("search_space", path)), (old[path], spec.config.search_space[path])
            problems += [f"{here}: {text}" for text in _entry(before[path], entry, *written)]
    return problems


def widenings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The widened entries, one a line: `optimizer.lr: 0.001 to 0.1 → 0.001 to 1`, `model.a: also 8`."""
    lines = []
    for path, new in now.get("search_space", {}).items():
        old = stored["search_space"][path]
        known = old.get("choices", ())
        added = [choice for choice in new.get("choices", ()) if not any(same(choice, each) for each in known)]
        if added:
            lines.append(f"{path}: also {', '.join(map(show, added))}")
        elif "low" in new and new != old:
            ends = [f"{show(each['low'])} to {show(each['high'])}" for each in (old, new)]
            lines.append(f"{path}: {' → '.join(ends)}")
    gone = [text for text in stored.get("where", ()) if text not in now.get("where", ())]
    lines += [f"no longer `{text}`" for text in gone]
    return lines or ["the same values, written in another way"]


def _entry(old: ParamSpec, new: ParamSpec, old_written: ParamSpec, new_written: ParamSpec) -> list[str]:
    if old.type != new.type or old.when != new.when:
        return ["its type, or when it is searched, is another"]
    if isinstance(old, CategoricalParam) and isinstance(new, CategoricalParam):
        return [
            f"{show(each)} is gone" for each in old.choices if not any(same(each, other) for other in new.choices)
        ]
    assert isinstance(old, FloatParam | IntParam)
    assert isinstance(new, FloatParam | IntParam)
    problems = []
    for end in ("low", "high"):
        was, now = getattr(old_written, end), getattr(new_written, end)
        if isinstance(now, str) and now != was:
            problems.append(f"{end}: {now} may leave out what was allowed")
    if new.low > old.low or new.high < old.high:
        problems.append(f"{show(old.low)} to {show(old.high)} → {show(new.low)} to {show(new.high)} is narrower")
    if old.log != new.log:
        problems.append("`log` is another")
    every = isinstance(new, IntParam) and new.step == 1
    if new.step is not None and not every and not _has_steps(old, new):
        problems.append(f"steps of {show(new.step)} from {show(new.low)} leave out values that were allowed")
    return problems


def _has_steps(old: FloatParam | IntParam, new: FloatParam | IntParam) -> bool:
    """Whether the new steps include every value of the old ones."""
    assert new.step is not None
    if old.step is None:
        return False
    counts = [old.step / new.step, (old.low - new.low) / new.step]
    return all(abs(count - round(count)) < 1e-9 for count in counts)
