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
    ptx_cuda
        The release of CUDA that a driver has to know, such as 13.0, to translate the PTX beside the code for a newer
        GPU; None without PTX.
    """

    kind: str
    arch: str
    config: str
    cpu_features: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    cuda_graph: bool = False
    ptx_cuda: str | None = None

    @property
    def text(self) -> str:
        """Kind and architecture as reports show them."""
        return f"{self.kind} {self.arch}{' and newer, by PTX' if self.ptx_cuda else ''}"


@dataclass(frozen=True)
class PassEntry:
    """One pass of the lowering, in order.

    Attributes
    ----------
    enabled
        False where it was switched off, or left out because it failed.
    notes
        What it reports: what it found, what it left alone and why, where numbers differ from the graph's.
    failure
        Why it was left out; "" where it did not fail.
    """

    phase: str
    name: str
    enabled: bool
    seconds: float
    bindings_removed: int
    constants_folded: int
    notes: tuple[str, ...] = ()
    failure: str = ""


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
    table
        The decision of a kernel of symbolic sizes that was made of several records; None for any other.
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
    table: str | None = None


@dataclass(frozen=True)
class RecipeEntry:
    """What the passes made of the graph, as hashes (`pipeline.artifact.recipe`): other weights must give the same.

    Attributes
    ----------
    main
        Of `main`, without the values of its constants.
    kernels
        PrimFunc -> its hash before it was scheduled.
    constants
        Place of a constant that is part of the code -> its dtype, shape and hash.
    """

    main: str
    kernels: Mapping[str, str]
    constants: Mapping[str, str]


@dataclass(frozen=True)
class BucketEntry:
    """One shape that the artifact has code of its own for.

    Attributes
    ----------
    sizes
        Symbolic axis -> size.
    file
        Its shared object.
    inputs, outputs
        Its signature.
    weights
        Its parameters after the inputs, by their names in the artifact's weights, which all shapes share.
    kernels
        As the artifact's own.
    cuda_graph
        Whether it runs as a captured CUDA graph.
    planned_bytes
        Storage of its memory plan; None when it still has symbolic axes.
    recipe
        As the artifact's own.
    """

    sizes: Mapping[str, int]
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[str, ...]
    kernels: tuple[KernelEntry, ...]
    cuda_graph: bool
    planned_bytes: int | None
    recipe: RecipeEntry | None = None

    @property
    def bucket(self) -> Bucket:
        """Its sizes."""
        return Bucket(tuple(self.sizes.items()))


@dataclass(frozen=True)
class PaddingEntry:
    """Whether calls may be padded along an axis, and how that is known.

    Attributes
    ----------
    axis
        Its name.
    side
        Where padding goes; None where it is not allowed.
    cases
        Padded calls that were compared with ONNX Runtime's answer to the same call without padding.
    required_atol
        The smallest absolute tolerance that all of them would have passed with.
    reason
        Why padding is not allowed.
    """

    axis: str
    side: Side | None
    cases: int = 0
    required_atol: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class BucketsEntry:
    """All buckets of an artifact, the smallest first.

    Attributes
    ----------
    entries
        The buckets.
    fills
        What padding of an input holds.
    padding
        The axes along which calls may be padded.
    masks
        The inputs that hide places. A row that hides all of them is a mean over every place, padding among them, so
        such a call is not padded.
    """

    entries: tuple[BucketEntry, ...]
    fills: Mapping[str, float]
    padding: tuple[PaddingEntry, ...] = ()
    masks: tuple[str, ...] = ()

    @property
    def sides(self) -> dict[str, Side]:
        """The axes along which calls may be padded, with the side."""
        return {entry.axis: entry.side for entry in self.padding if entry.side is not None}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that buckets give sizes to."""
        return tuple(dict.fromkeys(axis for entry in self.entries for axis in entry.sizes))
