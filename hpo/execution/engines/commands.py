"""Runs the commands of engines: if one times out, or its process finds no room, the engine counts as away."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from hpo.errors import StudyError
from hpo.execution.engines.engine import EngineAwayError

_PATIENCE: Final = 60.0  # seconds


def ended(
    command: Sequence[str], name: str, missing: str, *, given: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; returns its result, whatever the exit code.

    Args:
        command: The program and its arguments.
        name: Its name in errors.
        missing: Text of the error if the program is not on this machine.
        given: Its standard input.
        env: Its environment; None: that of this process.

    Raises:
        StudyError: The program is not on this machine.
        EngineAwayError: There was no answer within a minute, or this machine has no room for another process.
    """
    try:
        return subprocess.run(
            command, input=given, capture_output=True, text=True, check=False, timeout=_PATIENCE, env=env
        )
    except (FileNotFoundError, PermissionError) as error:
        raise StudyError(missing) from error
    except subprocess.TimeoutExpired as error:
        raise EngineAwayError(f"{name}: no answer within {_PATIENCE:g} s") from error
    except OSError as error:
        raise EngineAwayError(f"{name}: {error.strerror or error}") from error
