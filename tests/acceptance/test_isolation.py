"""A trial's value depends on the trial alone: not on its worker, what ran before it, or how often it died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpo.config.spec import load_spec
from hpo.storage.ledger import Attempt
from hpo.study.open_study import load_study
from tests.support.commands import HELD, MODEL, PATIENCE, held, hpo, ledger_of, make_study, start_hpo, wait_until

#: A study whose callback leaves all that a process can be changed in as it should not be, and whose model's value
#: shows what it finds so.
VANDAL = '''
import gc
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import parts
from trainer import Callback

HERE = Path(__file__).parent
DATA = parts.load()
BUILT = []


def load():
    return DATA


def leaks():
    """Names of what is not as a fresh process has it."""
    mask = os.umask(0o022)
    os.umask(mask)
    found = {
        "default dtype": torch.get_default_dtype() != torch.float32,
        "default device": torch.get_default_device().type != "cpu",
        "grad mode": not torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "matmul precision": torch.get_float32_matmul_precision() != "highest",
        "deterministic": torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.benchmark,
        "flush denormal": float(torch.tensor([1e-40]) * 1.0) == 0.0,
        "hooks": bool(torch.nn.modules.module._global_forward_hooks),
        "recursion limit": sys.getrecursionlimit() == 941,
        "sys.path": "vandalised" in sys.path,
        "cwd": Path.cwd() == Path("/"),
        "umask": mask == 0o077,
        "signal": signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL,
        "threads": threading.active_count() > 4,
        "environment": "VANDALISED" in os.environ,
        "gc": not gc.isenabled(),
        "numpy": np.geterr()["divide"] == "ignore",
        "patched class": hasattr(nn.Linear, "vandalised"),
        "module state": bool(BUILT),
        "data": bool((DATA["train"].tensors[0] == 7.0).all()),
    }
    return [name for name, leaked in found.items() if leaked]


class Net(parts.Net):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        found = leaks()
        if found:
            with (HERE / "leaks.txt").open("a") as file:
                print(found, file=file)
        self.register_buffer("leaks", torch.tensor(float(len(found))))

    def forward(self, inputs):
        return super().forward(inputs) + self.leaks


class Vandal(Callback):
    priority = 99

    def __init__(self, linger=False):
        self.linger = linger

    def teardown(self, trainer):
        BUILT.append(1)
        DATA["train"].tensors[0].fill_(7.0)
        nn.Linear.vandalised = True
        nn.modules.module.register_module_forward_hook(lambda *_: None)
        for _ in range(5):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if self.linger:
            threading.Thread(target=threading.Event().wait).start()  # holds up the end of a process
            if not os.fork():
                signal.pause()
        np.seterr(divide="ignore")
        gc.disable()
        os.environ["VANDALISED"] = "1"
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.umask(0o077)
        os.chdir("/")
        sys.path.insert(0, "vandalised")
        sys.setrecursionlimit(941)
        torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        torch.autograd.set_detect_anomaly(True)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
'''

STUDY = """
study: {name: vandal, n_trials: 4, sampler: {name: random, seed: 3}, pruner: none}
data: {_target_: vandal.load}
loader: {batch_size: 16}
model: {_target_: vandal.Net, hidden: 4, delay: 0.0}
loss: {_target_: torch.nn.MSELoss}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
trainer: {max_epochs: 3}
callbacks: {vandal: {_target_: vandal.Vandal}}
search_space:
  optimizer.lr: {type: float, low: 1e-3, high: 1e-1, log: true}
  model.hidden: {type: int, low: 2, high: 8}
"""

ALONE = """
import json, sys, tempfile
from pathlib import Path
import torch
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from hpo.config.spec import load_spec

torch.set_num_threads(1)
spec, params, seed = load_spec(Path(sys.argv[1])), json.loads(sys.argv[2]), int(sys.argv[3])
builder, config = Builder(spec), spec.resolve(params)
data = builder.data(config)
place = RunPlace(Path(tempfile.mkdtemp()), "alone", params)
trainer = builder.trainer(config, place, seed=seed, device=torch.device("cpu"))
state = trainer.fit(data["train"], data["val"])
with Path(sys.argv[4]).open("w") as file:
    json.dump([metrics["val_loss"] for metrics in state.history], file)
import os
os._exit(0)  # a thread of the study's would hold it up
"""


def study_in(folder: Path, code: str = MODEL) -> Path:
    study = make_study(folder, STUDY, code)
    (folder / "vandal.py").write_text(VANDAL)
    return study


def curves(study: Path) -> dict[int, tuple[Any, list[float]]]:
    """Parameters and the metric of each epoch, by trial."""
    with load_study(load_spec(study)) as opened:
        return {
            trial.number: (trial.params, [value for _, value in sorted(trial.intermediate_values.items())])
            for trial in opened.study.get_trials()
        }


def leases(study: Path) -> list[Attempt]:
    """Attempts that run."""
    return [each for each in ledger_of(study) if each.ended_at is None]


def alone(study: Path, number: int, params: dict[str, Any]) -> list[float]:
    opened = load_study(load_spec(study))
    seed = opened.trial_seed(number, params)
    opened.storage.close()
    file = study.parent / f"alone-{number}.json"
    command = [sys.executable, "-c", ALONE, str(study), json.dumps(params), str(seed), str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    found: list[float] = json.loads(file.read_text())
    return found


def test_values_are_equal_with_one_worker_with_four_after_kills_and_alone(tmp_path: Path) -> None:
    one, four = (study_in(tmp_path / name) for name in ("one", "four"))
    killed = study_in(tmp_path / "killed", HELD)
    hpo("run", one, "--workers", 1)
    hpo("run", four, "--workers", 4, "callbacks.vandal.linger=true")
    process = start_hpo("run", killed, "--workers", 2)
    for dead, victim in enumerate((lambda lease: lease.pid, lambda lease: os.getpgid(_parent(lease.pid)))):
        wait_until(lambda dead=dead: len(held(killed)) == 2 + dead)
        os.kill(victim(leases(killed)[0]), signal.SIGKILL)
    wait_until(lambda: len(held(killed)) == 4)
    killed.with_name("go").touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert len(ledger_of(killed)) > 4
    found = curves(one)
    assert not list(tmp_path.rglob("leaks.txt")), next(tmp_path.rglob("leaks.txt")).read_text()
    assert curves(four) == found
    assert curves(killed) == found
    for number in (0, 3):  # the first, and one that came after others
        params, values = found[number]
        assert alone(one, number, params) == values


def _parent(pid: int) -> int:
    import psutil

    return psutil.Process(pid).ppid()
