"""The parts of a manifest, as frozen values: files, target, passes, kernels, memory, shape buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relaxtune.models.buckets import Bucket, Side
from relaxtune.models.spec import TensorSpec


@dataclass(frozen=True)
class FileEntry:
    """Size and content hash of one file of the artifact."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class TargetEntry:
    """The target of the code."""

    # `llvm` or `cuda`; the processor as LLVM calls it, or `sm_90a`.
    kind: str
    arch: str
    config: str  # The whole target, TVM's JSON text.
    # Instruction sets the host code may use; the loading machine must have them all.
    cpu_features: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()  # Shared libraries besides TVM's runtime that must be there when it is loaded.
    cuda_graph: bool = False  # Whether kernels run as a captured CUDA graph.
    # The release of CUDA that a driver has to know, such as 13.0, to translate the PTX beside the code for a newer GPU;
    # None without PTX.
    ptx_cuda: str | None = None

    @property
    def text(self) -> str:
        """Kind and architecture as reports show them."""
        return f"{self.kind} {self.arch}{' and newer, by PTX' if self.ptx_cuda else ''}"


@dataclass(frozen=True)
class PassEntry:
    """One pass of the lowering, in order."""

    phase: str
    name: str
    enabled: bool  # False where it was switched off, or left out because it failed.
    seconds: float
    bindings_removed: int
    constants_folded: int
    # Its report: patterns found, patterns skipped and why, numbers that differ from the graph's.
    notes: tuple[str, ...] = ()
    failure: str = ""  # Why it was left out; "" where it did not fail.


@dataclass(frozen=True)
class ArgumentEntry:
    """A kernel's parameter."""

    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None  # The exclusive upper bound of an index it holds.
    # The number that a mask of padding is full of when it hides nothing; None for anything else.
    hides_nothing: int | None = None
    partial_sums_of: int | None = None  # Position of the parameter whose rows it holds partial sums of.
    # Position of the matrix whose columns it holds the sums of, and the axis that is summed over.
    column_sums_of: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WorkEntry:
    """The work of one run of a kernel."""

    family: str  # Operator family: `matmul`, `attention`, `norm`, ...
    # Arithmetic operations, and bytes read plus written with every buffer counted once.
    flops: float
    bytes: float
    arguments: tuple[ArgumentEntry, ...]  # Its parameters, outputs included.


@dataclass(frozen=True)
class MeasuredEntry:
    """Where the record behind a kernel was measured, and what the kernel takes there; None where it was not read."""

    device: str
    registers: int | None = None
    smem_bytes: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True)
class MemoryEntry:
    """Device memory of the loaded module: storage of the static plan (None with symbolic shapes), and weights.

    `weights_dtypes` are the dtypes of the weights, the one with most bytes first; `model_bytes` is the size of the
    weights in the ONNX model. Artifacts of earlier versions have neither.
    """

    planned_bytes: int | None
    weights_bytes: int
    weights_dtypes: tuple[str, ...] = ()
    model_bytes: int | None = None


@dataclass(frozen=True)
class DeterminismEntry:
    """Whether the artifact promises the same bits for the same inputs, on one machine, run after run."""

    bitwise: bool  # The promise.
    any_threads: bool | None  # Whether it holds for any number of CPU threads too; None for a GPU.
    rests_on: tuple[str, ...]  # Reasons for the promise, or against it.


@dataclass(frozen=True)
class KernelEntry:
    """One kernel: which ONNX nodes it computes and where it came from."""

    function: str  # Name of the PrimFunc.
    calls: int  # How often one inference runs it.
    onnx_nodes: tuple[str, ...]  # The ONNX nodes of all its calls.
    # How it was made, the database record behind it, and that record's median latency.
    route: str
    record_id: int | None
    latency_us: float | None
    decision_sha256: str | None  # Hash of the record's decision, which stays checkable when the database is gone.
    note: str = ""  # Why it has no record, or why a better one was passed over.
    database: str | None = None  # The database of the record, when several lay over each other.
    work: WorkEntry | None = None  # The work of one run; None where shapes are known only at run time.
    measured: MeasuredEntry | None = None  # Device and resources of the record; None without one.
    launches: int | None = None  # GPU kernels that one call launches; None for a CPU.
    # The scheduled kernel's own hash (`pipeline.codegen.kernel_hash`): equal in two artifacts, they hold the same
    # kernel.
    kernel_hash: str | None = None
    # The decision of a kernel of symbolic sizes that was made of several records; None for any other.
    table: str | None = None


@dataclass(frozen=True)
class RecipeEntry:
    """The lowered graph as hashes (`pipeline.artifact.recipe`): other weights must give the same."""

    main: str  # Of `main`, without the values of its constants.
    kernels: Mapping[str, str]  # PrimFunc -> its hash before it was scheduled.
    constants: Mapping[str, str]  # Place of a constant that is part of the code -> its dtype, shape and hash.


@dataclass(frozen=True)
class BucketEntry:
    """One shape that the artifact has code of its own for."""

    sizes: Mapping[str, int]  # Symbolic axis -> size.
    file: str  # Its shared object.
    # Its signature.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Its parameters after the inputs, by their names in the artifact's weights, which all shapes share.
    weights: tuple[str, ...]
    kernels: tuple[KernelEntry, ...]  # As the artifact's own.
    cuda_graph: bool  # Whether it runs as a captured CUDA graph.
    planned_bytes: int | None  # Storage of its memory plan; None when it still has symbolic axes.
    recipe: RecipeEntry | None = None  # As the artifact's own.

    @property
    def bucket(self) -> Bucket:
        """Its sizes."""
        return Bucket(tuple(self.sizes.items()))


@dataclass(frozen=True)
class PaddingEntry:
    """Whether calls may be padded along an axis, and how that is known."""

    axis: str  # Its name.
    side: Side | None  # Where padding goes; None where it is not allowed.
    cases: int = 0  # Padded calls that were compared with ONNX Runtime's answer to the same call without padding.
    required_atol: float = 0.0  # The smallest absolute tolerance that all of them would have passed with.
    reason: str = ""  # Why padding is not allowed.


@dataclass(frozen=True)
class BucketsEntry:
    """All buckets of an artifact, the smallest first."""

    entries: tuple[BucketEntry, ...]  # The buckets.
    fills: Mapping[str, float]  # Input -> the value of its padding.
    padding: tuple[PaddingEntry, ...] = ()  # The axes along which calls may be padded.
    # The inputs that hide places. A row that hides all of them is a mean over every place, padding among them, so such
    # a call is not padded.
    masks: tuple[str, ...] = ()

    @property
    def sides(self) -> dict[str, Side]:
        """The axes along which calls may be padded, with the side."""
        return {entry.axis: entry.side for entry in self.padding if entry.side is not None}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that buckets give sizes to."""
        return tuple(dict.fromkeys(axis for entry in self.entries for axis in entry.sizes))
