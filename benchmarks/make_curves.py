"""Learning curves of small real models over wide searches, to develop the predictor and the pruner on.

    python benchmarks/make_curves.py OUT_DIR [--tasks digits_sgd_error …] [--runs 100] [--jobs 1]

Each run trains with another optimizer setting under a schedule that warms up and decays over its whole length, as
deep-learning workloads do: curves cross late, high learning rates win only after the decay, long warm-ups start
slowly, strong regularisation overtakes, some runs diverge or overfit.

OUT_DIR/<task>.npz holds `valid` and `train` float32 [runs, 40] (lower is better; NaN from where a run was not
finite), `hp` float64 [runs, k] and `hp_names` [k]; a choice is stored as its index, and its name lists them.
A run depends on its task and number alone, for one version of Python and torch. Never commit the files.
"""

import argparse
import math
import multiprocessing
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import curve_tasks as work
import numpy as np
import numpy.typing as npt
import torch
from curve_tasks import Workload
from scipy.stats import spearmanr
from torch import Tensor, nn

POINTS = 40

Range = tuple[Any, ...]
"""("log", low, high), ("uniform", low, high) or ("choice", *values)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's setting; `lr` is the schedule's peak, `warmup` and `decay` are shares of the run."""

    lr: float
    optimizer: str = "adamw"
    schedule: str = "cosine"
    warmup: float = 0.0
    decay: float = 1.0
    power: float = 1.0
    one_minus_beta1: float = 0.1
    one_minus_beta2: float = 0.01
    weight_decay: float = 0.0
    dropout: float = 0.0
    smoothing: float = 0.0
    augment: float = 0.0
    clip: float = math.inf


def _steps(progress: float, _settings: Settings) -> float:
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


SCHEDULES: dict[str, Callable[[float, Settings], float]] = {
    "cosine": lambda p, _: 0.5 + 0.5 * math.cos(math.pi * p),
    "linear": lambda p, _: 1 - p,
    "steps": _steps,
    # Constant, then linear to zero over the last `decay` of what follows the warm-up.
    "stable": lambda p, s: min(1.0, (1 - p) / s.decay),
    # The polynomial schedule of the PD1 tuning data (Wang et al., "Pre-trained Gaussian processes for Bayesian
    # optimization", JMLR 2024): it reaches a thousandth of the peak after `decay` of the run.
    "power": lambda p, s: 1e-3 + (1 - 1e-3) * max(0.0, 1 - p / s.decay) ** s.power,
}


def rate_factor(settings: Settings, step: int, steps: int) -> float:
    """The share of the peak learning rate at a step counted from 0: linear warm-up, then the schedule."""
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    return SCHEDULES[settings.schedule]((step - warmup) / (steps - warmup), settings)


def flatten(model: nn.Module) -> nn.Parameter:
    """One parameter whose memory, and that of its gradient, the model's parameters share.

    Tiny models spend their time in calls: an optimizer of one tensor makes few.
    """
    weights = list(model.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(weights).detach())
    flat.grad = torch.zeros_like(flat)
    nn.utils.vector_to_parameters(flat.data, weights)
    start = 0
    for weight in weights:
        weight.grad = flat.grad[start : start + weight.numel()].view_as(weight)
        start += weight.numel()
    return flat


def make_optimizer(flat: nn.Parameter, settings: Settings) -> torch.optim.Optimizer:
    """The named optimizer; weight decay is decoupled in adamw and nadam, added to the gradient elsewhere."""
    momentum, decay = 1 - settings.one_minus_beta1, settings.weight_decay
    betas = (momentum, 1 - settings.one_minus_beta2)
    weights, lr = [flat], settings.lr
    match settings.optimizer:
        case "sgd":
            return torch.optim.SGD(weights, lr, momentum=momentum, weight_decay=decay, fused=True)
        case "nesterov":
            return torch.optim.SGD(weights, lr, momentum=momentum, weight_decay=decay, nesterov=True, fused=True)
        case "adam":
            return torch.optim.Adam(weights, lr, betas=betas, weight_decay=decay, fused=True)
        case "adamw":
            return torch.optim.AdamW(weights, lr, betas=betas, weight_decay=decay, fused=True)
        case "nadam":
            return torch.optim.NAdam(weights, lr, betas=betas, weight_decay=decay, decoupled_weight_decay=True)
        case "rmsprop":
            return torch.optim.RMSprop(weights, lr, alpha=betas[1], momentum=momentum, weight_decay=decay)
    raise ValueError(f"optimizer {settings.optimizer!r} is unknown; add it to make_optimizer")


@dataclass(frozen=True)
class Task:
    """A workload with the space that its runs are drawn from.

    `rates` multiplies the drawn learning rate by optimizer, where one range is not right for all.
    """

    workload: Callable[[], Workload]
    space: Mapping[str, Range]
    steps: int
    batch: int = 16
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


def rate(low: float, high: float) -> dict[str, Range]:
    """A space of learning rates."""
    return {"lr": ("log", low, high)}


def choose(name: str, *values: Any) -> dict[str, Range]:
    """A space of one choice."""
    return {name: ("choice", *values)}


SGD: dict[str, Range] = {
    "one_minus_beta1": ("log", 0.01, 0.5),
    "weight_decay": ("log", 1e-5, 1e-2),
    "warmup": ("uniform", 0.0, 0.2),
}
ADAM: dict[str, Range] = {
    "one_minus_beta1": ("log", 0.02, 0.5),
    "one_minus_beta2": ("log", 1e-3, 0.2),
    "weight_decay": ("log", 1e-4, 1.0),
    "warmup": ("uniform", 0.0, 0.2),
}
DROPOUT = choose("dropout", 0.0, 0.1, 0.3)
REGULARISED = choose("dropout", 0.0, 0.1, 0.3, 0.5) | choose("smoothing", 0.0, 0.1, 0.2)
CLIP = choose("clip", 0.3, 1.0, math.inf)
RATES = {"sgd": 0.05, "nesterov": 0.05, "adam": 3e-3, "adamw": 3e-3, "rmsprop": 1e-3, "nadam": 3e-3}
ZOO = (
    ADAM
    | {"weight_decay": ("log", 1e-5, 1e-1)}
    | choose("optimizer", *RATES)
    | rate(1e-2, 1e2)
    | choose("clip", 0.3, 1.0, 5.0, math.inf)
)

TASKS: dict[str, Task] = {
    "digits_sgd_error": Task(
        lambda: work.digits("error", 0.3),
        rate(1e-2, 1.0) | SGD | REGULARISED | choose("augment", 0, 1),
        steps=400,
        fixed={"optimizer": "nesterov"},
    ),
    "digits_adamw_loss": Task(
        lambda: work.digits("loss", 0.2),
        rate(2e-3, 1e-1) | ADAM | REGULARISED | choose("augment", 0, 1),
        steps=400,
    ),
    "clutter_steps_error": Task(
        work.clutter,
        rate(1e-2, 2.0) | SGD | REGULARISED,
        steps=300,
        fixed={"optimizer": "nesterov", "schedule": "steps"},
    ),
    "char_gru_linear_loss": Task(
        lambda: work.characters("topics", "gru"),
        rate(1e-3, 1e-1) | ADAM | DROPOUT | CLIP,
        steps=240,
        batch=8,
        fixed={"schedule": "linear"},
    ),
    "char_transformer_cosine_loss": Task(
        lambda: work.characters("topics", "transformer"),
        rate(1e-3, 1e-1) | ADAM | DROPOUT | CLIP,
        steps=320,
        batch=8,
    ),
    "source_gru_stable_loss": Task(
        lambda: work.characters("sources", "gru"),
        rate(1e-3, 1e-1) | ADAM | {"decay": ("uniform", 0.15, 0.5)} | choose("smoothing", 0.0, 0.1),
        steps=240,
        batch=8,
        fixed={"optimizer": "nadam", "schedule": "stable", "clip": 1.0},
    ),
    "translation_cosine_loss": Task(
        lambda: work.translation("loss"),
        rate(1e-3, 5e-2) | ADAM | choose("dropout", 0.0, 0.1) | choose("smoothing", 0.0, 0.1),
        steps=480,
    ),
    "translation_zoo_error": Task(
        lambda: work.translation("error"),
        ZOO | choose("schedule", "cosine", "linear", "steps"),
        steps=480,
        rates=RATES,
    ),
    "speech_linear_error": Task(
        work.speech,
        rate(1e-3, 1e-1) | ADAM | DROPOUT | CLIP,
        steps=240,
        batch=8,
        fixed={"schedule": "linear"},
    ),
    "graphs_cosine_error": Task(work.graphs, rate(1e-3, 5e-2) | ADAM | DROPOUT | CLIP, steps=480),
    "clicks_zoo_loss": Task(
        work.clicks,
        ZOO | choose("dropout", 0.0, 0.2, 0.5) | choose("schedule", "cosine", "linear", "stable"),
        steps=640,
        batch=64,
        fixed={"decay": 0.5},
        rates=RATES,
    ),
    "reconstruction_cosine_loss": Task(
        work.reconstruction, rate(1e-3, 5e-2) | ADAM | {"augment": ("uniform", 0.0, 1.0)}, steps=1000
    ),
    "table_one_cycle_error": Task(
        work.table,
        rate(1e-2, 3.0) | SGD | {"warmup": ("uniform", 0.1, 0.45)} | DROPOUT,
        steps=1000,
        fixed={"optimizer": "sgd"},
    ),
    "graphs_power_error": Task(
        work.graphs,
        rate(2e-3, 0.2)
        | {"one_minus_beta1": ("log", 1e-2, 1.0), "warmup": ("uniform", 0.0, 0.2)}
        | {"power": ("uniform", 0.1, 2.0), "decay": ("uniform", 0.3, 0.99)},
        steps=480,
        fixed={"optimizer": "nesterov", "schedule": "power"},
    ),
}


def _draw(bounds: Range, generator: np.random.Generator) -> Any:
    kind, *values = bounds
    if kind == "choice":
        return values[generator.integers(len(values))]
    low, high = values
    if kind == "log":
        return float(np.exp(generator.uniform(np.log(low), np.log(high))))
    return float(generator.uniform(low, high))


def draw(task: Task, seed: int) -> Settings:
    """A random setting of the task's space, by seed."""
    generator = np.random.default_rng(seed)
    values = dict(task.fixed) | {name: _draw(bounds, generator) for name, bounds in task.space.items()}
    values["lr"] *= task.rates.get(values.get("optimizer", ""), 1.0)
    return Settings(**values)


def describe(task: Task, settings: Settings) -> list[float]:
    """The drawn values as numbers, in the space's order; a choice as its index."""
    row: list[float] = []
    for name, (kind, *values) in task.space.items():
        value = getattr(settings, name)
        row.append(values.index(value) if kind == "choice" else value)
    return row


def names(task: Task) -> list[str]:
    """The names of `describe`'s columns; a choice's name lists its values."""
    return [
        f"{name}:{'/'.join(map(str, values))}" if kind == "choice" else name
        for name, (kind, *values) in task.space.items()
    ]


def _measure(model: nn.Module, workload: Workload) -> float:
    *inputs, target = workload.valid
    model.eval()
    with torch.inference_mode():
        value = float(workload.measure(model(*inputs), target))
    model.train()
    return value


def _step(model: nn.Module, workload: Workload, batch: list[Tensor], settings: Settings) -> float:
    """Add the gradients of one batch; its loss."""
    *inputs, target = batch
    if settings.augment > 0:
        inputs = list(workload.augment(tuple(inputs), settings.augment))
    loss = workload.loss(model(*inputs), target, settings.smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def train(task: Task, settings: Settings, seed: int) -> npt.NDArray[np.float32]:
    """Train one run; [2, 40] of the validation measure and the mean training loss since the point before."""
    workload = task.workload()
    torch.manual_seed(seed)
    model = workload.model(settings.dropout)
    flat = flatten(model)
    optimizer = make_optimizer(flat, settings)
    picks = torch.randint(len(workload.train[0]), (task.steps, task.batch))
    curves = np.full((2, POINTS), np.nan, dtype=np.float32)
    losses: list[float] = []
    for step in range(task.steps):
        optimizer.param_groups[0]["lr"] = settings.lr * rate_factor(settings, step, task.steps)
        optimizer.zero_grad(set_to_none=False)
        batch = [tensor[picks[step]] for tensor in workload.train]
        losses.append(_step(model, workload, batch, settings))
        if not math.isfinite(losses[-1]):
            break
        if settings.clip < math.inf:
            nn.utils.clip_grad_norm_([flat], settings.clip, foreach=False)
        optimizer.step()
        if (step + 1) * POINTS // task.steps > step * POINTS // task.steps:
            curves[:, step * POINTS // task.steps] = _measure(model, workload), np.mean(losses)
            losses.clear()
    return curves


def one_run(name: str, run: int) -> tuple[list[float], npt.NDArray[np.float32]]:
    """The setting and the curves of a task's run; the same wherever and in whatever order it is made."""
    torch.set_num_threads(1)
    seed = zlib.crc32(f"{name}/{run}".encode())
    task = TASKS[name]
    settings = draw(task, seed)
    return describe(task, settings), train(task, settings, seed)


def summary(valid: npt.NDArray[np.float32]) -> str:
    """One line on a task: how runs end, and how well their order at 25, 50 and 75 % shows it."""
    final = np.where(np.isfinite(valid[:, -1]), valid[:, -1], np.inf)
    known = np.where(np.isfinite(valid), valid, np.inf)
    with warnings.catch_warnings():
        # A column of equal values has no rank correlation; NaN says so.
        warnings.simplefilter("ignore")
        ranks = [spearmanr(known[:, POINTS * k // 4 - 1], final).statistic for k in (1, 2, 3)]
    winners = np.argsort(final, kind="stable")[:3]
    at_quarter = [float(np.mean(known[:, POINTS // 4 - 1] < known[w, POINTS // 4 - 1])) for w in winners]
    spread = np.quantile(final, [0, 0.1, 0.25, 0.5, 0.75], method="lower")
    overfit = np.mean(np.isfinite(final) & (final > 1.05 * known.min(1)))
    return (
        f"{' '.join(f'{v:8.4f}' for v in spread)}  {np.mean(np.isinf(final)):5.2f} {overfit:5.2f}  "
        f"{' '.join(f'{r:5.2f}' for r in ranks)}  {' '.join(f'{r:4.2f}' for r in at_quarter)}"
    )


HEADER = (
    f"{'task':28s} {'best':>8s} {'10 %':>8s} {'25 %':>8s} {'median':>8s} {'75 %':>8s}  {'lost':>5s} {'rise':>5s}  "
    f"{'r25':>5s} {'r50':>5s} {'r75':>5s}  rank of the best 3 at 25 %  seconds"
)


def make(name: str, runs: int, jobs: int, folder: Path) -> None:
    """Train a task's runs and write its file."""
    started = time.perf_counter()
    calls = [(name, run) for run in range(runs)]
    if jobs == 1:
        made = [one_run(*call) for call in calls]
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            made = pool.starmap(one_run, calls, chunksize=1)
    curves = np.stack([pair for _, pair in made])
    np.savez_compressed(
        folder / f"{name}.npz",
        valid=curves[:, 0],
        train=curves[:, 1],
        hp=np.array([row for row, _ in made]),
        hp_names=np.array(names(TASKS[name])),
    )
    print(f"{name:28s} {summary(curves[:, 0])}  {time.perf_counter() - started:18.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where <task>.npz are written")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    for name in arguments.tasks:
        make(name, arguments.runs, arguments.jobs, arguments.folder)


if __name__ == "__main__":
    main()
