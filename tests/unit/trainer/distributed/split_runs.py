"""Runs of a model that is split over the processes: what test_split.py has them do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.trainer.distributed.runs import Blocks, OwnUpdate, PrunedError, build, weights_of
from tests.unit.trainer.support import At
from trainer import Callback
from trainer.callbacks import EMA, BestWeights, Checkpoint, Freeze, GradientClipping
from trainer.checkpoint.weights import load_weights
from trainer.distributed.rank_error import RankError
from trainer.distributed.ranks import rank
from trainer.rehearsal import rehearse


class Parted(nn.Module):
    """Two layers, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def _by_name() -> dict[str, Any]:
    model = Parted()
    optimizer = {
        "first": torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
        "last": torch.optim.Adam(model.last.parameters(), lr=0.01),
    }
    return {"model": model, "optimizer": lambda _: optimizer}


def _of(kind: Callable[..., Any], **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": Blocks(), "optimizer": lambda parameters: kind(parameters, **options)}


def _scheduled() -> dict[str, Any]:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return {"model": model, "optimizer": lambda _: optimizer, "scheduler": scheduler}


#: Runs that have to come to what one process comes to.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "frozen, then trained": lambda: {"callbacks": [Freeze("0", until_epoch=2)]},
    "trained, then frozen": lambda: {"callbacks": [Freeze("2", from_epoch=2)]},
    "best weights": lambda: {"callbacks": [BestWeights(), EMA(0.8)]},
    "clipped by value": lambda: {"callbacks": [GradientClipping(max_value=0.01)]},
    "bf16": lambda: {"precision": "bf16"},
    "by name": _by_name,
    "scheduled": _scheduled,
    "amsgrad": _of(torch.optim.Adam, lr=0.01, amsgrad=True),
    "rmsprop": _of(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "adagrad": _of(torch.optim.Adagrad, lr=0.05),
    "nadam": _of(torch.optim.NAdam, lr=0.01),
    "fused adam": _of(torch.optim.Adam, lr=0.01, fused=True),
    "one by one": _of(torch.optim.AdamW, lr=0.01, foreach=False),
    "compiled": lambda: {"compile": {"backend": "eager"}},
}


def learned(name: str, strategy: str) -> Any:
    """The history of a run, its weights at the end, and the numbers before and after it."""
    torch.manual_seed(0)  # a variant may build the model
    with _computing_in(torch.float32 if name == "bf16" else torch.float64):
        trainer, train, val = build("mlp", strategy=strategy, **VARIANTS[name]())
        before = trainer.validate(val)
        state = trainer.fit(train, val)
        outputs = trainer.predict(val)
        history = [*[dict(metrics) for metrics in state.history], before, trainer.test(val)]
        return history, weights_of(trainer), outputs


@contextmanager
def _computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Build models and data of this type: RMSprop, which divides by gradients, enlarges float32's rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def after_an_error(strategy: str, precision: str, event: str) -> Any:
    """A run that an error in rank 1 has broken off, and that is then begun again where it stood."""
    failed: list[int] = []

    def fail(_: Any) -> None:
        failed.append(1)
        raise ZeroDivisionError("once")

    due = lambda t: rank() == 1 and not failed and t.state.step == 8  # noqa: E731
    trainer, train, val = build("mlp", [At(event, fail, due)], strategy=strategy, precision=precision)
    try:
        trainer.fit(train, val)
    except (ZeroDivisionError, RankError) as error:
        first = type(error).__name__
    state = trainer.fit(train, val)
    return first, state.epoch, state.step, weights_of(trainer)


def pruned(folder: str) -> Any:
    """How a run with checkpoints ends that rank 0 prunes at the end of its third epoch; what lies there then."""

    def prune(trainer: Any) -> None:
        trainer.state.stop_reason = "pruned"
        raise PrunedError("no more")

    at = At("on_epoch_end", prune, lambda t: rank() == 0 and t.state.epoch == 3)
    trainer, train, val = build("blocks", [at, Checkpoint(folder, max_overhead=1)], strategy="fsdp")
    try:
        trainer.fit(train, val)
    except (PrunedError, RankError) as error:
        return str(error), trainer.state.stop_reason, sorted(path.name for path in Path(folder).iterdir())
    return "no error"


def rehearsed(name: str) -> Any:
    """A run after its rehearsal, which loads what was before into a model that is split by then."""
    trainer, train, val = build(name, strategy="fsdp")
    rehearse(trainer, train, val, val)
    state = trainer.fit(train, val)
    return [dict(metrics) for metrics in state.history], weights_of(trainer)


def split_by_hand(how: str) -> Any:
    """A model on which the user has called fully_shard."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    trainer = build("mlp", strategy="fsdp")[0]
    model = trainer.model
    with trainer.group.session(trainer.device):  # begins the process group
        columns = (lambda item: Shard(item.dim() - 1)) if how == "in columns" else None
        fully_shard(model[0], shard_placement_fn=columns)
        if how != "in part":
            fully_shard(model)
    trainer, train, val = build("mlp", model=model, strategy="ddp" if how == "for ddp" else "fsdp")
    try:
        return trainer.fit(train, val).history[-1]["val_loss"]
    except (ValueError, RankError) as error:
        return str(error)


def loaded(folder: str) -> Any:
    """Weights of a file in a model that is split already."""
    trainer, train, val = build("blocks", strategy="fsdp", max_epochs=1)
    trainer.fit(train, val)
    path = Path(folder) / "weights.pt"
    torch.manual_seed(11)
    weights = Blocks().state_dict()
    if rank() == 0:
        torch.save(weights, path)
    with trainer.group.session(trainer.device):
        trainer.group.gather(None)  # until it is written
    load_weights(trainer.model, path)
    found = weights_of(trainer)
    return all(torch.equal(found[name], weights[name]) for name in weights)


class Sum(nn.Module):
    """A model with a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(())), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs) * self.scale


class _Keeps(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.all = list(self.param_groups[0]["params"])


class _Whole(Callback):
    needs_whole_model = "looks at all weights at once"


def refused(what: str) -> str:
    """What a Trainer says to what can't be split."""
    own = nn.Parameter(torch.zeros(3))
    changes: dict[str, dict[str, Any]] = {
        "scalar": {"model": Sum()},
        "closure": {"optimizer": lambda p: torch.optim.LBFGS(p)},
        "kept": {"optimizer": _Keeps},
        "other parameters": {"optimizer": lambda p: torch.optim.SGD([*p, own], lr=0.1)},
        "callback": {"callbacks": [_Whole()]},
        "norm": {"callbacks": [GradientClipping(max_norm=1.0, norm_type=1.0)]},
        "means": {"optimizer": lambda p: torch.optim.Adafactor(p)},
        "updates": {"loss": None, "step": OwnUpdate(), "metrics": {}},
    }
    trainer, train, val = build("mlp", strategy="fsdp", **changes[what])
    try:
        trainer.fit(train, val)
    except (ValueError, RankError) as error:
        return str(error)
    return "nothing"
