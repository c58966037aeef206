"""SavePretrained with models of transformers and huggingface_hub: what `from_pretrained` gives back."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.unit.trainer.support import At, interrupt_at, make_model, make_trainer, regression
from trainer import Trainer
from trainer.callbacks import BestWeights, NaNDetection, SavePretrained


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([at, at + 1]), "labels": torch.tensor(at % 2)}


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForSequenceClassification(BertConfig(vocab_size=10, max_position_embeddings=4, **sizes))


def step(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def fit(*callbacks: Any, epochs: int = 2) -> Trainer:
    trainer = make_trainer(callbacks, model=bert(), step=step, max_epochs=epochs)
    trainer.fit(Rows(), Rows())
    return trainer


def weights_in(folder: Path) -> dict[str, Tensor]:
    return dict(BertForSequenceClassification.from_pretrained(folder).state_dict())


def test_the_folder_gives_the_model_back_and_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    fit(SavePretrained(tmp_path / "model"), epochs=1)
    (tmp_path / "model" / "old").touch()
    trainer = fit(SavePretrained(tmp_path / "model", verify=True))
    read = weights_in(tmp_path / "model")
    assert all(torch.equal(value, read[name]) for name, value in trainer.model.state_dict().items())
    assert not (tmp_path / "model" / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_with_best_weights_it_is_the_best_model_and_the_type_is_that_asked_for(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def score(trainer: Any) -> None:
        trainer.state.metrics["score"] = -abs(trainer.state.epoch - 1.0)
        seen.append({name: value.clone() for name, value in trainer.model.state_dict().items()})

    trainer = fit(
        At("on_epoch_end", score),
        BestWeights("score", "max"),
        SavePretrained(tmp_path / "model", "bfloat16", verify=True),
        epochs=3,
    )
    read = weights_in(tmp_path / "model")
    assert all(torch.equal(value.bfloat16(), read[name].bfloat16()) for name, value in seen[0].items())
    assert next(trainer.model.parameters()).dtype == torch.float32


def test_a_folder_of_other_things_is_refused_before_training_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.py").touch()
    with pytest.raises(FileExistsError, match="holds other things than a model: give another folder"):
        fit(SavePretrained(tmp_path / "model"))
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "model.py"]


@pytest.mark.parametrize(
    "others",
    [
        [interrupt_at(3)],
        [At("on_epoch_end", lambda trainer: trainer.state.stop("pruned"))],
        [NaNDetection(), At("on_fit_end", lambda trainer: next(trainer.model.parameters()).data.fill_(torch.nan))],
    ],
    ids=["interrupted", "pruned", "not finite"],
)
def test_a_run_that_is_not_over_or_came_to_nothing_writes_none(tmp_path: Path, others: list[Any]) -> None:
    fit(SavePretrained(tmp_path / "model"), *others)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_interrupted_with_its_last_epoch_is_over(tmp_path: Path) -> None:
    fit(SavePretrained(tmp_path / "model"), interrupt_at(4, now=False))
    assert weights_in(tmp_path / "model")


def test_a_model_that_can_not_be_saved_so_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_trainer([SavePretrained(tmp_path / "model")], model=make_model()).fit(regression(), regression())
    assert "Sequential has no save_pretrained" in caplog.text
    assert not list(tmp_path.iterdir())


class Hub(nn.Linear, PyTorchModelHubMixin):
    """A model of one's own with what huggingface_hub gives it."""


def test_a_model_of_ones_own_is_saved_so_too(tmp_path: Path) -> None:
    saving = SavePretrained(tmp_path / "model", verify=True)
    trainer = make_trainer([saving], model=Hub(4, 1))
    trainer.fit(regression(), regression())
    assert torch.equal(Hub.from_pretrained(str(tmp_path / "model")).weight, trainer.model.weight)  # type: ignore[arg-type]


def test_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'float8': give one of float32"):
        SavePretrained(tmp_path, "float8")  # type: ignore[arg-type]
