"""The ONNX model of an artifact, and how two builds of one model differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.axis_profile import sizes_within
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import UsageError
from relaxtune.pipeline.validate.comparison import Comparison, compare_manifests, compare_outputs
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.validation import DEFAULT_SAMPLES, sample_inputs

Arrays = Mapping[str, np.ndarray]


def reference_model(module: Module, source: str | Path | None = None) -> OnnxModel:
    """Return the ONNX model that a loaded artifact was compiled from; see `manifest_model`."""
    return manifest_model(module.manifest, source)


def manifest_model(manifest: Manifest, source: str | Path | None = None) -> OnnxModel:
    """Return the ONNX model that an artifact was compiled from, at the artifact's shapes.

    `source` is where the model is now; None looks where it was.
    Raises `UsageError`: this is another model.
    """
    model = load_model(source or manifest.source, shapes=manifest.model_shapes, seed=manifest.seed or 0)
    if model.sha256 != manifest.model_sha256:
        raise UsageError(
            f"{source or manifest.source} is not the model this artifact was compiled from: expected sha256 "
            f"{manifest.model_sha256}, got {model.sha256}. Name that model with --model, or compile this one"
        )
    return model


def compare_builds(
    first: Path | Arrays,
    second: Path | Arrays,
    *,
    names: tuple[str, str] | None = None,
    inputs: Arrays | Sequence[Arrays] | None = None,
    source: str | Path | None = None,
    samples: int = DEFAULT_SAMPLES,
    seed: int = 0,
    exact: bool = False,
    tolerance: Tolerance | None = None,
) -> Comparison:
    """Return how two builds of a model differ.

    A side is an artifact's directory, or the outputs that a build gave elsewhere; `names` are theirs in the report.
    Artifacts run on `inputs`, one call or several, or on `samples` random ones if both sides are artifacts. Without
    `exact` and `tolerance` every difference passes. `source` is the ONNX model, where it is not where the first
    artifact says.
    Raises `UsageError`: one side are outputs, and their inputs are not given.
    """
    modules = [Module.load(side) if isinstance(side, Path) else None for side in (first, second)]
    a, b = modules
    shown = names or (str(first) if a else "outputs", str(second) if b else "outputs")
    given: Sequence[Arrays] = []
    if inputs is not None:
        given = [inputs] if isinstance(inputs, Mapping) else inputs
    elif a is not None and b is not None:
        model = reference_model(a, source)
        sizes = sizes_within(model, {**b.manifest.maxima, **a.manifest.maxima})
        given = sample_inputs(model, samples=samples, seed=seed, dims=sizes)
    elif a is not None or b is not None:
        raise UsageError(
            f"{shown[0] if a is None else shown[1]} holds outputs, and their inputs are not given; give those that "
            "it was run on with --inputs X.npz"
        )
    outputs = [
        [module.run(sample) for sample in given] if module is not None else [side]
        for side, module in zip((first, second), modules, strict=True)
    ]
    limit = "no bit" if exact else ""
    if tolerance is not None and not exact:
        limit = f"rtol {tolerance.rtol:g} and atol {tolerance.atol:g} x RMS"
    drift = compare_outputs(outputs[0], outputs[1], exact=exact, tolerance=None if exact else tolerance)  # type: ignore[arg-type]
    kernels, builds = compare_manifests(a.manifest, b.manifest) if a is not None and b is not None else ((), ())
    return Comparison(*shown, drift, kernels, builds, limit)
