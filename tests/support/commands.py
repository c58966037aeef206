"""A study small enough for tests, and the `hpo` command as a person runs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from hpo.cli.app import main
from hpo.config.spec import load_spec
from hpo.config.study_modules import forget_modules
from hpo.storage.ledger import Attempt, attempts
from hpo.study.open_study import load_study
from hpo.trial.mainless import MainlessContext
from tests.support.forked_program import ForkedProgram

#: Seconds that a test waits at most: on a machine that is busy with other tests a program takes long to start.
PATIENCE: Final = 240.0
MODEL = '''
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


def load(samples=96, broken=False):
    if broken:
        raise RuntimeError("the data is broken")
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 4, generator=generator)
    targets = (inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0])).unsqueeze(1)
    cut = samples * 2 // 3
    return {
        "train": TensorDataset(inputs[:cut], targets[:cut]),
        "val": TensorDataset(inputs[cut:], targets[cut:]),
        "test": TensorDataset(inputs[cut:], targets[cut:]),
    }


class Net(nn.Module):
    def __init__(self, hidden=4, delay=0.0, dropout=0.1):
        super().__init__()
        self.delay = delay
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 1))

    def forward(self, inputs):
        if self.training and self.delay:
            time.sleep(self.delay)
        return self.layers(inputs)


def mae(outputs, targets):
    return (outputs - targets).abs().mean()


class Explode(nn.Module):
    """A loss that is NaN when asked to be."""

    def __init__(self, nan=False, fail=False):
        super().__init__()
        self.nan, self.fail = nan, fail

    def forward(self, outputs, targets):
        if self.fail:
            raise ValueError("this loss fails")
        loss = ((outputs - targets) ** 2).mean()
        return loss * float("nan") if self.nan else loss
'''

_DELAY = "        if self.training and self.delay:\n            time.sleep(self.delay)\n"
_GATE = """import os
import time
from pathlib import Path

GO = Path(__file__).with_name("go")


def may_go():
    held = GO.with_name(f"held-{os.getpid()}")
    while not GO.exists():
        held.touch()
        for each in GO.parent.glob("pass-*"):
            try:
                each.unlink()
            except FileNotFoundError:
                continue
            held.unlink()
            return
        time.sleep(0.05)
"""
#: A trial waits inside a batch of its second epoch until the study's folder has a file named `go`, or one named
#: `pass-…`, which the trial removes: it lets one trial train on. See `held`.
HELD = MODEL.replace(
    _DELAY,
    "        self.calls = getattr(self, 'calls', 0) + self.training\n"
    "        if self.calls == 6:\n            may_go()\n",
).replace("import time\n", _GATE, 1)
#: After 64 batches one takes half a second, until there is a file named `go`: with the options `LONG` a trial does
#: not come to the end of its second epoch.
CRAWLING = MODEL.replace(
    _DELAY,
    "        self.calls = getattr(self, 'calls', 0) + self.training\n"
    "        if self.calls > 64 and not GO.exists():\n            time.sleep(0.5)\n",
).replace("import time\n", _GATE, 1)
LONG = ("loader.batch_size=1", "trainer.max_epochs=40")

STUDY = """
study:
  name: tiny
  n_trials: 6
  sampler: {name: random, seed: 3}
  pruner: none
data: {_target_: parts.load}
loader: {batch_size: 16}
model: {_target_: parts.Net, hidden: 4, delay: 0.0, dropout: 0.1}
loss: {_target_: parts.Explode}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
lr_scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: "${trainer.max_epochs}"}
metrics: {mae: {_target_: parts.mae}}
trainer: {max_epochs: 3}
search_space:
  optimizer.lr: {type: float, low: 1e-3, high: 1e-1, log: true}
  model.hidden: {type: int, low: 2, high: 8}
"""


def make_study(folder: Path, text: str = STUDY, code: str = MODEL) -> Path:
    """Write the study's code and YAML; returns the YAML's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.py").write_text(code)
    path = folder / "study.yaml"
    path.write_text(textwrap.dedent(text).lstrip())
    return path


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def hpo(*arguments: object, code: int | None = 0) -> Result:
    """Run the command in this process to its end and check its exit code (None: any).

    Workers are forked from one server for all tests of this process, which saves each test its imports; so is what
    this process would start anew: what checks a driver's study, and the peers of a training here.
    """
    kept, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = ["hpo", *map(str, arguments)]
    for folder in {argument.parent for argument in arguments if isinstance(argument, Path)}:
        forget_modules(folder)  # as a process of its own, which reads the study's code anew
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            patch("hpo.execution.checking.LoneContext", MainlessContext),
            patch("hpo.trial.peers.LoneContext", MainlessContext),
        ):
            main()
    except SystemExit as end:
        result = Result(end.code if isinstance(end.code, int) else 1, out.getvalue(), err.getvalue())
    finally:
        sys.argv = kept
    assert code is None or result.returncode == code, f"{result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def hpo_json(*arguments: object) -> Any:
    """The JSON that a command prints."""

    def refuse(token: str) -> Any:
        raise AssertionError(f"{token} is no JSON")

    return json.loads(hpo(*arguments, "--json").stdout, parse_constant=refuse)


def start_hpo(*arguments: object, **given: Any) -> ForkedProgram:
    """Start the command in a process and a session of its own, which has its imports from here."""
    return ForkedProgram(["-m", "hpo", *map(str, arguments)], **given)


def start_program(*arguments: object) -> subprocess.Popen[str]:
    """Start the command as a person does, in a session of its own: where its imports are the point."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpo", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def epochs_trained(study: Path) -> list[int]:
    """How many epochs each attempt at a trial has trained."""
    return [path.read_text().count("\n") - 1 for path in study.parent.rglob("metrics.csv")]


def held(study: Path) -> set[int]:
    """The processes that wait in a study of `HELD`, or were killed while they did."""
    return {int(path.name.partition("-")[2]) for path in study.parent.glob("held-*")}


def values(*arguments: object) -> dict[int, float]:
    """The value of each complete trial."""
    trials = hpo_json("trials", *arguments)
    return {each["trial"]: each["value"] for each in trials if each["outcome"] == "complete"}


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``, itself included."""
    import psutil

    parent = psutil.Process(pid)
    return [pid, *(child.pid for child in parent.children(recursive=True))]


def kill_all(process: ForkedProgram | subprocess.Popen[str]) -> None:
    """SIGKILL the command and everything it has started, as a power failure would."""
    pids: set[int] = set()
    while new := set(descendants(process.pid)) - pids:  # one that is stopped starts no other meanwhile
        _send(signal.SIGSTOP, new)
        pids |= new
    _send(signal.SIGKILL, pids)
    process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait for a condition to become true; returns its value.

    Looking takes a fifth of the time at most: what is waited for needs the processor.
    """
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        if value := condition():
            return value
        time.sleep(max(0.05, 4 * (time.monotonic() - began)))
    raise AssertionError("the condition did not come true in time")


def ledger_of(study: Path) -> list[Attempt]:
    """Every attempt at the study's trials."""
    with load_study(load_spec(study)) as opened, opened.storage.engine.connect() as conn:
        return attempts(conn, opened.study_id)


def alive(pid: int) -> bool:
    """Whether a process runs: it is there, and has not ended."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
