"""Programs of ours import nothing from their working folder: it may be a study's, with its own `trainer.py`.

They do where this program does: it may have found hpo itself there, or the packages that a study names.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from hpo.config.variables import in_environment

_NAME: Final = "PYTHONSAFEPATH"
#: Python looks only whether there is a value; this one is known for ours.
_OURS: Final = "hpo"


def looks_here() -> bool:
    """Whether this program looks for modules in its working folder."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return False
    return any(Path(entry).absolute() == here for entry in sys.path)


def safe_path() -> AbstractContextManager[None]:
    """A Python that is started inside looks for no modules in its working folder, where this one does not."""
    return in_environment({} if looks_here() else {_NAME: os.environ.get(_NAME) or _OURS})


def forget() -> None:
    """Take back what `safe_path` has put into this program's environment: what it starts is the study's."""
    if os.environ.get(_NAME) == _OURS:
        del os.environ[_NAME]
