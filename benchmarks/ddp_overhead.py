"""The Trainer in several processes against torch's own loop, on the processor, one thread a process.

    python benchmarks/ddp_overhead.py [--ranks 2] [--rounds 9] [--sizes small,medium,large]

The loops are what people write: DistributedDataParallel over gloo, a fused Adam, and each process its part of each
batch: rows of tensors in memory, which is what the Trainer does too, or a DataLoader with a DistributedSampler.
All train the same model on batches of the same size, each once a round in long epochs and once in epochs of a
quarter of their length. What an epoch of each takes gives the cost of a step, and what an epoch costs beside its
steps. The time is that of the slowest process, from the first batch to the last epoch's end; CPU time is that of
all. The processes are started by torchrun.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from timing import interleaved
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import ConsoleLogging, default_callbacks

LR = 1e-3
# Of so many short epochs a long one is made.
_SHORTER = 4


class Cost(NamedTuple):
    """Seconds, on the clock and of the processor."""

    wall: float
    cpu: float


def now() -> Cost:
    return Cost(time.perf_counter(), time.process_time())


def between(start: Cost, end: Cost) -> Cost:
    return Cost(end.wall - start.wall, end.cpu - start.cpu)


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        widths: Of the layers of an MLP, the inputs first.
        batch: Samples a batch, of all processes together.
        batches: Batches of a long epoch.
        epochs: Long epochs a round.
    """

    widths: tuple[int, ...]
    batch: int
    batches: int
    epochs: int

    def in_short(self) -> "Size":
        """As many batches in short epochs."""
        return replace(self, batches=self.batches // _SHORTER, epochs=self.epochs * _SHORTER)

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
    "small": Size((64, 64, 10), 32, 224, 2),
    "medium": Size((784, 512, 512, 10), 128, 48, 1),
    "large": Size((1024, 2048, 2048, 1024, 10), 128, 12, 1),
}


def loop(size: Size, data: TensorDataset, *, loader: bool) -> Cost:
    """Of torch's own loop."""
    network = DistributedDataParallel(size.model())
    optimizer = torch.optim.Adam(network.parameters(), lr=LR, fused=True)
    loss_function = nn.CrossEntropyLoss()
    batches = _loaded(size, data) if loader else partial(_rows, size, data)
    dist.barrier()
    started = now()
    for epoch in range(size.epochs):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            loss = loss_function(network(inputs), targets)
            loss.backward()
            optimizer.step()
    return between(started, now())


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


def ours(size: Size, data: TensorDataset, *, callbacks: Callable[[], Sequence[Callback]]) -> Cost:
    """Of the Trainer, from its first epoch to the end of its last."""
    network = size.model()
    moments: list[Cost] = []

    def start(trainer: Trainer) -> None:
        if not trainer.state.epoch:
            dist.barrier()
            moments.append(now())

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
    runner.callbacks.register("on_epoch_end", lambda _: moments.append(now()), 1000)
    runner.fit(data)
    return between(moments[0], moments[-1])


def usual() -> list[Callback]:
    """What every run should have, but for the lines on the console."""
    return [each for each in default_callbacks() if not isinstance(each, ConsoleLogging)]


def together(run: Callable[[], Cost]) -> Callable[[], Cost]:
    """The seconds of the slowest process, and the processor's of all."""

    def timed() -> Cost:
        wall, cpu = (torch.tensor([seconds]) for seconds in run())
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        return Cost(wall.item(), cpu.item())

    return timed


def measure(arguments: argparse.Namespace) -> None:
    """In each of the processes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    base = "DistributedDataParallel, in memory"
    kinds: dict[str, Callable[[Size, TensorDataset], Cost]] = {
        base: partial(loop, loader=False),
        "DistributedDataParallel, DataLoader": partial(loop, loader=True),
        "Trainer, in memory, no callbacks": partial(ours, callbacks=list),
        "Trainer, in memory, default callbacks": partial(ours, callbacks=usual),
    }
    for name in arguments.sizes.split(","):
        size = SIZES[name]
        short = size.in_short()
        contestants = {
            (kind, length): together(partial(run, each, each.data()))
            for kind, run in kinds.items()
            for length, each in (("short", short), ("long", size))
        }
        costs = interleaved(contestants, arguments.rounds)
        if not dist.get_rank():
            found = {kind: split(short, size, costs[kind, "short"], costs[kind, "long"]) for kind in kinds}
            report(name, size, found, base)
    dist.destroy_process_group()


class Split(NamedTuple):
    """What a round has cost, in seconds; an epoch, beside its steps."""

    step: float
    epoch: float
    step_cpu: float
    epoch_cpu: float


def split(short: Size, long: Size, of_short: Sequence[Cost], of_long: Sequence[Cost]) -> list[Split]:
    """The cost of a step and that of an epoch in each round, from epochs of two lengths."""
    found = []
    for some, many in zip(of_short, of_long, strict=True):
        steps = [
            (b / long.epochs - a / short.epochs) / (long.batches - short.batches)
            for a, b in zip(some, many, strict=True)
        ]
        epochs = [a / short.epochs - step * short.batches for a, step in zip(some, steps, strict=True)]
        found.append(Split(steps[0], epochs[0], steps[1], epochs[1]))
    return found


def report(name: str, size: Size, found: dict[str, list[Split]], base: str) -> None:
    """A Markdown table of medians over the rounds; ratios are those of one round."""
    parameters = sum(item.numel() for item in size.model().parameters())
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    ranks = dist.get_world_size()
    print(f"\n{name}: {parameters:,} parameters, batches of {size.batch}, {ranks} processes, load {load}\n")
    print("| contestant | µs a step | ratio (min - max) | CPU µs a step | ratio | ms an epoch | CPU ms an epoch |")
    print("|---|---|---|---|---|---|---|")
    for key, rounds in found.items():
        pairs = list(zip(rounds, found[base], strict=True))
        wall = sorted(own.step / other.step for own, other in pairs)
        cpu = statistics.median(own.step_cpu / other.step_cpu for own, other in pairs)
        step, epoch, step_cpu, epoch_cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"| {key} | {step * 1e6:.0f} | {statistics.median(wall):.2f} ({wall[0]:.2f} - {wall[-1]:.2f}) | "
            f"{step_cpu * 1e6:.0f} | {cpu:.2f} | {epoch * 1e3:.1f} | {epoch_cpu * 1e3:.1f} |",
            flush=True,
        )


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
