"""An engine in a process of its own, as a driver has it: elsewhere on the network, or gone in a moment."""

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hpo.execution.engines.by_name import address_of, engine_of


class HostedEngine:
    """Has every method of an engine, and passes calls on to its process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __getattr__(self, name: str) -> Any:
        if name == "agents":
            return self._asked(name, None)
        return lambda *arguments: self._asked(name, arguments)

    def _asked(self, name: str, arguments: tuple[Any, ...] | None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump((name, arguments), self.process.stdin)
        self.process.stdin.flush()
        answer, error = pickle.load(self.process.stdout)
        if error is not None:
            module, kind, text = error
            raise getattr(importlib.import_module(module), kind)(text)
        return answer


@contextmanager
def hosted(text: str, within: Sequence[str], **environment: str) -> Iterator[HostedEngine]:
    """The engine of the text of `--on`, in a process that the command ``within`` starts."""
    command = [*within, sys.executable, "-W", "error", "-m", __name__, text]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        yield HostedEngine(process)
    finally:
        process.kill()
        process.communicate()


def _main(text: str) -> None:
    said, sys.stdout = sys.stdout.buffer, sys.stderr
    engine = engine_of(address_of(text))
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = error = None
        try:
            found = getattr(engine, name)
            answer = found if arguments is None else found(*arguments)
            answer = list(answer) if isinstance(answer, Iterator) else answer
        except Exception as caught:  # noqa: BLE001 - raised by the caller
            traceback.print_exc()
            error = (type(caught).__module__, type(caught).__qualname__, str(caught))
        pickle.dump((answer, error), said)
        said.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
