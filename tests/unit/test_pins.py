"""The versions that `make install` installs."""

from __future__ import annotations

import contextlib
import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_each_pinned_package_installs_with_the_first_python_that_the_readme_names() -> None:
    """Debian 12 has Python 3.11.2: where a pinned package wants a later one, `make run` ends without a study."""
    wanted = {}
    for name in re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(), re.MULTILINE):
        with contextlib.suppress(PackageNotFoundError):  # of another platform
            wanted[name] = metadata(name)["Requires-Python"] or ""
    assert len(wanted) > 100
    assert [name for name, python in wanted.items() if not SpecifierSet(python).contains("3.11.0")] == []
