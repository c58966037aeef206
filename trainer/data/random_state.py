"""Seeds, saves and restores the global random generators of Python, NumPy and torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

_NumpyState = tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.backends.cuda.is_built() or torch.backends.mps.is_built():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
    else:  # the same, but saves the quarter of a millisecond in which torch looks for devices
        torch.default_generator.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """States of the global generators, in types that ``torch.load(weights_only=True)`` accepts."""
    _, keys, position, has_gauss, cached = cast("_NumpyState", np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators, from states on any device; of CUDA devices, only those that are present."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        states = [item.cpu() for item in state["cuda"]]
        torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()])


@contextmanager
def kept_rng() -> Iterator[None]:
    """Restore the present states of the global generators at the end of the block."""
    before = rng_state()
    try:
        yield
    except BaseException as error:
        try:
            set_rng_state(before)
        except Exception as failed:  # noqa: BLE001 - for example a lost device, which ``error`` reports
            error.add_note(f"and the random generators could not be put back: {failed}")
        raise
    set_rng_state(before)
