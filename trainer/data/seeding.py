"""Derives seeds from other seeds; imports no torch, for code that only reads a study."""

from typing import Final

import numpy as np

#: Separates the seeds of data order from other uses of the same seed.
ORDER_STREAM: Final = 0x0DE2


def derive_seed(*parts: int) -> int:
    """One seed in [0, 2**63) from several integers, well mixed (NumPy's SeedSequence)."""
    state = np.random.SeedSequence([part % 2**64 for part in parts]).generate_state(1, np.uint64)
    return int(state[0]) >> 1
