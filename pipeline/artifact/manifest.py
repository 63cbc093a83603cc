"""`Manifest`: what an artifact says about itself, as frozen values and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from relaxtune.models.spec import AxisRelation, Generation, IndexLimit, TensorSpec, numpy_dtype
from relaxtune.models.unpadding import Unpadding
from relaxtune.pipeline.artifact.entries import (
    BucketEntry,
    BucketsEntry,
    DeterminismEntry,
    FileEntry,
    KernelEntry,
    MemoryEntry,
    PassEntry,
    RecipeEntry,
    TargetEntry,
)
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.precision.policy import PolicyEntry
from relaxtune.tuning_db.json_values import JsonValueError, read_value

# Raised by one whenever an older reader would misread the directory.
FORMAT_VERSION = 1
FORMAT_NAME = "relaxtune-artifact"

MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "manifest.sig"
MODULE_FILE = "model.so"
PARAMS_FILE = "params.safetensors"
ENCODER_FOLDER = "encoder"


@dataclass(frozen=True)
class Manifest:
    """Everything an artifact says about itself."""

    # The model's name; the path of its `.onnx` file or its zoo name; the seed of a zoo model's weights.
    model: str
    source: str
    seed: int | None
    model_sha256: str  # Content hash of the ONNX model it was compiled from.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    target: TargetEntry
    precision: str | None
    passes: tuple[PassEntry, ...]
    kernels: tuple[KernelEntry, ...]
    weights: tuple[str, ...]
    versions: Mapping[str, str]
    compile_seconds: Mapping[str, float]
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    validation: Mapping[str, object] | None = None  # The report's JSON data, None before a validation.
    memory: MemoryEntry | None = None  # Memory on the device; None in artifacts of older versions.
    # Dtypes of weights, activations, accumulators and KV cache; None in artifacts of older versions.
    policy: PolicyEntry | None = None
    deterministic: DeterminismEntry | None = None  # Its determinism contract; None where a version before did not say.
    # Shapes that it has code of their own for, beside the symbolic one that all else is about; None without any.
    buckets: BucketsEntry | None = None
    # Pass -> rows of a matmul up to which it acted, where a tune decided that.
    rows_max: Mapping[str, int] = field(default_factory=dict)
    # Symbolic axis -> its largest size; none for an axis without one.
    maxima: Mapping[str, int] = field(default_factory=dict)
    unpadding: Unpadding | None = None  # How padding is left out; None where it is not.
    recipe: RecipeEntry | None = None  # By which it takes other weights; None where a version before did not say.
    # Symbolic axis -> the least size with which poolings and convolutions have as many places as their windows; none
    # for an axis that may have size 1, and in artifacts of versions that did not say.
    minima: Mapping[str, int] = field(default_factory=dict)
    # Limits of axes, and of sums of them, by tables of the graph; None in artifacts of older versions.
    limits: tuple[AxisRelation, ...] | None = None
    indices: tuple[IndexLimit, ...] = ()  # Limits of inputs that are looked up in tables.
    generation: Generation | None = None  # How it generates tokens; None where it is one graph as any other.

    @property
    def model_shapes(self) -> dict[str, tuple[int | str, ...]]:
        """Shapes of the inputs of the model that it was compiled from."""
        specs = self.inputs if self.generation is None else self.generation.names.inputs
        return {spec.name: spec.shape for spec in specs}

    @property
    def needed_files(self) -> frozenset[str]:
        """Names of the files without which it cannot be loaded."""
        buckets = self.buckets.entries if self.buckets is not None else ()
        weights = {PARAMS_FILE} if self.weights or any(bucket.weights for bucket in buckets) else set()
        return frozenset({MODULE_FILE, *weights, *(bucket.file for bucket in buckets)})

    @property
    def launches(self) -> int | None:
        """GPU kernels that one inference launches, None when it is not known or runs on a CPU."""
        counts = [None if kernel.launches is None else kernel.calls * kernel.launches for kernel in self.kernels]
        return None if None in counts else sum(count for count in counts if count is not None)

    def with_files(self, files: Mapping[str, FileEntry]) -> Manifest:
        """Return the same manifest with the hashes of the written files."""
        return replace(self, files=dict(files))

    def with_validation(self, report: Mapping[str, object]) -> Manifest:
        """Return the same manifest with the result of a validation."""
        return replace(self, validation=dict(report))

    def of_bucket(self, entry: BucketEntry) -> Manifest:
        """Return what the manifest would be of one bucket alone."""
        memory = self.memory
        return replace(
            self,
            inputs=entry.inputs,
            outputs=entry.outputs,
            kernels=entry.kernels,
            weights=entry.weights,
            target=replace(self.target, cuda_graph=entry.cuda_graph),
            recipe=entry.recipe,
            memory=replace(memory, planned_bytes=entry.planned_bytes) if memory is not None else None,
            buckets=None,
        )

    def to_json(self) -> str:
        """Return the file's text; its last key is the hash of all the others."""
        body: dict[str, Any] = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**body, "manifest_sha256": _digest(body)}, indent=1, ensure_ascii=False, allow_nan=False)


def parse_manifest(text: str, where: str) -> Manifest:
    """Return the manifest of a text; `where` names the file in messages.

    Raises `ArtifactError`: the text is not a manifest, has another format version, or was altered.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
        text.encode()  # no lone surrogates, which JSON can name
        json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"{where} is not valid JSON ({e}); the artifact is damaged, compile it again") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT_NAME:
        raise ArtifactError(f'{where} is not the manifest of an artifact (no "format": "{FORMAT_NAME}")')
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{where} has format version {version!r}, this relaxtune reads version {FORMAT_VERSION}; "
            "compile the model again, or load it with the relaxtune that wrote it (see its key versions.relaxtune)"
        )
    expected = data.pop("manifest_sha256", None)
    if _digest(data) != expected:
        raise ArtifactError(
            f"{where} was changed after it was written: its content has sha256 {_digest(data)}, it states {expected}; "
            "compile the model again"
        )
    try:
        manifest = read_value(Manifest, data)
    except JsonValueError as e:
        raise ArtifactError(f"{where}: {e}. The artifact is damaged; compile it again") from e
    for spec in (*manifest.inputs, *manifest.outputs):
        try:
            numpy_dtype(spec.dtype)
        except TypeError as e:
            raise ArtifactError(f"{where}: {spec.name}: no dtype is called {spec.dtype!r}; compile it again") from e
    return manifest


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
