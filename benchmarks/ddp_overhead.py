"""The Trainer in several processes against torch's own loop, on the processor, one thread a process.

    python benchmarks/ddp_overhead.py [--ranks 2] [--rounds 9] [--sizes small,medium,large]

The loops are what people write: DistributedDataParallel over gloo, a fused Adam, and each process its part of each
batch: rows of tensors in memory, which is what the Trainer does too, or a DataLoader with a DistributedSampler.
All train the same model on batches of the same size, each once a round, from the first batch to the last one. The
processes are started by torchrun.
"""

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from timing import interleaved, ratios
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import ConsoleLogging, default_callbacks

LR = 1e-3


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        widths: Of the layers of an MLP, the inputs first.
        batch: Samples a batch, of all processes together.
        batches: Batches an epoch.
        epochs: Epochs a round.
    """

    widths: tuple[int, ...]
    batch: int
    batches: int
    epochs: int

    def model(self) -> nn.Module:
        """The same one in each process and round."""
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data(self) -> TensorDataset:
        """The same in each process."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.batch * self.batches, self.widths[0], generator=generator)
        return TensorDataset(inputs, torch.randint(self.widths[-1], (len(inputs),), generator=generator))


SIZES = {
    "small": Size((64, 64, 10), 32, 56, 5),
    "medium": Size((784, 512, 512, 10), 128, 40, 2),
    "large": Size((1024, 2048, 2048, 1024, 10), 128, 12, 1),
}


def loop(size: Size, data: TensorDataset, *, loader: bool) -> float:
    """Seconds of torch's own loop."""
    network = DistributedDataParallel(size.model())
    optimizer = torch.optim.Adam(network.parameters(), lr=LR, fused=True)
    loss_function = nn.CrossEntropyLoss()
    batches = _loaded(size, data) if loader else partial(_rows, size, data)
    dist.barrier()
    started = time.perf_counter()
    for epoch in range(size.epochs):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            loss = loss_function(network(inputs), targets)
            loss.backward()
            optimizer.step()
    return time.perf_counter() - started


def _loaded(size: Size, data: TensorDataset) -> Callable[[int], DataLoader]:
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=size.batch // dist.get_world_size(), sampler=sampler)

    def batches(epoch: int) -> DataLoader:
        sampler.set_epoch(epoch)
        return loader

    return batches


def _rows(size: Size, data: TensorDataset, epoch: int) -> object:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    each = size.batch // dist.get_world_size()
    for first in range(dist.get_rank() * each, len(data), size.batch):
        rows = order[first : first + each]
        yield tuple(tensor.index_select(0, rows) for tensor in data.tensors)


def ours(size: Size, data: TensorDataset, *, callbacks: Callable[[], Sequence[Callback]]) -> float:
    """Seconds of the Trainer, from its first epoch to the end of its last."""
    network, moments = size.model(), []

    def start(trainer: Trainer) -> None:
        if not trainer.state.epoch:
            dist.barrier()
            moments.append(time.perf_counter())

    runner = Trainer(
        network,
        torch.optim.Adam(network.parameters(), lr=LR),
        nn.CrossEntropyLoss(),
        callbacks=callbacks(),
        max_epochs=size.epochs,
        batching=BatchOptions(batch_size=size.batch),
        device="cpu",
    )
    runner.callbacks.register("on_train_epoch_start", start, 1000)
    runner.callbacks.register("on_epoch_end", lambda _: moments.append(time.perf_counter()), 1000)
    runner.fit(data)
    return moments[-1] - moments[0]


def usual() -> list[Callback]:
    """What every run should have, but for the lines on the console."""
    return [each for each in default_callbacks() if not isinstance(each, ConsoleLogging)]


def slowest(run: Callable[[], float]) -> Callable[[], float]:
    """The seconds of the slowest process."""

    def timed() -> float:
        seconds = torch.tensor([run()])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    return timed


def measure(arguments: argparse.Namespace) -> None:
    """In each of the processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    for name in arguments.sizes.split(","):
        size = SIZES[name]
        data = size.data()
        base = "DistributedDataParallel, in memory"
        contestants = {
            base: partial(loop, size, data, loader=False),
            "DistributedDataParallel, DataLoader": partial(loop, size, data, loader=True),
            "Trainer, in memory, no callbacks": partial(ours, size, data, callbacks=list),
            "Trainer, in memory, default callbacks": partial(ours, size, data, callbacks=usual),
        }
        seconds = interleaved({key: slowest(run) for key, run in contestants.items()}, arguments.rounds)
        if not dist.get_rank():
            report(name, size, seconds, base)
    dist.destroy_process_group()


def report(name: str, size: Size, seconds: dict[str, list[float]], base: str) -> None:
    """A Markdown table."""
    parameters = sum(item.numel() for item in size.model().parameters())
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    ranks = dist.get_world_size()
    print(f"\n{name}: {parameters:,} parameters, batches of {size.batch}, {ranks} processes, load {load}\n")
    print("| contestant | median µs a step | ratio | min - max |")
    print("|---|---|---|---|")
    for key, (low, middle, high) in ratios(seconds, base).items():
        each = sorted(seconds[key])[len(seconds[key]) // 2] / (size.batches * size.epochs) * 1e6
        print(f"| {key} | {each:.0f} | {middle:.2f} | {low:.2f} - {high:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="small,medium,large", help=f"some of {', '.join(SIZES)}")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
    sys.exit(subprocess.run([*torchrun, *sys.argv], check=False).returncode)


if __name__ == "__main__":
    main()
