"""Parameter groups by pattern: who is in which, what is refused, and the steps they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.trainer.support import make_trainer, regression
from trainer import parameter_groups
from trainer.step.groups import parameters_of


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), "head": nn.Linear(3, 1)})


def names(model: nn.Module, *patterns: str) -> list[str]:
    return list(parameters_of(model, patterns))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("encoder",), ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"]),
        (("encoder.*",), ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"]),
        (("encoder.1",), ["encoder.1.weight", "encoder.1.bias"]),
        (("*.bias",), ["encoder.0.bias", "encoder.1.bias", "head.bias"]),
        (("head.weight", "*.0.bias"), ["encoder.0.bias", "head.weight"]),
        (("[eh]*.bias",), ["encoder.0.bias", "encoder.1.bias", "head.bias"]),
    ],
)
def test_a_pattern_is_a_name_of_a_parameter_or_module_or_shell_style(
    patterns: tuple[str, ...], expected: list[str]
) -> None:
    assert names(net(), *patterns) == expected
    assert names(nn.DataParallel(net()), *patterns) == expected


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("encodr", "did you mean 'encoder'"), ("hed.bias", "did you mean 'head.bias'"), ("zz", "encoder, head")],
)
def test_a_pattern_without_a_match_names_the_nearest(pattern: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"no parameter of the model is called '{pattern}'.*{hint}"):
        names(net(), "head", pattern)


def test_each_parameter_is_in_the_first_group_that_matches_it_and_the_rest_comes_first() -> None:
    model = net()
    groups = parameter_groups(
        model,
        {"encoder.0": {"lr": 0.1}, "no decay": {"parameters": ["*.bias", "head.bias"], "weight_decay": 0.0}},
    )
    named = {id(item): name for name, item in model.named_parameters()}
    assert [[named[id(item)] for item in group.pop("params")] for group in groups] == [
        ["encoder.1.weight", "head.weight"],
        ["encoder.0.weight", "encoder.0.bias"],
        ["encoder.1.bias", "head.bias"],
    ]
    assert groups == [{}, {"lr": 0.1}, {"weight_decay": 0.0}]


def test_groups_of_everything_leave_no_rest() -> None:
    assert [len(group["params"]) for group in parameter_groups(net(), {"encoder": {}, "head": {}})] == [4, 2]


def test_a_group_that_others_have_emptied_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'encoder\.0' gets no parameter.*'encoder\.0\.weight'; put it before"):
        parameter_groups(net(), {"encoder": {}, "encoder.0": {}})


def test_groups_train_as_two_optimizers_would() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

    grouped, apart = model(), model()
    optimizer = torch.optim.AdamW(parameter_groups(grouped, {"0": {"lr": 0.01, "weight_decay": 0.5}}), lr=0.1)
    state = make_trainer(model=grouped, optimizer=optimizer, max_epochs=2).fit(regression())
    assert state.metrics["lr"] == 0.1
    both = [
        torch.optim.AdamW(apart[0].parameters(), lr=0.01, weight_decay=0.5),
        torch.optim.AdamW(apart[1].parameters(), lr=0.1),
    ]

    def step(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    trainer = make_trainer(model=apart, optimizer=both[1], step=step, max_epochs=2)
    trainer.callbacks.register("on_before_optimizer_step", lambda trainer: both[0].step())
    trainer.callbacks.register("on_after_zero_grad", lambda trainer: both[0].zero_grad())
    trainer.fit(regression())
    for one, other in zip(grouped.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
