"""What a ReduceLROnPlateau follows in a Trainer: a metric that each epoch has, or the run says so."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.unit.trainer.support import At, make_trainer, regression
from trainer import Trainer
from trainer.lr_schedulers import Warmup
from trainer.state import VALIDATION


class TestWhatAPlateauFollows:
    def test_it_can_not_go_with_the_step(self) -> None:
        with pytest.raises(ValueError, match=r"scheduler_interval is 'step'.*: give 'epoch'"):
            plateau_trainer(scheduler_interval="step")

    def test_nor_behind_a_warm_up(self) -> None:
        with pytest.raises(ValueError, match="scheduler_interval is 'step'"):
            plateau_trainer(scheduler_interval="step", warmup=2)

    def test_one_put_in_later_is_looked_at_by_the_next_fit(self) -> None:
        trainer = make_trainer()
        trainer.scheduler_interval = "step"
        trainer.scheduler = ReduceLROnPlateau(trainer.optimizer)
        with pytest.raises(ValueError, match="scheduler_interval is 'step'"):
            trainer.fit(regression(), regression())

    @pytest.mark.parametrize("val", [True, False])
    def test_a_metric_that_no_epoch_records_is_named(self, val: bool) -> None:
        trainer = plateau_trainer(scheduler_monitor="val_los" if val else "val_loss")
        with pytest.raises(ValueError, match=r"scheduler_monitor is 'val_los+'.*recorded are train_loss"):
            trainer.fit(regression(), regression() if val else None)

    def test_an_epoch_whose_validation_was_skipped_says_nothing(self) -> None:
        trainer = plateau_trainer(max_epochs=3)
        trainer.callbacks.register("on_train_epoch_end", lambda trainer: trainer.state.skip(VALIDATION))
        trainer.fit(regression(), regression())
        assert trainer.scheduler is not None
        assert trainer.scheduler.last_epoch == 0

    def test_its_warm_up_counts_such_an_epoch(self) -> None:
        trainer = plateau_trainer(max_epochs=6, warmup=4)
        skip = At("on_train_epoch_end", lambda t: t.state.skip(VALIDATION), lambda t: t.state.epoch in (0, 2, 4))
        with trainer.callbacks.add(skip):
            trainer.fit(regression(), regression())
        rates = [round(epoch["lr"] / 0.05, 3) for epoch in trainer.state.history]
        assert rates == [0.1, 0.325, 0.55, 0.775, 1, 1]
        assert isinstance(trainer.scheduler, Warmup)
        assert trainer.scheduler.main.last_epoch == 1


def plateau_trainer(*, warmup: int = 0, **settings: Any) -> Trainer:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler: Any = ReduceLROnPlateau(optimizer)
    if warmup:
        scheduler = Warmup(optimizer, scheduler, warmup)
    return Trainer(model, optimizer, nn.functional.mse_loss, scheduler=scheduler, device="cpu", **settings)
