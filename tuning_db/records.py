"""The values that go into and come out of the tuning database.

All are frozen and detached: they hold no connection, compare by content, and may be sent to other processes. JSON
texts that take part in a key are brought to canonical form (sorted keys, no spaces) when a value is made, so that two
spellings of one thing have one key. Keys are the sha256 of canonical JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from typing import Any

from relaxtune.tuning_db.errors import InvalidRecordError

# The family of records of whole models, which are no tasks: nothing is searched for them.
MODEL_FAMILY = "model"


class Route(StrEnum):
    """How a task got its kernel."""

    METASCHEDULE = "metaschedule"
    TEMPLATE = "template"
    LIBRARY = "library"
    FALLBACK = "fallback"


class Status(StrEnum):
    """The outcome of a candidate."""

    OK = "ok"
    BUILD_ERROR = "build_error"
    RUN_ERROR = "run_error"
    TIMEOUT = "timeout"
    WRONG_RESULT = "wrong_result"


class Mode(StrEnum):
    """How a database is used: `force` measures again although there are records; both `tune` and `force` write."""

    READ_ONLY = "read-only"
    TUNE = "tune"
    FORCE = "force"


def utc_now() -> datetime:
    """Return the present time in UTC, aware."""
    return datetime.now(UTC)


# Made once: `json.dumps` makes a new one for each call with options.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: object) -> str:
    """Return the JSON text of `value` with sorted keys and no spaces; non-finite numbers are refused."""
    return _ENCODER.encode(value)


def content_key(value: object) -> str:
    """Return the sha256 of the canonical JSON of `value`, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def signature_key(signature: str) -> str:
    """Return the key of a signature, which is JSON text in any spelling."""
    return content_key(json.loads(signature))


def canonical_text(text: str, what: str) -> str:
    """Return a JSON text in canonical form.

    Raises `InvalidRecordError`: `text` is not JSON, or holds NaN or Infinity, which JSON does not have.
    """
    try:
        return canonical_json(json.loads(text))
    except (ValueError, RecursionError) as e:
        raise InvalidRecordError(
            f"{what} is not valid JSON ({e}): got {text[:120]!r}. Make it with json.dumps(..., allow_nan=False)."
        ) from e


def require_utc(moment: datetime, what: str) -> datetime:
    """Return `moment` in UTC; a naive time is refused, since its zone would be a guess."""
    if moment.tzinfo is None:
        raise InvalidRecordError(f"{what} has no time zone: got {moment!r}. Use datetime.now(UTC).")
    # `fold` has no meaning in UTC, yet it would make two equal times look different.
    return moment.astimezone(UTC).replace(fold=0)


def require_quantity(value: float, what: str) -> float:
    """Return `value` as a float; a negative or non-finite one is refused."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise InvalidRecordError(f"{what} must be a finite number of at least 0: got {value!r}.")
    return number


def clean_text(text: str) -> str:
    """Return `text` with what a database cannot hold (NUL, lone surrogates) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


_NORMAL_FORMS: Mapping[str, Callable[[Any, str], object]] = {
    "text": lambda text, _: clean_text(text),
    "json": canonical_text,
    "utc": require_utc,
    "quantity": require_quantity,
}


def normalise(value: object, **names: str) -> None:
    """Bring fields of a frozen value to what databases hold: kind (`text`, `json`, `utc`, `quantity`) -> field names.

    Raises `InvalidRecordError`: a field holds what has no such form; None stays.
    """
    for kind, fields in names.items():
        for name in fields.split():
            if (given := getattr(value, name)) is not None:
                object.__setattr__(value, name, _NORMAL_FORMS[kind](given, f"{type(value).__name__}.{name}"))


@dataclass(frozen=True)
class Environment:
    """Where a measurement is true."""

    device_kind: str  # `cpu` or `cuda`.
    device_name: str  # The product name, for instance `NVIDIA H200`.
    arch: str  # The architecture of the device: `znver4`, `sm_90a`.
    # Versions of the driver and of CUDA; None on a CPU.
    driver: str | None
    cuda: str | None
    # The versions that compiled the candidate.
    tvm_version: str
    tvm_ffi_version: str
    cores: int | None  # CPU cores the measurement could use.
    # Of earlier records, the version of the default schedules' code. It decides nothing: `kernel_hash` does.
    schedules_version: str | None = None

    @cached_property
    def key(self) -> str:
        """The sha256 of all fields that are known; the version of the schedules came later and is left out if None."""
        fields = asdict(self)
        if self.schedules_version is None:
            del fields["schedules_version"]
        return content_key(fields)


@dataclass(frozen=True)
class TargetKey:
    """The target of a kernel: kind (`llvm`, `cuda`), architecture, and all attributes as canonical JSON."""

    kind: str
    arch: str
    attributes: str = "{}"

    def __post_init__(self) -> None:
        """Bring kind and arch to lower case and the attributes to canonical JSON."""
        object.__setattr__(self, "kind", self.kind.strip().lower())
        object.__setattr__(self, "arch", self.arch.strip().lower())
        normalise(self, json="attributes")

    @cached_property
    def key(self) -> str:
        """The sha256 of kind, arch and attributes."""
        return content_key([self.kind, self.arch, json.loads(self.attributes)])


@dataclass(frozen=True)
class Workload:
    """One kernel to make."""

    # TVM's structural hash as text (`tuning_db.metaschedule.workload_hash`); true for `tvm_version` only.
    workload_hash: str
    family: str  # The operator family: `matmul`, `reduction`, ...
    signature: str  # JSON: operator family, dimensions, dtypes, epilogue. True for every TVM version.
    name: str  # For people.
    # Work and least memory traffic of one call.
    flops: float
    bytes: float
    ir_json: str | None  # The serialised IRModule (`tuning_db.metaschedule.ir_to_json`).
    tvm_version: str  # The TVM that computed `workload_hash` and wrote `ir_json`.

    def __post_init__(self) -> None:
        """Bring the signature to canonical JSON and check the quantities."""
        normalise(self, json="signature")
        object.__setattr__(self, "flops", require_quantity(self.flops, f"Workload.flops of {self.name}"))
        object.__setattr__(self, "bytes", require_quantity(self.bytes, f"Workload.bytes of {self.name}"))
        if not self.workload_hash:
            raise InvalidRecordError(f"Workload {self.name!r} has an empty workload_hash.")

    @cached_property
    def signature_key(self) -> str:
        """The sha256 of the signature."""
        return signature_key(self.signature)


@dataclass(frozen=True)
class TuningRecord:
    """One measured, or failed, candidate."""

    # The workload it was a candidate for.
    workload_hash: str
    signature_key: str
    # Where it is true.
    target: TargetKey
    environment: Environment
    route: Route  # Who made it.
    decision: str  # JSON: the trace for metaschedule, the parameters for templates and libraries.
    status: Status  # Its outcome.
    # Every raw latency in microseconds, in the order measured; may be empty when the candidate failed.
    latencies_us: tuple[float, ...] = ()
    error: str | None = None  # Why it failed.
    # Resources of the kernel where they are known.
    registers: int | None = None
    smem_bytes: int | None = None
    spill_bytes: int | None = None
    seed: int | None = None  # Of the search.
    duration_s: float = 0.0  # Of building and measuring.
    job_id: str | None = None  # The job that measured it.
    created_at: datetime = field(default_factory=utc_now)  # In UTC.
    # Its row, and the database where several lie over each other (`tuning_db.layers`); no part of a comparison.
    id: int | None = field(default=None, compare=False)
    layer: str | None = field(default=None, compare=False)
    # The measured kernel (`pipeline.codegen.kernel_hash`): a decision that makes another kernel by now is measured
    # again. None where it is not known, as in databases made before it was kept and in MetaSchedule's own files.
    kernel_hash: str | None = None
    # The relaxtune that measured it: version and, from a git checkout, commit. It decides nothing in a look-up. None
    # where it is not known, as in databases made before it was kept.
    code_version: str | None = None

    def __post_init__(self) -> None:
        """Refuse what would lie: a success without a true latency, a time without zone, a target of another device."""
        object.__setattr__(self, "route", Route(self.route))
        object.__setattr__(self, "status", Status(self.status))
        object.__setattr__(self, "latencies_us", tuple(float(value) for value in self.latencies_us))
        # By hand: a database of a million records makes a million of these.
        object.__setattr__(self, "created_at", require_utc(self.created_at, "TuningRecord.created_at"))
        object.__setattr__(self, "duration_s", require_quantity(self.duration_s, "TuningRecord.duration_s"))
        object.__setattr__(self, "decision", clean_text(self.decision))
        for name in ("error", "code_version"):
            text = getattr(self, name)
            object.__setattr__(self, name, None if text is None else clean_text(text))
        for name in ("registers", "smem_bytes", "spill_bytes", "seed"):
            if (given := getattr(self, name)) is not None and not -(2**63) <= given < 2**63:
                raise InvalidRecordError(f"TuningRecord.{name} does not fit 64 bits: got {given}.")
        true_latencies = all(math.isfinite(value) and value > 0 for value in self.latencies_us)
        if self.status is Status.OK and not (self.latencies_us and true_latencies):
            raise InvalidRecordError(
                f"A record of workload {self.workload_hash} has status ok and latencies_us={self.latencies_us}: "
                "expected at least one, all finite and above 0. Give it the status of its failure, with the error text."
            )
        expected_kind = "cuda" if self.target.kind == "cuda" else "cpu"
        if self.environment.device_kind != expected_kind:
            raise InvalidRecordError(
                f"A record of workload {self.workload_hash} has target kind {self.target.kind!r}, measured on device "
                f"kind {self.environment.device_kind!r}: expected {expected_kind!r}. Stamp it with the environment of "
                "the device that ran it."
            )

    @property
    def latency_us(self) -> float | None:
        """The median of the raw latencies; NaN when one of them is NaN, None when there is none."""
        if not self.latencies_us:
            return None
        if any(math.isnan(value) for value in self.latencies_us):
            return math.nan
        return statistics.median(self.latencies_us)

    @property
    def key(self) -> str:
        """The sha256 of all but `id` and `layer`: two equal records are one record, however often they are written."""
        raw = [value if math.isfinite(value) else repr(value) for value in self.latencies_us]
        place = [self.workload_hash, self.signature_key, self.target.key, self.environment.key]
        made = [self.route, self.decision, self.status, raw, self.error, self.seed, self.duration_s]
        resources = [self.registers, self.smem_bytes, self.spill_bytes]
        # Came later: a record without them keeps the key it had.
        kernel = [] if self.kernel_hash is None else [self.kernel_hash]
        code = [] if self.code_version is None else [{"code_version": self.code_version}]
        return content_key([*place, *made, *resources, self.job_id, self.created_at.isoformat(), *kernel, *code])


@dataclass(frozen=True)
class RecordFilter:
    """A selection of records; None selects all.

    `model` selects the records of every workload that some job found in that model, whoever measured them.
    `shape` and `dtype` are those of any input or output of the kernel. `since` is inclusive, `until` exclusive.
    """

    family: str | None = None
    model: str | None = None
    workload_hash: str | None = None
    signature_key: str | None = None
    target_kind: str | None = None
    arch: str | None = None
    device_name: str | None = None
    tvm_version: str | None = None
    route: Route | None = None
    status: Status | None = None
    job_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Bring the times to UTC."""
        normalise(self, utc="since until")


@dataclass(frozen=True)
class DatabaseInfo:
    """The contents of a database. Counts by status and by route name every member, also those with none."""

    url: str
    dialect: str
    mode: Mode
    schema_revision: str
    workloads: int
    signatures: int
    targets: int
    environments: int
    jobs: int
    artifacts: int
    validations: int
    benchmarks: int
    records: int
    records_by_status: tuple[tuple[Status, int], ...]
    records_by_route: tuple[tuple[Route, int], ...]
    size_bytes: int
