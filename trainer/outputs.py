"""Collects the outputs of a whole data set: joined in memory, or written to a file batch by batch."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.data.collected import Collected
from trainer.data.moving import tensors_in
from trainer.files import aside_of, replacing


class Outputs(Protocol):
    """Takes the outputs of one batch after another."""

    def add(self, outputs: Any) -> None:
        """Take the outputs of the next batch."""
        ...

    def joined(self) -> Any:
        """The outputs of all batches, if they are kept."""
        ...


class KeptOutputs:
    """Keeps outputs on the CPU: a tensor, or tuples, lists and mappings of tensors, of shape [samples, …]."""

    def __init__(self) -> None:
        self._collected = Collected(Tensor.cpu)

    def add(self, outputs: Any) -> None:
        """Keep the outputs of the next batch.

        Raises:
            TypeError: The outputs hold no tensor.
        """
        if next(tensors_in(outputs), None) is None:
            raise TypeError(
                f"what is predicted for a batch is a {type(outputs).__name__} without a tensor: let the step "
                "return its predictions under 'outputs', or give it a method `predict(model, batch)`"
            )
        self._collected.add(outputs)

    def joined(self) -> Any:
        """The outputs of all batches, joined along the first dimension.

        Raises:
            ValueError: The batches differ in another dimension.
        """
        return self._collected.joined("predict")


class CsvOutputs:
    """Writes a row for each sample at once; keeps nothing.

    Args:
        rows: The CSV writer.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._width = 0

    def add(self, outputs: Any) -> None:
        """Write the rows of the next batch.

        Raises:
            TypeError: The outputs are no single tensor of real numbers, or have another width than those before.
        """
        if not isinstance(outputs, Tensor) or outputs.is_complex() or not outputs.dim():
            raise TypeError(
                f"what is predicted for a batch is a {type(outputs).__name__}, and a .csv has a row of numbers "
                "for each sample: write to a .pt file"
            )
        table = outputs.detach().reshape(len(outputs), -1)
        if not self._width:
            self._width = table.shape[1]
            self._rows.writerow(["output"] if self._width == 1 else [f"output_{i}" for i in range(self._width)])
        if table.shape[1] != self._width:
            raise TypeError(
                f"what is predicted has {self._width} numbers for each sample of the first batch, and "
                f"{table.shape[1]} for those of a later one: let the step return outputs of one width for a .csv"
            )
        self._rows.writerows(table.tolist())

    def joined(self) -> None:
        """Nothing is kept."""


@contextmanager
def collecting(path: Path | str | None) -> Iterator[Outputs]:
    """An object that takes the outputs; a file is written atomically at the end of the block.

    Args:
        path: None to keep the outputs in memory; a ``.pt`` file for `torch.load`; or a ``.csv`` file with a row
            for each sample.

    Raises:
        ValueError: The file has another suffix.
        OSError: The file can't be written.
    """
    if path is None:
        yield KeptOutputs()
        return
    path = Path(path)
    if path.suffix not in (".pt", ".csv"):
        raise ValueError(f"{path}: predictions are written to .pt (tensors) or .csv (a row for each sample)")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with replacing(path) as file:
            yield CsvOutputs(csv.writer(file))
        return
    kept = KeptOutputs()
    yield kept
    with aside_of(path) as aside:
        torch.save(kept.joined(), aside)
