"""The Trainer against the bare loop and its peers, on scikit-learn's digits with a small MLP, one thread.

    python benchmarks/step_overhead.py [--rounds 15] [--epochs 10] [--device cpu] [--no-peers]

The bare loop is what people write: a shuffling DataLoader, a plain Adam. The peers (Ignite, skorch, Lightning,
Hugging Face's Trainer; ``pip install '.[peers]'``) run on the same DataLoader settings with all switched off that
can be: no logging, no checkpoints, no progress bar; one that is not installed is left out. Ours runs with
nothing switched off: "all nine" are NaN detection, optimizer mode, gradient monitor, loss prediction, overfit
detection, CSV logging, an Optuna pruner's reports, early stopping and checkpoints.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import optuna
import torch
from peers import PEERS
from sklearn.datasets import load_digits
from timing import interleaved, print_table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.storage.ledger import Lease
from hpo.trial.checkpoints import Checkpoints
from hpo.trial.pruner_callback import PrunerCallback
from hpo.trial.reports import Reports
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import (
    Checkpoint,
    CSVLogging,
    EarlyStopping,
    GradientMonitor,
    LossPrediction,
    NaNDetection,
    OptimizerMode,
    OverfitDetection,
)

BATCH = 32


def digits() -> TensorDataset:
    pictures = load_digits()
    return TensorDataset(torch.from_numpy(pictures.data).float() / 16, torch.from_numpy(pictures.target).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def bare(data: TensorDataset, epochs: int, device: str) -> float:
    network = model().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    loss_function = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for _ in range(epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = loss_function(network(inputs), targets)
            loss.backward()
            optimizer.step()
    loss.item()
    return time.perf_counter() - started


def session(folder: Path) -> Session:
    """A session of a trial in memory."""
    trial = optuna.create_study(pruner=optuna.pruners.MedianPruner()).ask()
    return Session(
        number=0,
        params={},
        config={},
        folder=folder,
        device=torch.device("cpu"),
        seed=0,
        mode="min",
        reports=Reports(trial, "train_loss", PrunerScheduler()),
        checkpoints=Checkpoints([folder]),
        request=StopRequest(),
        lease=Lease(0, 1),
        process=os.getpid(),
        pulse=lambda _: None,
    )


def nine(folder: Path, epochs: int) -> list[Callback]:
    """The nine callbacks; there is no validation set, as in the bare loop, so they follow the training loss."""
    return [
        NaNDetection(),
        OptimizerMode(),
        GradientMonitor(),
        LossPrediction("train_loss"),
        OverfitDetection(),
        CSVLogging(folder / "metrics.csv"),
        PrunerCallback(session(folder)),
        EarlyStopping("train_loss", patience=epochs),
        Checkpoint(folder, monitor="train_loss"),
    ]


def ours(
    data: TensorDataset,
    epochs: int,
    device: str,
    *,
    callbacks: Callable[[Path, int], list[Callback]],
    loader: bool = False,
    **options: object,
) -> float:
    network = model()
    source = DataLoader(data, batch_size=BATCH, shuffle=True) if loader else data
    with tempfile.TemporaryDirectory() as folder:
        runner = Trainer(
            network,
            torch.optim.Adam(network.to(device).parameters(), lr=1e-3),
            nn.CrossEntropyLoss(),
            callbacks=callbacks(Path(folder), epochs),
            max_epochs=epochs,
            batching=BatchOptions(batch_size=BATCH),
            device=device,
            **options,  # type: ignore[arg-type]
        )
        started = time.perf_counter()
        runner.fit(source)
        return time.perf_counter() - started


def eight(folder: Path, epochs: int) -> list[Callback]:
    return [callback for callback in nine(folder, epochs) if not isinstance(callback, GradientMonitor)]


def no_callbacks(folder: Path, epochs: int) -> list[Callback]:  # noqa: ARG001
    return []


def quietly(run: Callable[[], float]) -> Callable[[], float]:
    def silent() -> float:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return run()

    return silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # the peers' about settings that are meant
    data, epochs, device = digits(), arguments.epochs, arguments.device
    base = "bare loop, DataLoader"
    run = partial(ours, data, epochs, device)
    contestants: dict[str, Callable[[], float]] = {base: partial(bare, data, epochs, device)}
    for name, (package, peer) in PEERS.items():
        if importlib.util.find_spec(package) and not arguments.no_peers:
            contestants[f"{name}, DataLoader"] = quietly(partial(peer, model, data, epochs, BATCH, device))
    contestants |= {
        "Trainer, DataLoader, all nine": partial(run, callbacks=nine, loader=True),
        "Trainer, in memory, all nine": partial(run, callbacks=nine),
        "Trainer, in memory, without the gradient monitor": partial(run, callbacks=eight),
        "Trainer, in memory, no callbacks": partial(run, callbacks=no_callbacks),
    }
    if device.startswith("cuda"):
        contestants["Trainer, in memory, all nine, CUDA graph"] = partial(run, callbacks=nine, cuda_graph=True)
    print_table(interleaved(contestants, arguments.rounds), base)


if __name__ == "__main__":
    main()
