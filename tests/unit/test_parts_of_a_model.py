"""The Python of the page on parts of a model: what recomputed activations cost and give."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "parts.md").read_text()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page's Python leaves; its module is there while it runs."""
    module, names = ModuleType("finetune"), dict[str, Any]()
    monkeypatch.setitem(sys.modules, "finetune", module)
    torch.manual_seed(3)
    for title, block in re.findall(r'^```python(?: title="(.*?)")?\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL):
        exec(block, vars(module) if title else names)
    return names


def test_recomputed_activations_give_the_same_bits(page: dict[str, Any]) -> None:
    plain = page["trainer_of"]()
    plain.fit(page["data"]["train"], page["data"]["val"])
    recomputed = page["recomputed"]
    for one, other in zip(plain.model.parameters(), recomputed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not any("forward" in vars(module) for module in recomputed.model.modules())


def test_they_are_computed_once_more_in_the_backward_pass(page: dict[str, Any]) -> None:
    trainer = page["trainer_of"](page["RecomputedActivations"](["head"]), max_epochs=1)
    forward, calls = torch.nn.Linear.forward, []

    def counted(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        if self is trainer.model.head and self.training:
            calls.append(self)
        return forward(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", counted)
        trainer.fit(page["data"]["train"])
    assert len(calls) == 2 * 4
