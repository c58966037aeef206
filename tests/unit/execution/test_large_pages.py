"""What the fork server asks its system for, and that nothing of it reaches a study's programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpo.execution.launchers.large_pages import forget, large_pages

ASKED = "glibc.malloc.hugetlb=1"
SHOW = "import os; print(os.environ['GLIBC_TUNABLES'])"


@pytest.mark.parametrize(
    ("given", "started_with"),
    [
        (None, ASKED),
        ("glibc.malloc.arena_max=2", f"glibc.malloc.arena_max=2:{ASKED}"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_program_started_inside_asks_and_leaves_no_trace(
    given: str | None, started_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    with large_pages():
        shown = subprocess.run([sys.executable, "-c", SHOW], check=True, capture_output=True, text=True).stdout
        forget()  # as the program does first of all
        assert os.environ.get("GLIBC_TUNABLES") == given
    assert shown.strip() == started_with
    assert os.environ.get("GLIBC_TUNABLES") == given
