"""Every shipped callback does in two processes what it does in one."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from tests.unit.trainer.distributed.contract import contract_resumed, contract_run
from tests.unit.trainer.distributed.ranks import Ranks
from tests.unit.trainer.distributed.runs import samples_per_batch
from tests.unit.trainer.support import assert_same
from tests.unit.trainer.test_contract import ALL

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ALL)
def test_every_callback_does_in_two_processes_what_it_does_in_one(
    two: Ranks, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, second = two.values(contract_run, name, str(tmp_path / "two"))
    for key in ("WANDB_MODE", "COMET_AUTO_LOG_DISABLE", "COMET_START_ONLINE"):
        monkeypatch.setenv(key, "")  # what the run sets is forgotten
    expected = contract_run(name, str(tmp_path / "one"))
    assert found.reason == expected.reason
    of_parts = "activation_*" if name == "TensorStatistics" else ""
    assert _without(found.history, of_parts) == near(_without(expected.history, of_parts))
    if not ALL[name][0](tmp_path).rank_state:
        assert listed(found.state) == near(listed(expected.state))
    assert found.test_loss == pytest.approx(expected.test_loss, abs=2e-6, rel=1e-5)
    assert found.files == expected.files
    assert not second.files  # each is written once


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"LRFinder", "Notifier"}))
def test_every_callback_resumes_in_two_processes_to_the_same_bits(two: Ranks, name: str, tmp_path: Path) -> None:
    found = two.values(contract_resumed, name, str(tmp_path))
    for rank, (whole, resumed) in enumerate(found):
        assert_same(resumed.history, whole.history)
        assert_same(resumed.weights, whole.weights)
        if not (rank and ALL[name][0](tmp_path).rank_zero_only):  # which has none there
            assert_same(resumed.state, whole.state)


def test_throughput_counts_the_samples_of_all(two: Ranks) -> None:
    expected = [85 / 6, 8 * 85 / 6] * 4  # the last of 6 batches is dealt as 3 and 2
    for found in (samples_per_batch(), *two.values(samples_per_batch)):
        assert found == pytest.approx(expected)


def _without(history: list[dict[str, float]], pattern: str) -> list[dict[str, float]]:
    return [{key: item for key, item in each.items() if not fnmatchcase(key, pattern)} for each in history]


def near(value: object) -> object:
    """A value that equals others that are it to rounding."""
    if isinstance(value, dict):
        return {key: near(item) for key, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, abs=2e-6, rel=1e-4, nan_ok=True) if isinstance(value, float) else value


def listed(value: object) -> object:
    """A value with lists in the place of tensors and tuples."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [listed(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value
