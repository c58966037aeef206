"""`${trainer.total_steps}` and `${trainer.steps_per_epoch}`: what each trial's Trainer will count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hpo.errors import InputError
from hpo.trial.builder import Builder
from hpo.trial.micro_batch import cut
from hpo.trial.place import RunPlace
from hpo.trial.run_length import Progress, run_length
from tests.support.commands import STUDY, hpo, hpo_json, make_study
from tests.support.studies import Studies
from tests.unit.trainer.support import assert_same, interrupt_at, quick, through_file
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import GradientAccumulation
from trainer.checkpoint.manager import load_checkpoint

CPU = torch.device("cpu")
ONE_CYCLE = (
    "lr_scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: '${optimizer.lr}', interval: step, "
    "total_steps: '${trainer.total_steps}'}"
)


class Items(Dataset[Any]):
    """A data set that is no TensorDataset."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.zeros(1)


class Stream(IterableDataset[Any]):
    """Data whose length is not known."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.zeros(4), torch.zeros(1))] * 8)


KINDS = {
    "tensors": lambda samples: TensorDataset(torch.zeros(samples, 4), torch.zeros(samples, 1)),
    "dataset": Items,
    "loader": lambda samples: DataLoader(Items(samples), batch_size=3),
}
LENGTHS = st.fixed_dictionaries(
    {
        "max_epochs": st.none() | st.integers(1, 4),
        "max_steps": st.none() | st.integers(1, 30),
        "validate_every": st.none() | st.integers(1, 7) | st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    }
).filter(lambda section: section["max_epochs"] is not None or section["max_steps"] is not None)


def counted(trainer: Trainer, data: Any) -> tuple[int | None, int]:
    """The steps that a Trainer expects when its fit starts, and those that it takes."""
    expected: list[int | None] = []
    trainer.callbacks.register("on_fit_start", lambda trainer: expected.append(trainer.state.total_steps))
    return trainer.fit(data) and expected[0], trainer.state.step


@quick(80)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    samples=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    drop_last=st.booleans(),
    together=st.integers(1, 4),
    section=LENGTHS,
)
def test_it_is_what_the_trainer_counts(
    kind: str, samples: int, batch_size: int, drop_last: bool, together: int, section: dict[str, Any]
) -> None:
    if drop_last and samples < batch_size:
        samples += batch_size
    data = KINDS[kind](samples)
    loader = {"batch_size": batch_size, "drop_last": drop_last}
    length = run_length({"loader": loader, "trainer": section}, data, batches_per_step=together)
    model = nn.Linear(4, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        nn.functional.mse_loss,
        batching=BatchOptions(**loader),
        callbacks=[GradientAccumulation(together)],
        device="cpu",
        **section,
    )
    expected, taken = counted(trainer, data)
    assert length.total_steps == expected
    if not isinstance(section["validate_every"], int):  # such epochs may end inside a group of batches
        assert length.total_steps == taken
    if section["validate_every"] is None:
        one_pass = len(data) if kind == "loader" else samples / batch_size
        batches = math.floor(one_pass) if drop_last else math.ceil(one_pass)
        assert length.steps_per_epoch == math.ceil(batches / together)


@quick(40)
@given(epochs=st.integers(1, 3), more=st.integers(1, 3), every=st.sampled_from([None, 0.3, 0.5, 2]))
def test_what_is_trained_already_does_not_count(epochs: int, more: int, every: float | None) -> None:
    def trainer(max_epochs: int) -> Trainer:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss = nn.functional.mse_loss
        return Trainer(model, optimizer, loss, max_epochs=max_epochs, validate_every=every, device="cpu")

    data = KINDS["tensors"](100)
    first = trainer(epochs)
    first.callbacks.register("on_epoch_end", lambda each: each.state.stop("enough"))
    state = first.fit(data).state_dict()
    after = Progress(state["data_epoch"], state["step"], state["data_batch"])
    section = {"max_epochs": more, "max_steps": None, "validate_every": every}
    length = run_length({"loader": {}, "trainer": section}, data, after=after)
    second = trainer(state["data_epoch"] + more)
    second.state.load_state_dict({**state, "stop_reason": None})
    _, taken = counted(second, data)
    assert length.total_steps == taken - after.steps
    if every is None:
        assert length.epochs == more


class TestInAStudyFile:
    def test_the_file_is_read_and_hashed_with_the_names(self, studies: Studies) -> None:
        spec = studies.spec(ONE_CYCLE)
        assert spec.base_config()["lr_scheduler"]["total_steps"] == "${trainer.total_steps}"
        assert spec.config_hash() == studies.spec(ONE_CYCLE, "study.name=other").config_hash()
        assert spec.config_hash() != studies.spec(ONE_CYCLE, "lr_scheduler.total_steps=12").config_hash()
        assert "total_steps" not in spec.base_config()["trainer"]

    @pytest.mark.parametrize(
        ("params", "overrides", "steps"),
        [
            ({}, [], 12),  # 64 samples by 16, 3 epochs
            ({"loader.batch_size": 32}, [], 6),
            ({"loader.batch_size": 48}, ["loader.drop_last=true"], 3),
            ({"trainer.max_epochs": 5}, [], 20),
            ({"trainer.max_steps": 7}, [], 7),
            ({}, ["callbacks={gradient_accumulation: {batches: 3}}"], 6),
            (
                {"callbacks.gradient_accumulation.batches": 2},
                ["callbacks={gradient_accumulation: {batches: 3}}"],
                6,
            ),
            ({}, ["callbacks={own: {_target_: trainer.callbacks.GradientAccumulation, batches: 4}}"], 3),
        ],
    )
    def test_each_trial_has_its_own(
        self, studies: Studies, params: dict[str, Any], overrides: list[str], steps: int
    ) -> None:
        builder = Builder(studies.spec(ONE_CYCLE, *overrides))
        config = builder.spec.resolve(params)
        data = builder.data(config)
        config = builder.laid_out(config, data)
        trainer = builder.trainer(config, RunPlace(studies.folder / "run", "run"), seed=1, device=CPU)
        assert trainer.scheduler is not None
        assert vars(trainer.scheduler)["total_steps"] == steps
        expected, taken = counted(trainer, data["train"])
        assert expected == taken == steps

    def test_a_batch_that_is_cut_after_out_of_memory_changes_no_step(self, studies: Studies) -> None:
        builder = Builder(studies.spec(ONE_CYCLE))
        config = builder.spec.resolve()
        data = builder.data(config)
        whole = builder.laid_out(config, data)
        assert builder.laid_out(cut(config, 4), data)["lr_scheduler"] == whole["lr_scheduler"]

    def test_a_resumed_trial_has_the_same_schedule(self, studies: Studies) -> None:
        def trainer(folder: str, *bridge: Callback) -> Trainer:
            builder = Builder(studies.spec(ONE_CYCLE))
            config = builder.laid_out(builder.spec.resolve(), data)
            place = RunPlace(studies.folder / folder, "run")
            return builder.trainer(config, place, seed=1, device=CPU, bridge=bridge)

        data = Builder(studies.spec()).data(studies.spec().resolve())
        whole, first, second = trainer("whole"), trainer("parts", interrupt_at(5)), trainer("parts")
        whole.fit(data["train"], data["val"])
        first.fit(data["train"], data["val"])
        second.load_state_dict(through_file(first.state_dict()))
        second.fit(data["train"], data["val"])
        assert whole.scheduler is not None
        assert second.scheduler is not None
        assert_same(second.scheduler.state_dict(), whole.scheduler.state_dict())
        assert_same(second.model.state_dict(), whole.model.state_dict())

    def test_steps_per_epoch_serves_a_warm_up(self, studies: Studies) -> None:
        scheduler = (
            "lr_scheduler={_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: '${trainer.total_steps}', "
            "interval: step, warmup: '${trainer.steps_per_epoch}'}"
        )
        builder = Builder(studies.spec(scheduler))
        config = builder.spec.resolve()
        node = builder.laid_out(config, builder.data(config))["lr_scheduler"]
        assert (node["T_max"], node["warmup"]) == (12, 4)

    def test_it_may_stand_in_text_and_below_other_keys(self, studies: Studies) -> None:
        builder = Builder(studies.spec("loss={_target_: parts.Explode, note: ['of ${trainer.total_steps}']}"))
        config = builder.spec.resolve()
        assert builder.laid_out(config, builder.data(config))["loss"]["note"] == ["of 12"]

    @pytest.mark.parametrize(
        "override",
        [
            "data={_target_: parts.load, samples: '${trainer.total_steps}'}",
            "trainer.max_epochs=${trainer.steps_per_epoch}",
            "study.name=${trainer.total_steps}",
            "model.hidden=${trainer.total_steps}",
            "callbacks={gradient_accumulation: {batches: '${trainer.total_steps}'}}",
            "search_space={optimizer.lr: {type: categorical, choices: ['${trainer.total_steps}']}}",
        ],
    )
    def test_what_is_needed_before_the_data_can_not_hang_on_it(self, studies: Studies, override: str) -> None:
        with pytest.raises(InputError, match="is only known once the data is loaded, but is needed earlier"):
            studies.spec(override)

    def test_it_is_not_given(self, studies: Studies) -> None:
        with pytest.raises(InputError, match=r"trainer\.total_steps: unknown key"):
            studies.spec("trainer={max_epochs: 3, total_steps: 5}")

    def test_data_without_a_length_asks_for_max_steps(self, studies: Studies) -> None:
        builder, data = Builder(studies.spec(ONE_CYCLE)), {"train": Stream()}
        with pytest.raises(InputError) as raised:
            builder.laid_out(builder.spec.resolve(), data)
        assert "lr_scheduler.total_steps: trainer.total_steps is not known" in str(raised.value)
        assert "trainer.max_steps" in raised.value.fix
        limited = builder.spec.resolve({"trainer.max_steps": 9, "trainer.validate_every": 3})
        assert builder.laid_out(limited, data)["lr_scheduler"]["total_steps"] == 9

    @pytest.mark.parametrize("every", [3, 0.5])
    def test_validations_inside_a_pass_without_a_length_ask_for_max_steps(
        self, studies: Studies, every: float
    ) -> None:
        builder = Builder(studies.spec(f"trainer.validate_every={every}"))
        with pytest.raises(InputError, match="number of epochs is not known") as raised:
            builder.laid_out(builder.spec.resolve(), {"train": Stream()})
        assert str(raised.value).startswith("command line: trainer.validate_every")
        assert "`trainer.max_steps`" in raised.value.fix

    def test_a_batch_size_that_changes_leaves_it_open(self, studies: Studies) -> None:
        builder = Builder(studies.spec(ONE_CYCLE, "callbacks={batch_size_schedule: {sizes: {'0': 4, '1': 8}}}"))
        config = builder.spec.resolve()
        with pytest.raises(InputError, match="where the batch size changes"):
            builder.laid_out(config, builder.data(config))


SEARCHED = STUDY.replace(
    'lr_scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: "${trainer.max_epochs}"}',
    """lr_scheduler:
  _target_: torch.optim.lr_scheduler.OneCycleLR
  max_lr: ${optimizer.lr}
  total_steps: ${trainer.total_steps}
  interval: step""",
).replace("  model.hidden", "  loader.batch_size: {type: categorical, choices: [8, 16, 64]}\n  model.hidden")


@pytest.mark.usefixtures("in_process")
def test_a_study_of_one_cycles_over_searched_batches(tmp_path: Path) -> None:
    study, runs = make_study(tmp_path, SEARCHED), tmp_path / "runs" / "tiny"
    hpo("check", study)
    hpo("run", study, "--workers", 1, "--n-trials", 4)
    trials = hpo_json("trials", study)
    assert [trial["outcome"] for trial in trials] == ["complete"] * 4
    assert len({trial["params"]["loader.batch_size"] for trial in trials}) > 1
    for trial in trials:
        steps = 3 * math.ceil(64 / trial["params"]["loader.batch_size"])
        folder = runs / "trials" / str(trial["trial"]) / "attempt-1"
        saved = OmegaConf.load(folder / "config.yaml")
        assert saved.lr_scheduler.total_steps == steps
        assert saved.lr_scheduler.max_lr == trial["params"]["optimizer.lr"]
        scheduler = load_checkpoint(folder / "checkpoints" / "epoch-00003.pt", CPU)["scheduler"]
        assert (scheduler["total_steps"], scheduler["last_epoch"]) == (steps, steps)
    hpo("train", study, "--trial", "best", "--epochs", 2)
    best = yaml.safe_load((runs / "final" / "config.yaml").read_text())
    assert best["lr_scheduler"]["total_steps"] == 2 * math.ceil(64 / best["loader"]["batch_size"])


def test_dropped_rests_of_epochs_make_no_steps() -> None:
    data = TensorDataset(torch.zeros(10, 1))
    config = {"loader": {"batch_size": 2}, "trainer": {"max_epochs": 3, "max_steps": None, "validate_every": None}}
    length = run_length(config, data, batches_per_step=2, drops_last_step=True)
    assert (length.total_steps, length.steps_per_epoch) == (6, 2)
