"""Passes of a compiled model that run as it was written, for what looks into its modules or operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

_open: Final[list[bool]] = []  # one for each open block
_stance: Final = ExitStack()  # what puts torch's stance back


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside the block, what torch.compile made runs as it was written, and nothing of that is remembered.

    What looks inside must neither be compiled into the model nor keep torch from compiling it: torch does not ask
    again whether modules have hooks (``skip_nnmodule_hook_guards``), and never compiles what it has once met under
    a dispatch mode, such as a count of FLOPs. Blocks may overlap, and end in any order.
    """
    if "torch._dynamo" not in sys.modules:  # it takes seconds to import, and without it nothing is compiled
        yield
        return
    if not _open:
        _stance.enter_context(torch.compiler.set_stance("force_eager"))
    _open.append(True)
    try:
        yield
    finally:
        _open.pop()
        if not _open:
            _stance.close()
