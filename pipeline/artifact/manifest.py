"""`Manifest`: what an artifact says about itself, as frozen values and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from relaxtune.models import TensorSpec
from relaxtune.pipeline.artifact.manifest_buckets import BucketEntry, BucketsEntry, PaddingEntry, parse_padding
from relaxtune.pipeline.errors import ArtifactError
from relaxtune.pipeline.precision.recorded import PolicyEntry

# Raised by one whenever an older reader would misread the directory.
FORMAT_VERSION = 1
FORMAT_NAME = "relaxtune-artifact"

MANIFEST_FILE = "manifest.json"
MODULE_FILE = "model.so"
PARAMS_FILE = "params.safetensors"


@dataclass(frozen=True)
class FileEntry:
    """Size and content hash of one file of the artifact."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class TargetEntry:
    """What the code was made for.

    Attributes
    ----------
    kind, arch
        `llvm` or `cuda`; the processor as LLVM calls it, or `sm_90a`.
    config
        The whole target, TVM's JSON text.
    cpu_features
        Instruction sets the host code may use; the loading machine must have them all.
    libraries
        Shared libraries besides TVM's runtime that must be there when it is loaded.
    cuda_graph
        Whether kernels run as a captured CUDA graph.
    """

    kind: str
    arch: str
    config: str
    cpu_features: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    cuda_graph: bool = False


@dataclass(frozen=True)
class PassEntry:
    """One pass of the lowering, in order."""

    phase: str
    name: str
    enabled: bool
    seconds: float
    bindings_removed: int
    constants_folded: int


@dataclass(frozen=True)
class ArgumentEntry:
    """A kernel's parameter.

    Attributes
    ----------
    limit
        The exclusive upper bound of an index it holds.
    hides_nothing
        The number that a mask of padding is full of when it hides nothing; None for anything else.
    partial_sums_of
        Position of the parameter whose rows it holds partial sums of.
    column_sums_of
        Position of the matrix whose columns it holds the sums of, and the axis that is summed over.
    """

    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None
    hides_nothing: int | None = None
    partial_sums_of: int | None = None
    column_sums_of: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WorkEntry:
    """What one run of a kernel does.

    Attributes
    ----------
    family
        Operator family: `matmul`, `attention`, `norm`, ...
    flops, bytes
        Arithmetic operations, and bytes read plus written with every buffer counted once.
    arguments
        Its parameters, outputs included.
    """

    family: str
    flops: float
    bytes: float
    arguments: tuple[ArgumentEntry, ...]


@dataclass(frozen=True)
class MeasuredEntry:
    """Where the record behind a kernel was measured, and what the kernel takes there; None where it was not read."""

    device: str
    registers: int | None = None
    smem_bytes: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True)
class MemoryEntry:
    """Device memory of the loaded module: storage of the static plan (None with symbolic shapes), and weights."""

    planned_bytes: int | None
    weights_bytes: int


@dataclass(frozen=True)
class DeterminismEntry:
    """Whether the artifact promises the same bits for the same inputs, on one machine, run after run.

    Attributes
    ----------
    bitwise
        The promise.
    any_threads
        Whether it holds for any number of CPU threads too; None for a GPU.
    rests_on
        What the promise rests on, or why there is none.
    """

    bitwise: bool
    any_threads: bool | None
    rests_on: tuple[str, ...]


@dataclass(frozen=True)
class KernelEntry:
    """One kernel: which ONNX nodes it computes and where it came from.

    Attributes
    ----------
    function
        Name of the PrimFunc.
    calls
        How often one inference runs it.
    onnx_nodes
        The ONNX nodes of all its calls.
    route, record_id, latency_us
        How it was made, the database record behind it, and that record's median latency.
    decision_sha256
        Hash of the record's decision, which stays checkable when the database is gone.
    note
        Why it has no record, or why a better one was passed over.
    database
        The database of the record, when several lay over each other.
    work
        What one run does; None where shapes are known only at run time.
    measured
        Device and resources of the record; None without one.
    launches
        GPU kernels that one call launches; None for a CPU.
    kernel_hash
        The scheduled kernel's own hash (`pipeline.codegen.kernel_hash`): equal in two artifacts, they hold the same
        kernel.
    """

    function: str
    calls: int
    onnx_nodes: tuple[str, ...]
    route: str
    record_id: int | None
    latency_us: float | None
    decision_sha256: str | None
    note: str = ""
    database: str | None = None
    work: WorkEntry | None = None
    measured: MeasuredEntry | None = None
    launches: int | None = None
    kernel_hash: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything an artifact says about itself.

    Attributes
    ----------
    model, source, seed
        The model's name; the path of its `.onnx` file or its zoo name; the seed of a zoo model's weights.
    model_sha256
        Content hash of the ONNX model it was compiled from.
    validation
        The report's JSON data, None before a validation.
    memory
        What it takes on the device; None in artifacts of versions that did not say.
    policy
        What weights, activations, accumulators and KV cache are held in; None where a version before did not say.
    deterministic
        Its determinism contract; None where a version before did not say.
    buckets
        Shapes that it has code of their own for, beside the symbolic one that all else is about; None without any.
    norm_rows_max
        Rows of a matmul up to which norms were taken into it; None where a version before did not say.
    """

    model: str
    source: str
    seed: int | None
    model_sha256: str
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
    validation: Mapping[str, object] | None = None
    memory: MemoryEntry | None = None
    policy: PolicyEntry | None = None
    deterministic: DeterminismEntry | None = None
    buckets: BucketsEntry | None = None
    norm_rows_max: int | None = None

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

    def with_padding(self, padding: tuple[PaddingEntry, ...]) -> Manifest:
        """Return the same manifest with what was found about padding; it has buckets."""
        if self.buckets is None:
            raise ArtifactError(f"artifact of {self.model} has no shape buckets, so nothing is padded")
        return replace(self, buckets=replace(self.buckets, padding=padding))

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
            memory=replace(memory, planned_bytes=entry.planned_bytes) if memory is not None else None,
            buckets=None,
        )

    def to_json(self) -> str:
        """Return the file's text; its last key is the hash of all the others."""
        body: dict[str, Any] = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps({**body, "manifest_sha256": _digest(body)}, indent=1, ensure_ascii=False, allow_nan=False)


def parse_manifest(text: str, where: str) -> Manifest:
    """Return the manifest of a text; `where` names the file in messages.

    Raises
    ------
    ArtifactError
        The text is not a manifest, has another format version, or was altered.
    """
    try:
        data = json.loads(text)
    except ValueError as e:
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
        return _from_data(data)
    except (KeyError, TypeError) as e:
        raise ArtifactError(f"{where} lacks what a manifest must hold ({e}); compile the model again") from e


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_data(data: dict[str, Any]) -> Manifest:
    target = dict(data["target"])
    for name in ("cpu_features", "libraries"):
        target[name] = tuple(target[name])
    return Manifest(
        model=data["model"],
        source=data["source"],
        seed=data["seed"],
        model_sha256=data["model_sha256"],
        inputs=_specs(data["inputs"]),
        outputs=_specs(data["outputs"]),
        target=TargetEntry(**target),
        precision=data["precision"],
        passes=tuple(PassEntry(**entry) for entry in data["passes"]),
        kernels=tuple(_kernel(entry) for entry in data["kernels"]),
        weights=tuple(data["weights"]),
        versions=data["versions"],
        compile_seconds=data["compile_seconds"],
        files={name: FileEntry(**entry) for name, entry in data["files"].items()},
        validation=data["validation"],
        memory=MemoryEntry(**data["memory"]) if data.get("memory") else None,
        policy=_policy(data["policy"]) if data.get("policy") else None,
        deterministic=_determinism(data["deterministic"]) if data.get("deterministic") else None,
        buckets=_buckets(data["buckets"]) if data.get("buckets") else None,
        norm_rows_max=data.get("norm_rows_max"),
    )


def _buckets(data: dict[str, Any]) -> BucketsEntry:
    entries = tuple(
        BucketEntry(
            **{
                **entry,
                "inputs": _specs(entry["inputs"]),
                "outputs": _specs(entry["outputs"]),
                "weights": tuple(entry["weights"]),
                "kernels": tuple(_kernel(kernel) for kernel in entry["kernels"]),
            }
        )
        for entry in data["entries"]
    )
    return BucketsEntry(entries, data["fills"], parse_padding(data["padding"]))


def _determinism(entry: dict[str, Any]) -> DeterminismEntry:
    return DeterminismEntry(**{**entry, "rests_on": tuple(entry["rests_on"])})


def _policy(entry: dict[str, Any]) -> PolicyEntry:
    nodes = {name: tuple(entry.get(name, ())) for name in ("quantised_nodes", "float_nodes")}
    return PolicyEntry(**{**entry, **nodes})


def _kernel(entry: dict[str, Any]) -> KernelEntry:
    work = entry.get("work")
    if work is not None:
        work = WorkEntry(**{**work, "arguments": tuple(_argument(one) for one in work["arguments"])})
    measured = MeasuredEntry(**entry["measured"]) if entry.get("measured") else None
    return KernelEntry(**{**entry, "onnx_nodes": tuple(entry["onnx_nodes"]), "work": work, "measured": measured})


def _argument(entry: dict[str, Any]) -> ArgumentEntry:
    # Versions before said no more than the limit.
    columns = entry.get("column_sums_of")
    return ArgumentEntry(
        **{**entry, "shape": tuple(entry["shape"]), "column_sums_of": None if columns is None else tuple(columns)}
    )


def _specs(entries: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"])) for entry in entries)
