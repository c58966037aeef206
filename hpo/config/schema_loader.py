"""The `loader` section of a study file: how datasets are batched."""

from typing import Literal, Self

from pydantic import Field, model_validator

from hpo.config.schema_types import MAX_NUMBER, MAX_PROCESSES, Limit, Section, TargetNode, fail


class LoaderSection(Section):
    """How datasets are batched; a DataLoader that `data` returns keeps its own settings."""

    batch_size: int = Field(
        default=32, ge=1, le=MAX_NUMBER, description="Samples per training batch.", examples=[32]
    )
    eval_batch_size: int = Field(
        default=256,
        ge=1,
        le=MAX_NUMBER,
        description="Samples per validation or test batch; it does not follow `batch_size`.",
        examples=[256],
    )
    num_workers: int = Field(
        default=0,
        ge=0,
        le=MAX_PROCESSES,
        description="Processes that load data; 0: the training process loads them itself.",
        examples=[0],
    )
    persistent_workers: bool = Field(
        default=False, description="Keep these processes alive between two passes over the data.", examples=[True]
    )
    prefetch_factor: int | None = Field(
        default=None, ge=1, le=MAX_NUMBER, description="Batches that each process loads ahead.", examples=[4]
    )
    pin_memory: bool | None = Field(
        default=None,
        description="Load batches into pinned memory; by default only if training on a GPU.",
        examples=[True],
    )
    timeout: float = Field(
        default=0,
        ge=0,
        description="Seconds to wait for a batch from one of these processes; 0: no limit.",
        examples=[60],
    )
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = Field(
        default=None, description="How to start these processes.", examples=["spawn"]
    )
    collate_fn: TargetNode | None = Field(
        default=None,
        description="Makes a batch from a list of samples.",
        examples=[{"_target_": "data.padded", "value": 0}],
    )
    drop_last: bool = Field(
        default=False,
        description="Leave out the last training batch if it is smaller than the others.",
        examples=[False],
    )
    shuffle: bool = Field(default=True, description="Shuffle the training data.", examples=[True])
    limit_train_batches: Limit = Field(
        default=None,
        description="Train on only this many batches in each pass over the data, or on this fraction of them.",
        examples=[100],
    )
    limit_val_batches: Limit = Field(
        default=None,
        description="Validate on only the first so many batches, or on this fraction of them.",
        examples=[0.25],
    )
    limit_test_batches: Limit = Field(
        default=None,
        description="Test on only the first so many batches, or on this fraction of them.",
        examples=[10],
    )
    overfit_batches: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUMBER,
        description="Train on only so many batches, the same in every pass, and validate on them too. Checks that "
        "the model can bring its loss close to 0.",
        examples=[1],
    )

    @model_validator(mode="after")
    def _with_workers(self) -> Self:
        for name in ("persistent_workers", "prefetch_factor", "timeout"):
            if getattr(self, name) and not self.num_workers:
                raise fail("needs worker processes", "write `num_workers: 2` too, or leave it out", name)
        return self
