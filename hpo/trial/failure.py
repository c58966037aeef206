"""Classifies the error that ended a trial: memory ran out, or something is wrong."""

from collections.abc import Iterator
from typing import Final

import torch

from hpo.study.outcome import Outcome
from trainer.error_text import error_message

_NO_DEVICE_MEMORY: Final = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: Plain RuntimeErrors are raised by the CPU's allocator (on Linux, on Windows), by CUDA calls that are not torch's
#: own, and by a loader whose process has no shared memory left; only their text identifies them.
_NO_MEMORY: Final = (
    "can't allocate memory",
    "not enough memory",
    *_NO_DEVICE_MEMORY,
    "unable to allocate shared memory",
)


def failure_outcome(error: BaseException) -> Outcome:
    """The outcome for an error: memory ran out, or something is wrong.

    The error's causes count too: if a model's constructor runs out of memory, its caller may raise another error
    from that.
    """
    return Outcome.OUT_OF_MEMORY if any(map(_is_out_of_memory, _causes(error))) else Outcome.ERROR


def is_device_memory(error: BaseException) -> bool:
    """Whether it was an accelerator's memory that ran out."""
    return any(
        isinstance(each, torch.OutOfMemoryError) or any(text in error_message(each) for text in _NO_DEVICE_MEMORY)
        for each in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and, for an exception group, its members; each once."""
    found, seen = [error], set[int]()
    while found:
        each = found.pop()
        if id(each) in seen:  # causes may form a circle
            continue
        seen.add(id(each))
        yield each
        found += [] if each.__cause__ is None else [each.__cause__]
        found += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in error_message(error) for text in _NO_MEMORY)
