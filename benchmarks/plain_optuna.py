"""The digits study as a plain Optuna script, the way its documentation shows: one process of several.

    python benchmarks/plain_optuna.py sqlite:///plain.db --trials 40 --epochs 20

Start it several times on one URL for parallel workers. `benchmarks/whole_study.py` does, and compares.
"""

import argparse
import sys
from pathlib import Path

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "studies" / "digits"))

from data import load_digits
from model import MLP, accuracy


def objective(trial: optuna.Trial, epochs: int) -> float:
    data = load_digits()
    batch = trial.suggest_categorical("batch_size", [64, 128, 256])
    train = DataLoader(data["train"], batch_size=batch, shuffle=True)
    val = DataLoader(data["val"], batch_size=batch)
    model = MLP(
        hidden=trial.suggest_int("hidden", 16, 128, log=True),
        layers=trial.suggest_int("layers", 1, 2),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loss_function = nn.CrossEntropyLoss()
    best = float("inf")
    for epoch in range(1, epochs + 1):
        train_epoch(model, train, optimizer, loss_function)
        scheduler.step()
        best = min(best, evaluate(model, val, loss_function))
        trial.report(best, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return best


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, loss_function: nn.Module
) -> None:
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()


def evaluate(model: nn.Module, loader: DataLoader, loss_function: nn.Module) -> float:
    model.eval()
    total, hits, count = 0.0, 0.0, 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = model(inputs)
            total += loss_function(outputs, targets).item() * len(targets)
            hits += accuracy(outputs, targets).item() * len(targets)
            count += len(targets)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--prune", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(5, 3) if arguments.prune else optuna.pruners.NopPruner()
    study = optuna.create_study(storage=arguments.storage, study_name="digits", pruner=pruner, load_if_exists=True)
    finished = optuna.study.MaxTrialsCallback(
        arguments.trials, states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    )
    study.optimize(lambda trial: objective(trial, arguments.epochs), callbacks=[finished])


if __name__ == "__main__":
    main()
