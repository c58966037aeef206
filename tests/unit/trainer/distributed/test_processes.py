"""What a process sees of another one's end."""

import builtins
import os
import subprocess
import sys
from typing import Any, Self

import pytest

from trainer.distributed.processes import _has_ended


class _GoneWhenRead:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> str:
        raise ProcessLookupError


def test_a_process_that_goes_while_it_is_looked_at_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _has_ended(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert _has_ended(process.pid)
    with monkeypatch.context() as patched:
        opened: Any = lambda *_: _GoneWhenRead()  # noqa: E731
        patched.setattr(builtins, "open", opened)
        ended = _has_ended(os.getpid())
    assert ended
