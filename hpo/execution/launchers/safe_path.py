"""Keeps programs that we start from importing modules of their working folder, which may be a study's, with its
own `trainer.py`.

If this program imports from its working folder, so do they: hpo itself, or packages that a study names, may be
there.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from hpo.config.variables import in_environment

_NAME: Final = "PYTHONSAFEPATH"
#: Python only checks that there is a value; by this one we recognise our own.
_OURS: Final = "hpo"


def looks_here() -> bool:
    """Whether this program looks for modules in its working folder."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return False
    return any(Path(entry).absolute() == here for entry in sys.path)


def safe_path() -> AbstractContextManager[None]:
    """Keep a Python started in the block from importing from its working folder, unless this one does so."""
    return in_environment({} if looks_here() else {_NAME: os.environ.get(_NAME) or _OURS})


def forget() -> None:
    """Undo what `safe_path` has put into this program's environment: the study's programs must not get it."""
    if os.environ.get(_NAME) == _OURS:
        del os.environ[_NAME]
