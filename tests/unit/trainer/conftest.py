"""Settings of the trainer's tests."""

from collections.abc import Iterator

import pytest
import torch

from trainer.callback import global_callbacks


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_global_callback_stays() -> Iterator[None]:
    yield
    assert global_callbacks() == ()
