"""GraphedCompute: runs forward, backward and optimizer step of a batch as one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainer.callback import Callback
from trainer.data.moving import map_batch, map_tensors, tensors_in
from trainer.runner import hook_of
from trainer.step.compute import Compute
from trainer.step.supervised import StepResult

#: The events of the actions inside the graph, in order.
_INSIDE: Final = tuple(
    f"on_{moment}_{action}"
    for action in ("zero_grad", "forward", "backward", "optimizer_step")
    for moment in ("before", "after")
)
# Batches that run as usual before the capture, in which libraries initialise and the optimizer makes its state.
_WARM_UP: Final = 3
# Batches in a row with changed optimizer settings after which a warning says that the graph has no effect.
_MANY_CHANGES: Final = 10

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
_Shapes = list[tuple[torch.Size, torch.dtype]]


def _numbers(shapes: _Shapes) -> int:
    return sum(shape.numel() for shape, _ in shapes)


def cuda_capture(work: Callable[[], None]) -> Callable[[], None]:
    """Record the kernels that ``work`` launches; the returned function launches them again."""
    graph = torch.cuda.CUDAGraph()
    first: Exception | None = None
    try:
        # A stream of the current device; torch's default is that of the process's first recording.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            try:
                work()
            except Exception as error:
                first = error
                raise
    except Exception:
        # If ``work`` fails, the recording can't be ended, and raises an error that hides the one of ``work``.
        if first is None:
            raise
        raise first from None
    finally:
        first = None  # the error's traceback keeps the objects of ``work`` alive
    return graph.replay


class GraphedCompute(Compute):
    """Replays one recorded step for each batch, which saves a small model the time to launch each kernel.

    The first batches run as usual, then a batch of their largest shape is recorded. A batch of another shape, or
    one of which a hook skips an action, runs as usual. Hooks inside the step are called after it and so may only
    look: callbacks with such hooks that are not ``graph_safe`` are refused. The learning rate becomes a float32
    tensor that each replay reads anew. The other settings of the optimizer are fixed in the recording: if one
    changes, such as the momentum by a scheduler, batches run as usual until it stops changing; then the step is
    recorded anew.

    Args:
        capture: Records a function's work and returns a function that replays it.
    """

    capture: Capture = staticmethod(cuda_capture)

    def prepare(self, callbacks: Iterable[Callback]) -> None:
        """Bring the optimizer into a form that can be recorded.

        Raises:
            ValueError: A callback acts inside the step, or the optimizer or the precision can't be recorded.
        """
        _check(callbacks, self._trainer.optimizer)
        if self._precision.kind == "fp16":
            raise ValueError("cuda_graph can't record the loss scaling of fp16: use precision 'bf16' or 'fp32'")
        make_capturable(self._trainer.optimizer, self._trainer.device)
        self._rates = _rates(self._trainer.optimizer)
        self._settings: list[dict[str, Any]] = []
        self._warm = self._changes = 0
        self._seen: list[_Shapes] = []  # shapes of the latest batches that ran as usual
        self._drop_recording()

    def _drop_recording(self) -> None:
        """Forget the recording and free its memory."""
        self._replay: Callable[[], None] | None = None
        self._shapes: _Shapes = []
        self._batch: Any = None
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._result: StepResult | None = None

    def _run(self, batch: Any) -> None:
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors_in(batch)]
        changed = self._have_settings_changed()
        # Record the largest shape of the latest batches: the last batch of a pass may be smaller than the others.
        fits = shapes == (max(self._seen, key=_numbers, default=[]) if self._replay is None else self._shapes)
        if self._trainer.state.skips or self._warm < _WARM_UP or changed or not fits:
            self._warm += 1
            self._seen = [*self._seen, shapes][-_WARM_UP:]
            self._run_plainly(batch)
            return
        if self._replay is None:
            self._record_graph(batch, shapes)
        self._replay_graph(batch)

    def _have_settings_changed(self) -> bool:
        """Whether the optimizer's settings changed since the previous batch; if so, the recording is dropped."""
        optimizer = self._trainer.optimizer
        self._keep_rates()
        changed = _changed(self._settings, optimizer)
        if not changed:
            self._changes = 0
            return False
        self._drop_recording()
        make_capturable(optimizer, self._trainer.device)  # for new groups and state
        self._rates, self._settings = _rates(optimizer), _settings_of(optimizer)
        self._changes += 1
        if self._changes == _MANY_CHANGES:
            logger.warning(
                "cuda_graph has no effect while %s of the optimizer changes with each batch: keep it as it is "
                "(OneCycleLR with cycle_momentum=False), or set cuda_graph to false",
                " and ".join(sorted(changed)),
            )
        return True

    def _keep_rates(self) -> None:
        """Copy learning rates that were replaced into the tensors that the recorded step reads."""
        for group, rate in zip(self._trainer.optimizer.param_groups, self._rates, strict=False):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    def _forward(self) -> StepResult:
        result = super()._forward()
        if not result.fixed:
            raise ValueError(
                "cuda_graph records the step once, and a weight that it returns as a number would never change: "
                "return a tensor, such as mask.sum()"
            )
        return result

    def _run_plainly(self, batch: Any) -> None:
        """Run as without a graph, but on a side stream, as torch requires before a capture."""
        device = self._trainer.device
        if device.type != "cuda":
            super()._run(batch)
            return
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            super()._run(batch)
        torch.cuda.current_stream(device).wait_stream(stream)

    def _record_graph(self, batch: Any, shapes: _Shapes) -> None:
        state = self._trainer.state
        self._shapes = shapes
        self._batch = map_batch(torch.clone, batch)
        self._clear_gradients()
        results: list[StepResult] = []

        def work() -> None:
            state.batch = self._batch
            results.append(self._forward())
            self._backward()
            with torch.no_grad():
                self._take_step()

        self._replay = self.capture(work)
        self._result = results[0]
        parameters = [item for group in self._trainer.optimizer.param_groups for item in group["params"]]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]

    def _replay_graph(self, batch: Any) -> None:
        for static, tensor in zip(tensors_in(self._batch), tensors_in(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        self._count_step(lambda: self._replayed(batch))

    def _replayed(self, batch: Any) -> None:
        state, fire, result = self._trainer.state, self._trainer.fire, self._result
        assert self._replay is not None
        assert result is not None
        self._replay()
        self._updated = self._recorded = True
        # Each replay overwrites the same tensors, so the state gets copies.
        state.loss, state.outputs, state.batch = result.loss.clone(), result.outputs, batch
        if self._trainer.recorder.objects:
            state.outputs = map_tensors(torch.clone, result.outputs)
        state.weight = _copied(result.weight)
        extra = {name: _copied(value) for name, value in result.extra.items()}
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        state.scalars = extra
        self._record("train", extra)
        for event in _INSIDE:
            fire(event)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _check(callbacks: Iterable[Callback], optimizer: Optimizer) -> None:
    acting = [
        callback.name
        for callback in callbacks
        if not callback.graph_safe and any(hook_of(callback, event) for event in _INSIDE)
    ]
    if acting:
        raise ValueError(
            f"cuda_graph runs forward, backward and optimizer step in one go, but {', '.join(acting)} acts "
            "inside: leave it out, or set cuda_graph to false"
        )
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise ValueError(
            f"cuda_graph can't record {type(optimizer).__name__}: use SGD, Adam or AdamW, "
            "or set cuda_graph to false"
        )


def _rates(optimizer: Optimizer) -> list[Tensor]:
    return [group["lr"] for group in optimizer.param_groups]


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings that a recording fixes: each group, then the state of its first parameter."""
    return [dict(each) for group in optimizer.param_groups for each in (group, _first_state(optimizer, group))]


def _first_state(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    return optimizer.state.get(group["params"][0], {}) if group["params"] else {}


def _changed(before: list[dict[str, Any]], optimizer: Optimizer) -> set[str]:
    """Names of the settings that differ from before; copies nothing, as each batch asks it."""
    groups = optimizer.param_groups
    if len(before) != 2 * len(groups):
        return {"the groups"}
    found = set()
    for index, group in enumerate(groups):
        for old, now in ((before[2 * index], group), (before[2 * index + 1], _first_state(optimizer, group))):
            for key, value in now.items():
                if value is not old.get(key) and not _is_same(old.get(key), value):
                    found.add(key)
    return found


def _is_same(old: Any, new: Any) -> bool:
    """Whether two distinct objects are equal settings; tensors and the list of parameters never are."""
    places = (Tensor, list)
    return not isinstance(old, places) and not isinstance(new, places) and bool(old == new)


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Keep steps and learning rates on the device, where a recorded step reads them anew each time."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)
