"""MetricNames: selects the metrics that a callback uses, by patterns."""

from collections.abc import Iterable
from fnmatch import fnmatchcase


class MetricNames:
    """Contains the names that match one of the ``fnmatch`` patterns; with None for ``metrics``, all names.

    Raises:
        ValueError: ``metrics`` is a single text instead of a list, or empty.
    """

    def __init__(self, metrics: Iterable[str] | None) -> None:
        if isinstance(metrics, str):
            raise ValueError(f"metrics is {metrics!r}: give a list, [{metrics}]")  # noqa: TRY004 - as for others
        self.patterns = ("*",) if metrics is None else tuple(metrics)
        if not self.patterns:
            raise ValueError("metrics is an empty list: give patterns such as train_*, or leave it out for all")

    def __contains__(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)
