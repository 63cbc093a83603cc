"""Acceptance of a written artifact: it is validated where its device is, and moves to its place or stays aside."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.directory import accept, load_manifest, rejected_place, remove_rejected
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.artifact.signature import read_signing_key, sign_artifact
from relaxtune.pipeline.validate.padding_trials import route_inputs, try_and_record
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.report import ValidationReport
from relaxtune.pipeline.validate.validation import validate

logger = logging.getLogger(__name__)

FAILED = "the artifact failed validation"


@dataclass(frozen=True)
class Limits:
    """Limits of an artifact; one that breaks them stays in `DIR.rejected`."""

    max_latency_ms: float | None = None  # Median latency of the whole model; None sets no limit.
    # By which share the model may take longer than the artifact that was accepted before; None does not compare.
    max_slowdown: float | None = None
    # Allowed differences from ONNX Runtime; None takes the table of tolerances.
    rtol: float | None = None
    atol: float | None = None


NO_LIMITS = Limits()


def check_key(sign: Path | None) -> None:
    """Refuse a key that cannot sign, before hours of work."""
    if sign is not None:
        read_signing_key(sign)


def validate_written(
    module: Module,
    directory: Path,
    model: OnnxModel,
    samples: int,
    limits: Limits = NO_LIMITS,
    lock: AbstractContextManager[object] | None = None,
    reference: Reference | None = None,
) -> ValidationReport:
    """Validate an artifact; of one with buckets, first find out where padding is allowed, then go by every route."""
    inputs = None
    if module.manifest.buckets is not None and module.manifest.generation is None:
        with lock or nullcontext():
            module = try_and_record(directory, module, model)
        inputs = route_inputs(module, model, samples=samples, seed=0)
    return validate(
        module,
        model,
        samples=samples,
        inputs=inputs,
        rtol=limits.rtol,
        atol=limits.atol,
        lock=lock,
        reference=reference,
    )


def settle(written: Path, out: Path, missed: str | None, sign: Path | None) -> Path:
    """Sign an artifact and move it to its place, or to `OUT.rejected`; return where it is.

    It was written in a folder that no other process writes to. With a reason why it is rejected (`missed`), nothing is
    signed.
    """
    if missed is not None:
        rejected = rejected_place(out)
        accept(written, rejected.absolute())
        logger.error("%s: it is in %s, and %s is as it was", missed, rejected, out)
        return rejected
    if sign is not None:
        sign_artifact(written, read_signing_key(sign))
    accept(written, out.absolute())
    remove_rejected(out, load_manifest(out).model_sha256)
    return out
