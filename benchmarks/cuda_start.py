"""What CUDA costs a trial's process: the seconds to start it, and the memory that it then has.

    python benchmarks/cuda_start.py [--together 4]

Processes are forked as a worker forks them, with everything imported and nothing started: three one after another,
then some at once. Each starts CUDA, then takes three steps of a small model. Needs a GPU.
"""

import argparse
import os
import time
from collections.abc import Callable

import psutil
import torch

import hpo.execution.launchers.preload  # noqa: F401 - what a worker has imported


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def three_steps() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(32, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def child() -> None:
    context, steps = seconds(lambda: torch.zeros(1, device="cuda")), seconds(three_steps)
    free, total = torch.cuda.mem_get_info()
    own = psutil.Process().memory_full_info().uss
    print(
        f"CUDA {context:.2f} s, three steps {steps:.2f} s; {own >> 20} MiB of its own; "
        f"{total - free >> 20} of {total >> 20} MiB of the device are used",
        flush=True,
    )


def fork() -> int:
    pid = os.fork()
    if not pid:
        child()
        os._exit(0)
    return pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--together", type=int, default=4)
    together = parser.parse_args().together
    print("one after another", flush=True)
    for _ in range(3):
        os.waitpid(fork(), 0)
    print(f"{together} at once", flush=True)
    for pid in [fork() for _ in range(together)]:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
