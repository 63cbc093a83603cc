"""Requests and results of the jobs; plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.choose.graph_search import GraphReport
from relaxtune.pipeline.choose.rerank import RerankReport
from relaxtune.pipeline.choose.shipping import Shipping
from relaxtune.pipeline.tuning.options import TuningOptions, TuningSummary
from relaxtune.pipeline.validate.acceptance import NO_LIMITS, Limits
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.tuning_db.urls import DatabasePlace


@dataclass(frozen=True)
class CompileResult:
    """A written artifact."""

    #: Where it is and what it says about itself.
    directory: Path
    manifest: Manifest
    choices: tuple[KernelChoice, ...]  #: How each kernel got its schedule.
    without_record: tuple[str, ...]  #: Names of the tuning tasks that had no usable record and took the fallback.
    #: The comparison with ONNX Runtime; None where the target cannot run here or it was left out.
    validation: ValidationReport | None


@dataclass(frozen=True)
class TuneResult:
    """A tuning run and the artifact made of its records.

    `shipping` is None when it was left out, as are `rerank` and `graph`.
    `missed` is the limit that the artifact does not keep, None without one. `bucket_shipping` has what was compared of
    the shape buckets, by name; one without kernels that tuning changed is not in it.
    """

    job_id: str
    summary: TuningSummary
    compiled: CompileResult
    shipping: Shipping | None
    rerank: RerankReport | None = None
    graph: GraphReport | None = None
    missed: str | None = None
    bucket_shipping: Mapping[str, Shipping] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneRequest:
    """The request of `tune_model` without the model."""

    database: DatabasePlace  # File or URL of the tuning database; created when missing.
    tuning: TuningOptions = field(default_factory=TuningOptions)  # Budgets, seed and mode.
    # Whether the model is timed tuned and untuned, and a tuned one that is not surely faster does not ship. Without it
    # the tuned one ships, whatever it takes.
    benchmark: bool = True
    samples: int = 3  # Random inputs that the artifact is validated with.
    shared: tuple[DatabasePlace, ...] = ()  # Databases under it, by file or URL: they are read and never written.
    # Whether the artifact, its validation and its benchmark are noted in the database, as measurements always are.
    record: bool = True
    limits: Limits = NO_LIMITS  # Limits of the artifact; a limit of its latency needs `benchmark`.
    sign: Path | None = None  # The private key (PEM) that the artifact is signed with, None leaves it unsigned.
    # Seconds of the comparison of the tuned model with the untuned one; None takes 8, or a sixth of a budget.
    compare_s: float | None = None
