"""What the fork server imports once, so that each worker starts in a fraction of a second.

Nothing here starts CUDA, opens a database, or runs a torch operation on more than one thread: a process that has
done that can't be forked safely.
"""

import gc

import alembic.command
import alembic.config
import alembic.migration
import alembic.script
import optuna.storages._rdb.models
import sqlalchemy.dialects.mysql
import sqlalchemy.dialects.postgresql
import sqlalchemy.dialects.sqlite
import sqlalchemy.orm
import torch
import torch._dynamo
import torch.profiler
import torch.utils.data

import hpo.worker

__all__ = ["alembic", "hpo", "optuna", "sqlalchemy", "torch"]


def _warm_up() -> None:
    """One step of the commonest optimizer: its first construction imports a second's worth of modules."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


_warm_up()
gc.collect()
# What is here now stays: a collection in a worker would otherwise touch, and so copy, every shared page.
gc.freeze()
