"""What is recorded is the value of the whole set, whatever its batches are: losses and metrics, one by one.

`docs/metrics.md` shows the figures of ``CASES``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer import BatchOptions, Trainer, WholeSet
from trainer.callbacks import GradientAccumulation

SAMPLES, CLASSES, TOKENS, IGNORED = 113, 4, 6, -100
WEIGHTS = torch.tensor([0.1, 0.5, 2.0, 7.0])


def inputs() -> Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))


def classes(*, ignored: bool = False) -> Tensor:
    """Rare classes come late, and are the ones with large weights; so do the targets that are ignored."""
    at = torch.arange(SAMPLES)
    chosen = (at * at * CLASSES // SAMPLES**2 + at % 3 // 2).clamp(max=CLASSES - 1)
    return torch.where((at % 5 == 0) | (at < 10), IGNORED, chosen) if ignored else chosen


def probabilities() -> Tensor:
    return functional.softmax(torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(2)), dim=1)


def tokens() -> Tensor:
    """Sequences of six, most of them padded, those at the front nearly empty."""
    chosen = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))
    length = 1 + torch.arange(SAMPLES) * TOKENS // (SAMPLES + 1)
    return torch.where(torch.arange(TOKENS) < length[:, None], chosen, IGNORED)


def numbers() -> Tensor:
    return inputs().sum(dim=1, keepdim=True).cumsum(0) * 0.1


def binary() -> Tensor:
    return (classes() >= 2).float()[:, None]


def linear(outputs: int) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(5, outputs)

    return made


def per_token() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, CLASSES * TOKENS), nn.Unflatten(1, (CLASSES, TOKENS)))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def auroc(outputs: Tensor, targets: Tensor) -> float:
    """The share of pairs of one positive and one negative sample in the right order."""
    score, positive = outputs.flatten(), targets.flatten() > 0
    above = score[positive][:, None] - score[~positive][None, :]
    return float(((above > 0).double() + 0.5 * (above == 0).double()).mean())


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 - (targets - outputs).square().sum() / (targets - targets.mean()).square().sum()


class MacroF1:
    """The interface of torchmetrics, kept as counts."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        self.confusion = torch.zeros(self.classes, self.classes, dtype=torch.long)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        cells = targets * self.classes + outputs.argmax(1)
        self.confusion += torch.bincount(cells, minlength=self.classes**2).reshape(self.classes, self.classes)

    def compute(self) -> Tensor:
        right = self.confusion.diag().double()
        return (2 * right / (self.confusion.sum(0) + self.confusion.sum(1)).clamp(min=1)).mean()


def token_step(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """A step with a weight of its own: the mean over tokens, with a scalar that is one too."""
    x, y = batch
    logits, valid = model(x), y != IGNORED
    loss = functional.cross_entropy(logits, y, ignore_index=IGNORED, reduction="sum") / valid.sum().clamp(min=1)
    right = ((logits.argmax(1) == y) & valid).sum() / valid.sum().clamp(min=1)
    return {"loss": loss, "outputs": logits, "weight": valid.sum(), "token_accuracy": right}


# ---- the same in float64, without the code under test; NumPy and scikit-learn


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def cross_entropy(logits: np.ndarray, y: np.ndarray, weights: Any = None, smoothing: float = 0.0) -> float:
    """Over [samples, classes, …]: the definition in torch's documents, in float64."""
    weights = np.ones(CLASSES) if weights is None else np.asarray(weights, dtype=float)
    flat = np.moveaxis(log_softmax(logits), 1, -1).reshape(-1, CLASSES)
    y = y.reshape(-1)
    flat, y = flat[y != IGNORED], y[y != IGNORED]
    right = -(weights[y] * flat[np.arange(len(y)), y]).sum()
    spread = -(weights * flat).sum() / CLASSES
    return ((1 - smoothing) * right + smoothing * spread) / weights[y].sum()


def huber(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.where(size < 1, 0.5 * size**2, size - 0.5).mean())


def bce(logits: np.ndarray, y: np.ndarray, positive: float) -> float:
    return float(-(positive * y * -np.logaddexp(0, -logits) + (1 - y) * -np.logaddexp(0, logits)).mean())


@dataclass(frozen=True)
class Case:
    """One loss or metric, and what it is for the whole set.

    Attributes:
        targets: Of the set.
        model: Makes the model.
        loss: The loss, or None with ``step``.
        expected: The value of ``name`` by another way, of outputs and targets in float64.
        against: What that other way is, for the table.
        name: The recorded value that is looked at, without its prefix.
        metrics: The Trainer's.
        step: In place of the loss.
    """

    targets: Callable[[], Tensor]
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor] | None
    expected: Callable[[np.ndarray, np.ndarray], float]
    against: str
    name: str = "loss"
    metrics: Mapping[str, Any] = field(default_factory=dict)
    step: Any = None

    def true_value(self) -> float:
        outputs = self.model().double()(inputs().double()).detach().numpy()
        return float(self.expected(outputs, self.targets().numpy()))


CE, ignoring = nn.CrossEntropyLoss, functools.partial(classes, ignored=True)
CASES: dict[str, Case] = {
    "cross-entropy": Case(
        classes,
        linear(CLASSES),
        CE(),
        lambda outputs, y: reference.log_loss(y, np.exp(log_softmax(outputs)), labels=range(CLASSES)),
        "scikit-learn `log_loss`",
    ),
    "cross-entropy, class weights": Case(
        classes,
        linear(CLASSES),
        CE(weight=WEIGHTS),
        lambda outputs, y: reference.log_loss(
            y, np.exp(log_softmax(outputs)), labels=range(CLASSES), sample_weight=WEIGHTS.numpy()[y]
        ),
        "scikit-learn `log_loss` with `sample_weight`",
    ),
    "cross-entropy, ignore_index": Case(ignoring, linear(CLASSES), CE(), cross_entropy, "float64"),
    "cross-entropy, class weights and ignore_index": Case(
        ignoring,
        linear(CLASSES),
        CE(weight=WEIGHTS, ignore_index=IGNORED),
        functools.partial(cross_entropy, weights=WEIGHTS),
        "float64",
    ),
    "cross-entropy, label smoothing": Case(
        classes,
        linear(CLASSES),
        CE(label_smoothing=0.1),
        functools.partial(cross_entropy, smoothing=0.1),
        "float64",
    ),
    "cross-entropy, all three": Case(
        ignoring,
        linear(CLASSES),
        functools.partial(functional.cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
        functools.partial(cross_entropy, weights=WEIGHTS, smoothing=0.1),
        "float64",
    ),
    "cross-entropy, class probabilities and weights": Case(
        probabilities,
        linear(CLASSES),
        CE(weight=WEIGHTS),
        lambda outputs, y: -(WEIGHTS.numpy() * y * log_softmax(outputs)).sum() / SAMPLES,
        "float64",
    ),
    "token loss, padded": Case(tokens, per_token, CE(), cross_entropy, "float64"),
    "token loss, a step's own weight": Case(tokens, per_token, None, cross_entropy, "float64", step=token_step),
    "token perplexity": Case(
        tokens,
        per_token,
        CE(),
        lambda outputs, y: math.exp(cross_entropy(outputs, y)),
        "float64",
        "perplexity",
        {"perplexity": WholeSet(lambda outputs, targets: functional.cross_entropy(outputs, targets).exp())},
    ),
    "token accuracy, a step's scalar": Case(
        tokens,
        per_token,
        None,
        lambda outputs, y: reference.accuracy_score(y[y != IGNORED], outputs.argmax(1)[y != IGNORED]),
        "scikit-learn `accuracy_score`",
        "token_accuracy",
        step=token_step,
    ),
    "negative log-likelihood, class weights": Case(
        classes,
        lambda: nn.Sequential(linear(CLASSES)(), nn.LogSoftmax(1)),
        nn.NLLLoss(weight=WEIGHTS),
        functools.partial(cross_entropy, weights=WEIGHTS),
        "float64",
    ),
    "mean squared error": Case(
        numbers,
        linear(1),
        nn.MSELoss(),
        lambda outputs, y: reference.mean_squared_error(y, outputs),
        "scikit-learn `mean_squared_error`",
    ),
    "mean absolute error": Case(
        numbers,
        linear(1),
        nn.L1Loss(),
        lambda outputs, y: reference.mean_absolute_error(y, outputs),
        "scikit-learn `mean_absolute_error`",
    ),
    "Huber": Case(numbers, linear(1), nn.HuberLoss(), lambda outputs, y: huber(outputs - y), "float64"),
    "squared error, a sum": Case(
        numbers, linear(1), nn.MSELoss(reduction="sum"), lambda outputs, y: ((outputs - y) ** 2).sum(), "float64"
    ),
    "binary cross-entropy, pos_weight": Case(
        binary,
        linear(1),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)),
        functools.partial(bce, positive=3.0),
        "float64",
    ),
    "accuracy": Case(
        classes,
        linear(CLASSES),
        CE(weight=WEIGHTS),
        lambda outputs, y: reference.accuracy_score(y, outputs.argmax(1)),
        "scikit-learn `accuracy_score`",
        "accuracy",
        {"accuracy": accuracy},
    ),
    "F1, macro": Case(
        classes,
        linear(CLASSES),
        CE(),
        lambda outputs, y: reference.f1_score(y, outputs.argmax(1), average="macro"),
        "scikit-learn `f1_score`",
        "f1",
        {"f1": MacroF1(CLASSES)},
    ),
    "AUROC": Case(
        binary,
        linear(1),
        nn.BCEWithLogitsLoss(),
        lambda outputs, y: reference.roc_auc_score(y.ravel(), outputs.ravel()),
        "scikit-learn `roc_auc_score`",
        "auc",
        {"auc": WholeSet(auroc)},
    ),
    "R²": Case(
        numbers,
        linear(1),
        nn.MSELoss(),
        lambda outputs, y: reference.r2_score(y, outputs),
        "scikit-learn `r2_score`",
        "r2",
        {"r2": WholeSet(r2)},
    ),
}


class Items(Dataset[tuple[Tensor, Tensor]]):
    """A data set that gives its samples one by one."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tensors[index]  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[TensorDataset, int], Any]] = {
    "TensorDataset": lambda data, size: data,
    "Dataset": lambda data, size: Items(data),
    "DataLoader": lambda data, size: DataLoader(Items(data), batch_size=size),
}


def fitted(case: Case, kind: str, size: int, *callbacks: Any, lr: float = 0.0, shuffle: bool = True) -> Trainer:
    model = case.model()
    data = KINDS[kind](TensorDataset(inputs(), case.targets()), size)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        case.loss,
        step=case.step,
        metrics=case.metrics,
        callbacks=callbacks,
        batching=BatchOptions(batch_size=size, eval_batch_size=size, shuffle=shuffle),
        max_epochs=1,
        device="cpu",
    )
    trainer.fit(data, data)
    return trainer


@pytest.mark.parametrize("size", [4, 32, SAMPLES])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_what_is_recorded_is_the_value_of_the_whole_set(name: str, kind: str, size: int) -> None:
    case = CASES[name]
    recorded = fitted(case, kind, size).state.metrics
    expected = pytest.approx(case.true_value(), rel=1e-5)
    assert recorded[f"val_{case.name}"] == expected
    assert recorded[f"train_{case.name}"] == expected


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.name == "loss"])
def test_accumulated_gradients_are_those_of_one_large_batch(name: str, size: int) -> None:
    case = CASES[name]
    whole = fitted(case, "TensorDataset", SAMPLES, lr=1.0, shuffle=False)
    together = GradientAccumulation(math.ceil(SAMPLES / size))
    parts = fitted(case, "TensorDataset", size, together, lr=1.0, shuffle=False)
    assert whole.state.step == parts.state.step == 1
    for (_, ours), theirs, start in zip(
        parts.model.named_parameters(), whole.model.parameters(), case.model().parameters(), strict=True
    ):
        torch.testing.assert_close(ours - start, theirs - start, rtol=1e-5, atol=1e-5)


def test_the_table_in_the_docs_holds_these_figures() -> None:
    page = Path(__file__).parents[4].joinpath("docs", "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (-?[\d.]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert rows == list(table())


def table() -> Iterator[tuple[str, str, str]]:
    """The table's rows: what, its value for this set, against what it is tested."""
    for name, case in CASES.items():
        yield name, f"{case.true_value():.4f}", case.against


if __name__ == "__main__":
    for row in table():
        print(f"| {' | '.join(row)} |")
