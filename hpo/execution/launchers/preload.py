"""What the fork server imports once, so that each worker starts in a fraction of a second.

Nothing here computes. A process can't be forked safely once it has started CUDA, opened a database, or run a torch
operation on several threads; and where torch sees an accelerator of any kind, the first backward pass starts
autograd's device threads and marks every later fork as unable to run one. An optimizer's step asks for the current
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
    """Construct the commonest optimizer, and set up the tables' classes.

    The first construction imports a second's worth of modules, and the first question to the classes sets them up.
    """
    sqlalchemy.orm.configure_mappers()
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


_warm_up()
gc.collect()
# What is here now stays: a collection in a worker would otherwise touch, and so copy, every shared page.
gc.freeze()
gc.enable()  # `uncollected` has switched it off
