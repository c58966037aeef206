"""What a process sees of another one's end."""

import builtins
import os
import subprocess
import sys
from typing import Any, Self

import pytest

from trainer.distributed.local_ranks import has_ended


class _GoneWhenRead:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> str:
        raise ProcessLookupError


def test_a_process_that_goes_while_it_is_looked_athas_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_ended(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert has_ended(process.pid)
    with monkeypatch.context() as patched:
        opened: Any = lambda *_: _GoneWhenRead()  # noqa: E731
        patched.setattr(builtins, "open", opened)
        ended = has_ended(os.getpid())
    assert ended
