"""The `run` section of a study file: how a study is run and where it is kept; it may change between runs."""

from typing import Literal, Self

from pydantic import Field, model_validator

from hpo.config.schema_types import (
    MAX_NUMBER,
    MAX_PROCESSES,
    Agents,
    Devices,
    Duration,
    Seconds,
    Section,
    Size,
    fail,
)

#: In seconds; a worker beats at least six times in the time after which it counts as lost.
MIN_LOST_AFTER = 3


class ResourcesSection(Section):
    """What an engine gives each worker."""

    gpu: float | None = Field(
        default=None, ge=0, le=MAX_PROCESSES, description="GPUs per worker; may be a fraction.", examples=[0.5]
    )
    cpu: float | None = Field(default=None, gt=0, le=MAX_NUMBER, description="CPU cores per worker.", examples=[4])
    memory: Size = Field(default=None, description="Main memory per worker.", examples=["16GiB"])


class RunSection(Section):
    """How the study is run: workers and devices, limits, storage and folders. May change between two runs."""

    workers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PROCESSES,
        description="Worker processes on each machine; by default one per device, or per group of devices.",
        examples=[4],
    )
    devices: Devices = Field(
        default=None,
        description="Devices that the workers share. `auto`, the default: every GPU, or the CPU if there is none. "
        "With `trainer.devices: 2`, groups such as cuda:0+cuda:1,cuda:2+cuda:3.",
        examples=["auto", "cuda:0,cuda:1"],
    )
    on: str | None = Field(
        default=None,
        min_length=1,
        description="Engine that places agents on machines, with its options; by default only this machine works.",
        examples=["slurm:partition=gpu,time=4h"],
    )
    agents: Agents = Field(
        default=None,
        description="How many agents the engine places: a number, or a range.",
        examples=[4, "2..8"],
    )
    resources: ResourcesSection = Field(
        default_factory=ResourcesSection,
        description="What an engine gives each worker: GPUs (also a fraction), CPU cores, main memory.",
        examples=[{"gpu": 0.5, "cpu": 4, "memory": "16GiB"}],
    )
    timeout: Duration = Field(
        default=None,
        description='Time limit of a run: seconds, or "2h", "1h30m", "1d"; the next run resumes the study.',
        examples=["2h"],
    )
    storage: str | None = Field(
        default=None,
        min_length=1,
        description="URL of the database; by default a SQLite file in the output folder.",
        examples=["sqlite:///study.db"],
    )
    output_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for the results, relative to this file; by default `runs/` and the study's name. Each "
        "study needs its own.",
        examples=["runs/digits"],
    )
    max_retries: int = Field(
        default=3,
        ge=0,
        le=MAX_NUMBER,
        description="How often a trial is requeued after its worker died; one death more and it fails.",
        examples=[3],
    )
    trial_timeout: Duration = Field(
        default=None, description="Time limit of a trial, over all its attempts.", examples=["6h"]
    )
    no_progress_timeout: Duration = Field(
        default=None, description="End a trial that finishes no batch for this long.", examples=["30m"]
    )
    trial_memory: Size = Field(
        default=None, description="Limit on the main memory of a trial's processes.", examples=["16GiB"]
    )
    on_oom: Literal["fail", "retry_with_accumulation"] = Field(
        default="fail",
        description="What to do if a device runs out of memory: fail the trial, or resume it with half the "
        "micro-batch.",
        examples=["retry_with_accumulation"],
    )
    lost_after: Seconds = Field(
        default=60.0,
        description="Time without a sign of life after which a worker on another machine counts as dead. If two "
        "agents have different values, the longer one applies between them.",
        examples=["60s"],
    )
    background_reports: bool = Field(
        default=False,
        description="Report metrics from a separate thread; a trial may then be pruned one epoch late.",
        examples=[True],
    )
    keep_best: int = Field(
        default=5,
        ge=1,
        le=MAX_NUMBER,
        description="How many of the best complete trials keep their checkpoints after `hpo clean`.",
        examples=[5],
    )
    disk_quota: Size = Field(
        default=None,
        description="Disk space for checkpoints; a running study that needs more removes the least useful ones.",
        examples=["200GB"],
    )

    @model_validator(mode="after")
    def _beats_fit_into_the_silence(self) -> Self:
        if self.lost_after < MIN_LOST_AFTER:
            fix = f"a worker gives a sign of life several times in that time; write {MIN_LOST_AFTER} s or more"
            raise fail("is too short", fix, "lost_after")
        return self
