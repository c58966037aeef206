"""Chooses the `Compute` class for a run by its optimizer, step and options."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from trainer.distributed.ranks import world_size
from trainer.step.closure import ClosureCompute
from trainer.step.compute import Compute
from trainer.step.graph import GraphedCompute
from trainer.step.manual import ManualCompute, makes_updates
from trainer.step.optimizers import Optimizers, each_of, needs_closure, shared_parameters
from trainer.step.supervised import Step


def compute_class(device: torch.device, optimizer: Optimizer, step: Step, *, cuda_graph: bool) -> type[Compute]:
    """The class that computes batches on ``device`` with this optimizer and step.

    Raises:
        ValueError: ``cuda_graph`` is set without a CUDA device, with several processes, or with a step that makes
            its own updates; or one of several optimizers that step together takes a closure, or two of them share
            a parameter.
    """
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph needs a CUDA device, and this run is on {device}: set it to false")
    if cuda_graph and world_size() > 1:
        raise ValueError(
            "cuda_graph can't record what several processes tell each other in a step: set it to false, or train "
            "in one process"
        )
    if makes_updates(step):
        if cuda_graph:
            raise ValueError("cuda_graph can't record a step that makes its own updates: set it to false")
        return ManualCompute
    if shared := shared_parameters(optimizer):
        raise ValueError(
            f"{shared}: give each parameter to one optimizer, or give a `step` that takes `update` and updates "
            "each by its name"
        )
    if cuda_graph:
        return GraphedCompute
    closures = [name for name, each in each_of(optimizer).items() if needs_closure(each)]
    if closures and isinstance(optimizer, Optimizers):
        raise ValueError(
            f"optimizer {closures[0]!r} takes a closure, and can't step together with others: give a `step` that "
            "takes `update` and updates each by its name"
        )
    return ClosureCompute if closures else Compute
