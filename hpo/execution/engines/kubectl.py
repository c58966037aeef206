"""kubectl, the program that speaks to a Kubernetes cluster with a person's rights, or with its pod's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hpo.errors import StudyError
from hpo.execution.engines.commands import ended
from hpo.execution.engines.engine import EngineAwayError

_SHOWN: Final = 100  # characters of an answer that can't be read
_MISSING: Final = (
    "kubectl, which speaks to the cluster, is not on this machine\n"
    "  fix: install it, or add `--dry-run` and apply what it prints where kubectl is"
)
#: What kubectl prints where the API server can't be reached, or has too much to do.
_AWAY: Final = re.compile(
    r"was refused|no route to host|i/o timeout|handshake timeout|deadline exceeded|Client\.Timeout"
    r"|connection reset|connection lost|broken pipe|\bEOF\b|server misbehaving|failure in name resolution"
    r"|\((Server)?Timeout\)"
    r"|ServiceUnavailable|TooManyRequests|InternalError|etcdserver|no such host|request timed out"
)


class Kubectl:
    """Commands in one namespace.

    Where a look has been answered before, one that fails will be answered again, whatever is said: a name server,
    or what renews a token, may be away.

    Args:
        namespace: The namespace.
        program: The program and what stands before each command.
    """

    def __init__(self, namespace: str, program: Sequence[str] = ("kubectl",)) -> None:
        self._program = program
        self._namespace = namespace
        self._has_answered = False

    def apply(self, objects: Iterable[dict[str, Any]]) -> list[str]:
        """Make objects, or change those that are there; their names, as ``job.batch/NAME``."""
        manifest = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        # On the server: the client's way stores a second copy of an object in its annotations, which are small.
        command = ["apply", "--server-side", "--field-manager=hpo", "--output=name", "--filename=-"]
        return self._run(command, json.dumps(manifest)).split()

    def look(self, kinds: str, selector: str) -> list[dict[str, Any]]:
        """The objects of these kinds that have these labels."""
        try:
            answer = self._run(["get", kinds, f"--selector={selector}", "--output=json"])
        except StudyError as error:
            if self._has_answered:
                raise EngineAwayError(str(error)) from error
            raise
        try:
            items: list[dict[str, Any]] = json.loads(answer)["items"]
        except ValueError as error:
            raise EngineAwayError(f"kubectl get: no JSON: {answer.strip()[:_SHOWN]}") from error
        self._has_answered = True
        return items

    def delete(self, kind: str, *options: str) -> None:
        """Delete objects of a kind, chosen by name or label; those that are gone are no error."""
        self._run(["delete", kind, *options, "--ignore-not-found", "--wait=false"])

    def _run(self, command: Sequence[str], given: str = "") -> str:
        words = [*self._program, f"--namespace={self._namespace}", "--request-timeout=20s", *command]
        done = ended(words, f"kubectl {command[0]}", _MISSING, given=given)
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        is_away = done.returncode < 0 or _AWAY.search(done.stderr)  # the first: a signal has ended it
        kind = EngineAwayError if is_away else StudyError
        raise kind(f"kubectl {command[0]}: {lines[-1]}")
