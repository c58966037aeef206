"""The Trainer against the bare five-line loop, on scikit-learn's digits with a small MLP, one thread.

    python benchmarks/step_overhead.py [--rounds 15] [--epochs 5]

The bare loop is what people write: a shuffling DataLoader, a plain Adam. The Trainer runs with its default
callbacks (gradient norms, prediction, …), once on the same data in memory and once through the same DataLoader,
with a plain Adam and with the fused one that `hpo` builds.
"""

import argparse
import contextlib
import io
import time
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from timing import interleaved, print_table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import default_callbacks

BATCH = 32


def digits() -> TensorDataset:
    pictures = load_digits()
    return TensorDataset(torch.from_numpy(pictures.data).float() / 16, torch.from_numpy(pictures.target).long())


def parts(*, fused: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)


def bare(data: TensorDataset, epochs: int) -> float:
    model, optimizer = parts(fused=None)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    loss_function = nn.CrossEntropyLoss()
    started = time.perf_counter()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
    return time.perf_counter() - started


def trainer(
    data: TensorDataset, epochs: int, *, fused: bool | None, loader: bool, callbacks: list[Callback]
) -> float:
    model, optimizer = parts(fused=fused)
    runner = Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        callbacks=callbacks,
        max_epochs=epochs,
        batching=BatchOptions(batch_size=BATCH),
        device="cpu",
    )
    source = DataLoader(data, batch_size=BATCH, shuffle=True) if loader else data
    with contextlib.redirect_stdout(io.StringIO()):
        started = time.perf_counter()
        runner.fit(source)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, epochs = digits(), arguments.epochs

    def ours(*, fused: bool | None, loader: bool, bare_callbacks: bool = False) -> Callable[[], float]:
        def run() -> float:
            chosen = [] if bare_callbacks else default_callbacks()
            return trainer(data, epochs, fused=fused, loader=loader, callbacks=chosen)

        return run

    contestants = {
        "bare loop, DataLoader, Adam": lambda: bare(data, epochs),
        "Trainer, in memory, fused Adam, no callbacks": ours(fused=True, loader=False, bare_callbacks=True),
        "Trainer, in memory, fused Adam": ours(fused=True, loader=False),
        "Trainer, in memory, Adam": ours(fused=None, loader=False),
        "Trainer, DataLoader, fused Adam": ours(fused=True, loader=True),
        "Trainer, DataLoader, Adam": ours(fused=None, loader=True),
    }
    print_table(interleaved(contestants, arguments.rounds), "bare loop, DataLoader, Adam")


if __name__ == "__main__":
    main()
