"""Interleaved timing: each round runs every contestant once, so that a slow moment of the machine hits all."""

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

_Name = TypeVar("_Name", bound=Hashable)
_Cost = TypeVar("_Cost")


def interleaved(contestants: Mapping[_Name, Callable[[], _Cost]], rounds: int) -> dict[_Name, list[_Cost]]:
    """What each contestant has cost in each round, after one round that does not count.

    Args:
        contestants: By name, a function that does the work once and returns its cost, such as the seconds it took.
        rounds: Rounds that count.
    """
    seconds: dict[_Name, list[_Cost]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            taken = run()
            if number:
                seconds[name].append(taken)
    return seconds


def ratios(seconds: Mapping[str, list[float]], base: str) -> dict[str, tuple[float, float, float]]:
    """Minimum, median and maximum, over the rounds, of each contestant's time ÷ the base's in the same round."""
    result = {}
    for name, times in seconds.items():
        each = [time / reference for time, reference in zip(times, seconds[base], strict=True)]
        result[name] = (min(each), statistics.median(each), max(each))
    return result


def print_table(seconds: Mapping[str, list[float]], base: str) -> None:
    """A Markdown table: median seconds, and the ratio to ``base`` as median (minimum - maximum)."""
    print("| contestant | median s | ratio | min - max |")
    print("|---|---|---|---|")
    for name, (low, middle, high) in ratios(seconds, base).items():
        print(f"| {name} | {statistics.median(seconds[name]):.3f} | {middle:.2f} | {low:.2f} - {high:.2f} |")
