"""A long storm upon runs of several processes: each is ended by one rank, at random, and resumed.

    python benchmarks/rank_storm.py [--ranks 2] [--prunes 200] [--nans 50] [--stops 50] [--kills 50] [--seed 0]

A rank raises as a pruner does, the loss is NaN in one, a hook of one stops the run, or one is killed. After each,
all ranks that live have ended at the same batch, with the same reason, and what resumes comes to the same bits as
a run that nothing ended. The exit code is 1 if anything was otherwise. A case that takes more than a minute counts
as one that hangs, and ends the storm.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.trainer.distributed.storm import blow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    for kind, count in {"prune": 200, "nan": 50, "stop": 50, "kill": 50}.items():
        parser.add_argument(f"--{kind}s", dest=kind, type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = {kind: getattr(arguments, kind) for kind in ("prune", "nan", "stop", "kill")}
    with tempfile.TemporaryDirectory() as folder:
        storm = blow(arguments.ranks, Path(folder), counts, arguments.seed)
    print(f"{arguments.ranks} processes, load {os.getloadavg()[0]:.1f}\n")
    print("| what ends a run | runs | median s, with its resumption | longest |")
    print("|---|---|---|---|")
    for kind, seconds in storm.seconds.items():
        print(f"| {kind} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    print(f"\nfound: {len(storm.problems) or 'no'} problems")
    for problem in storm.problems:
        print(f"  {problem}")
    sys.exit(1 if storm.problems else 0)


if __name__ == "__main__":
    main()
