"""A full disk is a limit of a process: its tests have one of their own, and leave the one of the others alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.full
def test_a_full_disk(tmp_path: Path) -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--noconftest", f"--basetemp={tmp_path / 'cases'}"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name("cases.py"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 passed" in done.stdout
