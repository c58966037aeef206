"""Records where each value of a config was written, for errors with file and line."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpo.config.paths import Keys, join_path, leaves, show
from hpo.errors import InputError

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Marks:
    """The lines of a file's keys, and the keys that overrides have set.

    Attributes:
        file: The file as the person named it.
        lines: The line of each key that still has the file's value.
        overridden: Keys that were set on the command line.
    """

    file: str
    lines: Mapping[Keys, int]
    overridden: frozenset[Keys] = frozenset()

    def override(self, keys: Keys, value: Any = None) -> "Marks":
        """The marks after an override has set this value at these keys."""
        left = self.without(keys)
        below = {(*keys, *rest) for rest, _ in leaves(value)}
        return replace(left, overridden=left.overridden | {keys} | below)

    def without(self, keys: Keys) -> "Marks":
        """The marks as if these keys and all below them had not been written."""
        depth = len(keys)
        lines = {known: line for known, line in self.lines.items() if known[:depth] != keys}
        overridden = frozenset(known for known in self.overridden if known[:depth] != keys)
        return replace(self, lines=lines, overridden=overridden)

    def is_written(self, keys: Keys) -> bool:
        """Whether a person wrote these keys, or some below them, in the file or as an override."""
        return any(known[: len(keys)] == keys for known in (*self.overridden, *self.lines))

    def locate(self, keys: Keys) -> tuple[str, int | None]:
        """The file and line of a key, or of the nearest key above it that was written somewhere."""
        if keys and keys not in self.lines and any(known[: len(keys)] == keys for known in self.overridden):
            return COMMAND_LINE, None
        for depth in range(len(keys), 0, -1):
            prefix = keys[:depth]
            if prefix in self.overridden:
                return COMMAND_LINE, None
            if prefix in self.lines:
                return self.file, self.lines[prefix]
        return self.file, 1

    def error(self, problem: str, keys: Keys, *, value: Any = "", fix: str = "") -> InputError:
        """An InputError at these keys."""
        file, line = self.locate(keys)
        return InputError(problem, file=file, line=line, path=join_path(keys), value=show(value), fix=fix)
