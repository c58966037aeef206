"""Runs a compiled model without compilation, for code that hooks its modules or watches its operations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

_open: Final[list[bool]] = []  # one item for each open block
_stance: Final = ExitStack()  # restores torch's stance when it is closed


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside the block, compiled models run uncompiled, and torch's compiler remembers nothing of it.

    Hooks and dispatch modes that only look must neither be compiled into the model nor keep torch from compiling
    it: torch does not check again whether modules have hooks (``skip_nnmodule_hook_guards``), and never compiles
    code that it first met under a dispatch mode, such as a FLOP counter. Blocks may overlap and end in any order.
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
