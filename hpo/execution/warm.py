"""Warms a worker up: loads once what all trials share, so that each trial's process can be forked with it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import stat
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from hpo.config.spec import StudySpec
from hpo.execution.device import DRIVER
from hpo.study.folders import print_error
from hpo.trial.builder import Builder
from hpo.trial.process_forks import only_in
from hpo.trial.trainer_code import read_hooks
from hpo.wording import listed

_FDS: Final = Path("/proc/self/fd")
_TASKS: Final = Path("/proc/self/task")
#: The name of a thread of NVIDIA's libraries: of the one that counts devices, or of CUDA, which can't be forked.
_OF_CUDA: Final = re.compile(r"cuda[0-9a-f]{8,}")


def warm_up(spec: StudySpec) -> tuple[Builder, str | None]:
    """Import the study's modules, and load its data if all trials have the same data.

    An error here is only logged: each trial meets it again and reports it.

    Returns:
        A builder that has the data; and what the study's code has left behind that makes it unsafe to fork this
        process (threads, an accelerator's context or open files), None if nothing. A fork has none of the other
        threads, can't use the context, and shares the position in each file.
    """
    # So that torch.cuda.is_available(), which many modules call when they are imported, does not start CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    builder = Builder(spec)
    torch.set_num_threads(1)
    before = _open_files()
    try:
        with only_in(os.getpid()):
            builder.import_targets()
            if spec.config.data is not None and spec.has_same_data:
                builder.data(spec.resolve())
            if spec.config.objective is None:
                read_hooks(builder)
    except BaseException:  # noqa: BLE001 - the study's code may raise anything, and raises it in the trial again
        print_error(traceback.format_exc())
    _end_monitors()
    gc.collect()
    gc.freeze()  # a collection in a trial would touch, and so copy, every shared page
    return builder, _left(before)


def _left(before: set[tuple[str, int]]) -> str | None:
    """In words, what makes a fork unsafe; None if nothing does. ``before``: the files that were open before."""
    if (now := _open_files()) != before:
        return listed(sorted({f"open file {path}" for path, _ in now - before})) or "open files"
    if is_forkable():
        return None
    if _has_accelerator():
        return "an accelerator's context"
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return listed([f"thread {name}" for name in names]) or "threads of a library"


def _end_monitors() -> None:
    """End tqdm's monitor threads, which watch its progress bars; tqdm starts them again when it needs them."""
    for thread in threading.enumerate():
        if type(thread).__module__ == "tqdm._monitor":
            thread.exit()  # type: ignore[attr-defined]


def is_forkable() -> bool:
    """Whether this process has a single thread and has started no accelerator.

    A thread of the NVIDIA library that counts devices, which ``torch.cuda.is_available()`` starts, does no harm.
    """
    if _has_accelerator():
        return False
    # This fork makes libraries that handle forks (OpenBLAS) end their threads; they start them again when needed.
    _in_fork(lambda: True)
    try:
        threads = [(task / "comm").read_text().strip() for task in _TASKS.iterdir()]
    except OSError:  # only Linux lists the threads of libraries
        return threading.active_count() == 1
    others = [name for name in threads if not _OF_CUDA.fullmatch(name)]
    return len(threads) == 1 or (len(threads) == 2 and len(others) == 1 and _in_fork(_can_start_cuda))


def _has_accelerator() -> bool:
    return bool(torch.cuda.is_initialized() or torch.xpu.is_initialized())  # type: ignore[no-untyped-call]


def _in_fork(asked: Callable[[], bool]) -> bool:
    """What ``asked`` returns in a fork of this process; False if it raises or the fork dies."""
    child = os.fork()
    if not child:
        answer = False
        try:
            answer = asked()
        finally:
            os._exit(not answer)
    return os.waitpid(child, 0)[1] == 0


def _can_start_cuda() -> bool:
    """Whether CUDA's driver can start here; it can't in a fork of a process in which it has started."""
    return int(ctypes.CDLL(DRIVER).cuInit(0)) == 0


def _open_files() -> set[tuple[str, int]]:
    """Regular files that this process has open, with their descriptors; empty if the system lists none."""
    found = set()
    for descriptor in _FDS.iterdir() if _FDS.is_dir() else ():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, which is closed by now
            if stat.S_ISREG(descriptor.stat().st_mode):
                found.add((str(descriptor.readlink()), int(descriptor.name)))
    return found
