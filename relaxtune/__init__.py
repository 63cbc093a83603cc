"""From an ONNX transformer to a tuned, validated shared library, on Apache TVM Relax.

The words of the command line, for Python:

`tune`, `compile`
    A model to an artifact: with measuring, or from records alone.
`calibrate`
    Ranges of a model's activations, for static scales of 8 bits.
`batch`
    Many models by one plan.
`load`
    An artifact to a `Module`, whose `run` takes and returns NumPy arrays by name. Loading runs the artifact's code.
`validate`, `bench`, `compare`, `report`
    Questions about an artifact: is it right, how fast, how far from another build, where its time goes.
`gate`
    Whether an artifact may take the place of another.
`refit`
    An artifact with other weights, not compiled again.
`explain`
    Why a model's kernels are those they are: the records that were looked at.
`inspect`
    Inputs, weights, tasks and limits of a model.
`open_database`, `open_registry`
    The tuning database: records, jobs, artifacts; a store of artifacts with tags.
`load_model`, `list_models`, `random_inputs`
    ONNX models by path or zoo name, the zoo, and inputs to try them with.

Everything is imported at its first use: `import relaxtune` loads neither TVM nor ONNX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxtune.lazy import lazy_names

if TYPE_CHECKING:
    from relaxtune.api import *
    from relaxtune.pipeline.artifact.text.sentence_encoder import SentenceEncoder as SentenceEncoder

__version__ = "0.2.0"

__all__ = [
    "ArtifactError",
    "BatchEvent",
    "BatchResult",
    "BatchRun",
    "BenchRequest",
    "BenchmarkReport",
    "CalibrationRecord",
    "CallRecorder",
    "CandidateEvent",
    "CellEvent",
    "Comparison",
    "CompileResult",
    "Effort",
    "Explanation",
    "GateLimits",
    "GateReport",
    "ImportFailedError",
    "Inspection",
    "LatencyLimit",
    "LoweringError",
    "Mode",
    "ModelError",
    "ModelOptions",
    "Module",
    "NothingMeasuredError",
    "OnnxModel",
    "PipelineError",
    "RecordFilter",
    "Refit",
    "Registry",
    "Report",
    "Route",
    "Sampling",
    "ScheduleError",
    "TuneResult",
    "TuningDatabase",
    "TuningDatabaseError",
    "UsageError",
    "ValidationFailedError",
    "ValidationReport",
    "__version__",
    "batch",
    "bench",
    "calibrate",
    "compare",
    "compile",
    "explain",
    "gate",
    "inspect",
    "list_models",
    "load",
    "load_model",
    "open_database",
    "open_registry",
    "random_inputs",
    "refit",
    "report",
    "tune",
    "validate",
]


# Enough for a process that only runs artifacts; all else is in `relaxtune.api`, whose import loads TVM and ONNX.
_ERRORS = {name: "pipeline.errors" for name in __all__ if name.endswith("Error")}
_LIGHT = {
    "load": "loading",
    "Module": "pipeline.artifact.module",
    "Sampling": "pipeline.artifact.generation.generator",
    "SentenceEncoder": "pipeline.artifact.text.sentence_encoder",  # not in __all__: it needs sentence-transformers
    "ModelError": "models.errors",
    "ScheduleError": "schedules.errors",
    "TuningDatabaseError": "tuning_db.errors",
}
if not TYPE_CHECKING:  # mypy would take any name, and any module below, for one that is there
    __getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "api") | _ERRORS | _LIGHT)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
