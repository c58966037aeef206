"""Programs of ours import nothing from their working folder: it may be a study's, with its own `trainer.py`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Final

from hpo.config.variables import in_environment

_NAME: Final = "PYTHONSAFEPATH"
#: Python looks only whether there is a value; this one is known for ours.
_OURS: Final = "hpo"


def safe_path() -> AbstractContextManager[None]:
    """A Python that is started inside looks for no modules in its working folder."""
    return in_environment({_NAME: os.environ.get(_NAME) or _OURS})


def forget() -> None:
    """Take back what `safe_path` has put into this program's environment: what it starts is the study's."""
    if os.environ.get(_NAME) == _OURS:
        del os.environ[_NAME]
