"""Runs kubectl, which talks to a Kubernetes cluster with the rights of the person or of the pod."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from hpo.errors import StudyError
from hpo.execution.engines.commands import ended
from hpo.execution.engines.engine import EngineAwayError

_SHOWN: Final = 100  # characters of an unreadable answer that an error shows
_MISSING: Final = (
    "kubectl, which speaks to the cluster, is not on this machine\n"
    "  fix: install it, or add `--dry-run` and apply what it prints where kubectl is"
)
#: What kubectl prints if the API server can't be reached or is overloaded.
_AWAY: Final = re.compile(
    r"was refused|no route to host|i/o timeout|handshake timeout|deadline exceeded|Client\.Timeout"
    r"|connection reset|connection lost|broken pipe|\bEOF\b|server misbehaving|failure in name resolution"
    r"|\((Server)?Timeout\)"
    r"|ServiceUnavailable|TooManyRequests|InternalError|etcdserver|no such host|request timed out"
)


class Kubectl:
    """Runs commands in one namespace.

    Once `look` has succeeded, any later failure of it counts as temporary, whatever the error says: a name server,
    or the service that renews tokens, may be away.

    Args:
        namespace: The namespace.
        program: The program, with arguments that come before each command.
    """

    def __init__(self, namespace: str, program: Sequence[str] = ("kubectl",)) -> None:
        self._program = program
        self._namespace = namespace
        self._has_answered = False

    def apply(self, objects: Iterable[dict[str, Any]]) -> list[str]:
        """Create or change objects; returns their names, such as ``job.batch/NAME``."""
        manifest = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        # Server-side: the client would store a second copy of each object in its annotations, which are small.
        command = ["apply", "--server-side", "--field-manager=hpo", "--output=name", "--filename=-"]
        return self._run(command, json.dumps(manifest)).split()

    def look(self, kinds: str, selector: str) -> list[dict[str, Any]]:
        """The objects of these kinds that match a label selector."""
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
        """Delete objects of a kind, chosen by name or label; objects that are gone already are no error."""
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
