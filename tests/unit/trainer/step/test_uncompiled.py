"""What torch.compile made runs as it was written inside of `uncompiled`, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from trainer.step.uncompiled import uncompiled


@pytest.fixture
def runs() -> Any:
    """A compiled function that says whether it ran compiled."""
    torch.compiler.reset()
    seen: list[bool] = []
    double = torch.compile(
        lambda value: value * 2, backend=lambda graph, inputs: lambda *given: seen.append(True) or graph(*given)
    )

    def compiled() -> bool:
        seen.clear()
        assert double(torch.ones(1)).item() == 2
        return bool(seen)

    return compiled


def test_inside_the_block_it_runs_as_written(runs: Any) -> None:
    with uncompiled():
        assert not runs()
    assert runs()


def test_an_error_ends_it(runs: Any) -> None:
    with pytest.raises(ZeroDivisionError), uncompiled():
        raise ZeroDivisionError
    assert runs()


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_end_in_any_order(runs: Any, first: int) -> None:
    blocks = [ExitStack(), ExitStack()]
    for block in blocks:
        block.enter_context(uncompiled())
    blocks[first].close()
    assert not runs()
    blocks[1 - first].close()
    assert runs()


def test_a_stance_of_the_users_is_put_back(runs: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        with uncompiled():
            assert not runs()
        assert not runs()
    assert runs()


def test_a_process_without_the_compiler_does_not_import_it() -> None:
    code = """if True:
        import sys
        from trainer.step.uncompiled import uncompiled
        with uncompiled():
            pass
        sys.exit("torch._dynamo" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
