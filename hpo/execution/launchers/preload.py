"""Imported once by the fork server, with all that workers need, so that each starts in a fraction of a second.

Nothing here computes. A process can't be forked safely once it has started CUDA, opened a database, or run a torch
operation on several threads. If torch sees an accelerator of any kind, the first backward pass starts autograd's
device threads and marks every later fork as unable to run one. An optimizer's step asks for the current
accelerator, which starts CUDA.
"""

import gc

import hydra.errors
import hydra.utils
import sqlalchemy.dialects.mysql
import sqlalchemy.dialects.postgresql
import sqlalchemy.dialects.sqlite
import sqlalchemy.orm
import torch
import torch._dynamo
import torch.profiler
import torch.utils.data
import torch.utils.serialization.config

import hpo.execution.worker

__all__ = ["hpo", "hydra", "sqlalchemy", "torch"]


def _warm_up() -> None:
    """Construct the most common optimizer, and set up the classes of the database tables.

    Otherwise the first optimizer of each worker would import modules for a second, and its first query would set
    up the classes.
    """
    sqlalchemy.orm.configure_mappers()
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


_warm_up()
gc.collect()
# All objects that exist now stay: otherwise a collection in a worker would touch, and so copy, every shared page.
gc.freeze()
gc.enable()  # `uncollected` has disabled it
