"""The best value against seconds, on real training: what `hpo run` finds in equal wall time by several settings.

    python benchmarks/real_search.py STUDY.yaml … --seconds 60 --seeds 3 [--first-seed 0] [--workers 2]
                                     [--only NAME …] [--png FILE]

Each setting runs the same study file for the same time with the same workers; a round runs every setting once, so
that a slow moment of the machine hits all. Prints, for each study, the median over seeds of the best value at an
eighth, a quarter, half and all of the time; the share of the time that each setting needs, as the median over
seeds, to reach the median end of the best other setting; and of a scheduler the share of its trials' time that
starting, resuming and deciding take. Bounds of the file are left out: the value alone counts. The picture has the
medians against seconds.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hpo.config.spec import load_spec
from hpo.study.open_study import load_study
from hpo.study.timing import timing_of

#: What each setting changes in the study file.
SETTINGS: Mapping[str, Sequence[str]] = {
    "file": (),
    "tpe + median": ("study.sampler={name: tpe}", "study.pruner={name: median}"),
    "gp": ("study.sampler={name: gp}", "study.pruner=none"),
    "asha": ("study.sampler={name: random}", "study.pruner=none", "study.scheduler=asha"),
    "freeze_thaw": ("study.pruner=none", "study.scheduler=freeze_thaw"),
}
#: Shares of the time at which the best value is shown.
_SHARES = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        best: Seconds since the first trial began, and the best value until then, each time that it improves.
        around: The share of the trials' time outside of training; NaN without a scheduler.
    """

    best: list[tuple[float, float]]
    around: float


def run(file: Path, name: str, seed: int, arguments: argparse.Namespace, folder: Path) -> Curve:
    """One setting's best value against seconds; the time counts from the first trial's start."""
    overrides = [f"study.name={file.parent.name}", *SETTINGS[name], f"study.sampler.seed={seed}"]
    overrides += ["study.constraints={}", "study.n_trials=100000"]
    command = [sys.executable, "-m", "hpo", "run", file, *overrides, "--json"]
    command += ["--workers", arguments.workers, "--timeout", f"{arguments.seconds + arguments.start:.0f}s"]
    output = folder / f"{file.parent.name}-{name}-{seed}".replace(" ", "")
    command += ["--output-dir", output]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    if not events or events[-1]["event"] != "study_ended" or events[-1]["ending"] != "timeout":
        raise SystemExit(f"{file} with {name} has ended early: {events[-1:]}")
    better = min if load_spec(file).study.direction == "minimize" else max
    return Curve(best_so_far(events, better), around(file, [*overrides, f"run.output_dir={output}"]))


def around(file: Path, overrides: Sequence[str]) -> float:
    """The share of the trials' time outside of training."""
    opened = load_study(load_spec(file, overrides))
    timings = [timing_of(trial) for trial in opened.study.get_trials(deepcopy=False)]
    opened.storage.close()
    training, beside = (math.fsum(getattr(each, name) for each in timings) for name in ("training_s", "around_s"))
    return beside / (training + beside) if training else math.nan


def best_so_far(events: Sequence[Mapping[str, Any]], better: Any) -> list[tuple[float, float]]:
    """The best value of any epoch so far, at each improvement."""
    curve: list[tuple[float, float]] = []
    start = None
    for event in events:
        if event["event"] == "trial_started" and start is None:
            start = datetime.fromisoformat(event["time"])
        value = event.get("value") if event["event"] == "epoch_ended" else None
        if start is None or value is None:
            continue
        best = value if not curve else better(value, curve[-1][1])
        if not curve or best != curve[-1][1]:
            curve.append(((datetime.fromisoformat(event["time"]) - start).total_seconds(), best))
    return curve


def at(curve: Curve, seconds: float) -> float:
    """The best value until then; NaN before the first."""
    return next((value for when, value in reversed(curve.best) if when <= seconds), math.nan)


def reached(curve: Curve, goal: float, *, lowest: bool) -> float:
    """Seconds until a value as good as the goal; infinite if there is none."""
    good = (when for when, value in curve.best if (value <= goal if lowest else value >= goal))
    return next(good, math.inf)


def show(file: Path, curves: Mapping[str, Sequence[Curve]], seconds: float) -> None:
    """The table of one study."""
    lowest = load_spec(file).study.direction == "minimize"
    pick = min if lowest else max
    print(f"\n{file.parent.name}, {seconds:g} s\n")
    print(
        "| setting | "
        + " | ".join(f"{share:.3g}" for share in _SHARES)
        + " | time to the end of the best other | around |"
    )
    print("|---|" + "---|" * (len(_SHARES) + 2))
    ends = {name: statistics.median(at(curve, seconds) for curve in own) for name, own in curves.items()}
    for name, own in curves.items():
        cells = [f"{statistics.median(at(curve, share * seconds) for curve in own):.4f}" for share in _SHARES]
        goal = pick((end for other, end in ends.items() if other != name), default=math.nan)
        cells.append(f"{statistics.median(reached(curve, goal, lowest=lowest) for curve in own) / seconds:.2f}")
        around = statistics.median(curve.around for curve in own)
        cells.append("" if math.isnan(around) else f"{around:.0%}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def draw(found: Mapping[str, Mapping[str, Sequence[Curve]]], seconds: float, file: Path) -> None:
    """A panel for each study: the median over seeds of the best value, against seconds."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(found), figsize=(4 * len(found), 3.2), squeeze=False, layout="constrained"
    )
    times = [seconds * step / 200 for step in range(1, 201)]
    for panel, (study, curves) in zip(panels[0], found.items(), strict=True):
        for name, own in curves.items():
            panel.plot(times, [statistics.median(at(curve, when) for curve in own) for when in times], label=name)
        panel.set(title=study, xlabel="seconds", yscale="log")
    panels[0][0].set_ylabel("best value")
    panels[0][-1].legend()
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start", type=float, default=10, help="seconds beside for the start of the workers")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--png", type=Path, help="file for a picture of the curves")
    arguments = parser.parse_args()
    found: dict[str, Mapping[str, Sequence[Curve]]] = {}
    with tempfile.TemporaryDirectory(prefix="hpo-real-search-") as folder:
        for file in arguments.studies:
            curves: defaultdict[str, list[Curve]] = defaultdict(list)
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                for name in arguments.only:
                    curves[name].append(run(file, name, seed, arguments, Path(folder)))
            show(file, curves, arguments.seconds)
            found[file.parent.name] = curves
    if arguments.png is not None:
        draw(found, arguments.seconds, arguments.png)


if __name__ == "__main__":
    main()
