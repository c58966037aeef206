"""Profiler: records where the time of a few optimizer steps goes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, profile, schedule

from trainer.callback import Callback, TrainerView
from trainer.checks import check_count
from trainer.distributed.ranks import rank
from trainer.files import aside_of, replacing

logger = logging.getLogger(__name__)

_RECORDING = frozenset({ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE})

# Number of rows in the table of operators.
_ROWS = 50


class Profiler(Callback):
    """Profiles a few optimizer steps of each fit with ``torch.profiler``, and writes the results to files.

    A cycle waits ``wait`` steps, runs the profiler for ``warmup`` steps without keeping anything, because its own
    start distorts the first, and records ``active`` steps; the ``repeat`` cycles begin with the fit's first step.
    Each writes two files, named by the last recorded step: ``trace-step-<step>.json`` for chrome://tracing or
    https://ui.perfetto.dev, and ``operators-step-<step>.txt``, the operators that took longest by themselves. A
    cycle that the end of the fit cuts short writes the steps it has, and what came after them. Files that can't be
    written are left out with a warning.

    A profiled step runs to the end of its last batch; with accumulated gradients it has several. A validation in
    between belongs to the step after it. A recorded step takes far longer than others, though it computes the
    same. Only a fit is profiled, of a distributed run the processes of ``ranks``; the files of another one than
    the first are called ``trace-rank-<rank>-step-<step>.json`` and so on.

    Example::

        Trainer(model, optimizer, loss, callbacks=[Profiler("profile", wait=10, active=5)])

        callbacks: {profiler: {wait: 10, active: 5}}

    Args:
        folder: Where the files go; made when the first is written.
        wait: Steps at the start of a cycle in which the profiler is off, 0 or more.
        warmup: Steps after these that are profiled but discarded, 0 or more; torch warns about 0.
        active: Steps that are recorded, at least 1. Their events are kept in memory until they are written.
        repeat: Number of cycles in a fit, at least 1.
        record_shapes: Also record the shapes of the operators' inputs, and distinguish operators by them.
        with_stack: Also record source lines.
        profile_memory: Also record memory that is allocated and freed.
        skip_first: Steps of the fit before the first cycle, 0 or more.
        cuda_sync_events: Also record where the host waits for the device, to analyse the critical path.
        ranks: Ranks of the processes that are profiled; None: all.

    Raises:
        ValueError: A number of steps or cycles is out of range, or ``ranks`` holds something else than ranks.
    """

    transient = ("_profile", "_cycles", "_step", "_recorded")

    def __init__(
        self,
        folder: Path | str,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        skip_first: int = 0,
        cuda_sync_events: bool = False,
        ranks: Sequence[int] | None = (0,),
    ) -> None:
        numbers = {"wait": (wait, 0), "warmup": (warmup, 0), "active": (active, 1), "repeat": (repeat, 1)}
        numbers |= {"skip_first": (skip_first, 0)} | {f"rank {number!r}": (number, 0) for number in ranks or ()}
        for name, (value, least) in numbers.items():
            check_count(name, value, least)
        self.folder = Path(folder)
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.repeat = repeat
        self.record_shapes = record_shapes
        self.with_stack = with_stack
        self.profile_memory = profile_memory
        self.skip_first = skip_first
        self.cuda_sync_events = cuda_sync_events
        self.ranks = None if ranks is None else tuple(ranks)
        self._sort_by = ""
        self._profile: profile | None = None
        self._cycles = 0  # cycles finished in this fit
        self._step = 0  # the latest step
        self._recorded = 0  # recorded steps of the running cycle

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start the first cycle."""
        self._sort_by = "self_cuda_time_total" if trainer.device.type == "cuda" else "self_cpu_time_total"
        self._cycles = 0
        self._step = trainer.state.step
        if self.ranks is None or rank() in self.ranks:
            self._start()

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Tell torch's profiler that a step has ended."""
        if self._profile is None or trainer.state.step == self._step:
            return
        self._step = trainer.state.step
        self._recorded += self._profile.current_action in _RECORDING
        self._profile.step()
        if self._profile.step_num == self._skipped() + self.wait + self.warmup + self.active:
            self._stop()
            self._cycles += 1
            if self._cycles < self.repeat:
                self._start()

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Stop, also after an exception, and warn if nothing was recorded."""
        if self._profile is None:
            return
        self._stop()
        if not self._cycles and not self._recorded:
            logger.warning(
                "nothing was profiled: training ended after step %d, within the first %d steps (skip_first + wait "
                "+ warmup) of the fit",
                self._step,
                self.skip_first + self.wait + self.warmup,
            )

    def _start(self) -> None:
        # One profile per cycle: with several cycles, it would keep, or warn about, the events of earlier ones.
        started = profile(
            schedule=schedule(
                skip_first=self._skipped(), wait=self.wait, warmup=self.warmup, active=self.active, repeat=1
            ),
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=self.cuda_sync_events),
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            with_stack=self.with_stack,
            profile_memory=self.profile_memory,
        )
        started.start()
        self._profile, self._recorded = started, 0

    def _skipped(self) -> int:
        """The number of steps before the running cycle that belong to no cycle."""
        return 0 if self._cycles else self.skip_first

    def _stop(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()

    def _write(self, finished: profile) -> None:
        """Write the files; torch calls this when a profile has all its steps, or is stopped earlier."""
        if not self._recorded:
            return
        process = f"rank-{rank()}-" if rank() else ""
        trace = self.folder / f"trace-{process}step-{self._step:08d}.json"
        operators = finished.key_averages(group_by_input_shape=self.record_shapes)
        table = operators.table(sort_by=self._sort_by, row_limit=_ROWS)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _export(finished, trace)
            with replacing(trace.with_name(f"operators-{process}step-{self._step:08d}.txt")) as file:
                file.write(table)
        except (OSError, RuntimeError) as error:
            logger.warning("the profile up to step %d can't be written: %s", self._step, error)
        else:
            logger.info("%d profiled steps, up to step %d, are in %s", self._recorded, self._step, trace)


def _export(finished: profile, trace: Path) -> None:
    with aside_of(trace) as aside:
        finished.export_chrome_trace(str(aside))
        if not aside.exists():  # torch reports a failure only on stderr
            aside.with_name(f"{aside.name}.tmp").unlink(missing_ok=True)
            raise OSError(f"torch could not write {trace}")
