"""The tables, as SQLAlchemy models. New databases are made of them; Alembic upgrades older ones (`sql/migrations`).

::

    signatures 1──n workloads 1──n records n──1 targets
         └───────────────────────n records n──1 environments
    jobs 1──n job_tasks n──1 workloads            jobs 1──n records (a record may have no job)
    jobs 1──n artifacts 1──n validations, benchmarks n──1 environments
    artifacts 1──n tag_moves (where a tag was set to; the last move of a tag says where it is)
    artifacts 1──n gates n──0..1 artifacts (whether an artifact may take the place of another, its baseline)
    records 1──n features (what a cost model sees of a candidate; can be computed again)
    batches 1──n cells 1──n attempts              jobs 1──n cells (the job that made the cell's artifact)

Every table with content of its own has a natural key that is unique: a sha256, or (workload_hash, tvm_version).
A record keeps the signature it was measured under, since the signature of a workload may be refined later.
Non-finite latencies are kept as NULL with their kind (`NumberKind`): neither JSON nor every dialect can hold them.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from relaxtune.tuning_db.cell_states import CellState
from relaxtune.tuning_db.records import Route, Status
from relaxtune.tuning_db.sql.column_types import NumberKind, TextEnum, UtcDateTime

#: The revision that this package writes and reads; a test holds it equal to the head of the migrations.
HEAD_REVISION = "0007"
#: Not Alembic's default name, so that a database of another application is never taken for ours.
VERSION_TABLE = "relaxtune_schema_version"
KEY_LENGTH = 64
NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


#: The condition of the index by signature, in the very words that a query repeats.
BY_SIGNATURE = text("route IN ('template', 'library')")
#: A batch that is not over.
OPEN = text("finished_at IS NULL")
_LOOKUP_ORDER = ("status", "target_id", "latency_us", "route", "environment_id")


class Base(DeclarativeBase):
    """Base of all models."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class SignatureRow(Base):
    """A semantic signature, shared by all workloads that compute the same thing."""

    __tablename__ = "signatures"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    family: Mapped[str] = mapped_column(String(64), index=True)
    signature: Mapped[str] = mapped_column(Text)


class WorkloadRow(Base):
    """A kernel to make, as one TVM version sees it."""

    __tablename__ = "workloads"
    __table_args__ = (UniqueConstraint("workload_hash", "tvm_version"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    workload_hash: Mapped[str] = mapped_column(String(128))
    tvm_version: Mapped[str] = mapped_column(String(64))
    signature_id: Mapped[int] = mapped_column(ForeignKey("signatures.id"), index=True)
    name: Mapped[str] = mapped_column(Text)
    flops: Mapped[float] = mapped_column(Double)
    bytes: Mapped[float] = mapped_column(Double)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    # Last and deferred: it may be megabytes, and only a replay reads it.
    ir_json: Mapped[str | None] = mapped_column(Text, deferred=True)


class TargetRow(Base):
    """A compilation target."""

    __tablename__ = "targets"
    __table_args__ = (Index(None, "kind", "arch"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    kind: Mapped[str] = mapped_column(String(32))
    arch: Mapped[str] = mapped_column(String(64))
    attributes: Mapped[str] = mapped_column(Text)


class EnvironmentRow(Base):
    """The machine and the versions of a measurement."""

    __tablename__ = "environments"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    device_kind: Mapped[str] = mapped_column(String(32))
    device_name: Mapped[str] = mapped_column(Text)
    arch: Mapped[str] = mapped_column(String(64))
    driver: Mapped[str | None] = mapped_column(String(64))
    cuda: Mapped[str | None] = mapped_column(String(64))
    tvm_version: Mapped[str] = mapped_column(String(64))
    tvm_ffi_version: Mapped[str] = mapped_column(String(64))
    cores: Mapped[int | None]
    schedules_version: Mapped[str | None] = mapped_column(String(64))


class JobRow(Base):
    """A run of a tuning command."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(Text, index=True)
    model_sha256: Mapped[str] = mapped_column(String(KEY_LENGTH), index=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    options: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    outcome: Mapped[str | None] = mapped_column(Text)
    code_version: Mapped[str | None] = mapped_column(Text)


class JobTaskRow(Base):
    """A task of a job."""

    __tablename__ = "job_tasks"
    __table_args__ = (UniqueConstraint("job_id", "workload_id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"), index=True)
    weight: Mapped[int]
    onnx_nodes: Mapped[str] = mapped_column(Text)
    seconds: Mapped[float] = mapped_column(Double)


class RecordRow(Base):
    """A measured, or failed, candidate."""

    __tablename__ = "records"
    __table_args__ = (
        # As unique as the key alone, which covers the time, and new rows go to its end.
        UniqueConstraint("created_at", "key"),
        # The two ways of `lookup.py`: walked in the order of latency, with all that decides inside.
        Index("ix_records_by_workload", "workload_id", *_LOOKUP_ORDER),
        Index(
            "ix_records_by_signature",
            "signature_id",
            *_LOOKUP_ORDER,
            sqlite_where=BY_SIGNATURE,
            postgresql_where=BY_SIGNATURE,
        ),
        Index(None, "status", "created_at"),
    )
    # SQLite counts rows by itself only for a plain INTEGER key, which has 64 bits there.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH))
    workload_id: Mapped[int] = mapped_column(ForeignKey("workloads.id"))
    signature_id: Mapped[int] = mapped_column(ForeignKey("signatures.id"))
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    route: Mapped[Route] = mapped_column(TextEnum(Route))
    status: Mapped[Status] = mapped_column(TextEnum(Status))
    latency_us: Mapped[float | None] = mapped_column(Double)
    latency_kind: Mapped[NumberKind] = mapped_column(TextEnum(NumberKind))
    latencies: Mapped[str] = mapped_column(Text)
    registers: Mapped[int | None]
    smem_bytes: Mapped[int | None] = mapped_column(BigInteger)
    spill_bytes: Mapped[int | None] = mapped_column(BigInteger)
    kernel_hash: Mapped[str | None] = mapped_column(String(16))
    seed: Mapped[int | None] = mapped_column(BigInteger)
    duration_s: Mapped[float] = mapped_column(Double)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    error: Mapped[str | None] = mapped_column(Text)
    decision: Mapped[str] = mapped_column(Text)
    code_version: Mapped[str | None] = mapped_column(Text)


class FeatureRow(Base):
    """A candidate's features for a cost model; deleted with its record."""

    __tablename__ = "features"
    record_id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), ForeignKey("records.id", ondelete="CASCADE"), primary_key=True
    )
    version: Mapped[str] = mapped_column(String(128), primary_key=True)
    rows: Mapped[int]
    columns: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)


class ArtifactRow(Base):
    """A compiled module."""

    __tablename__ = "artifacts"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    model: Mapped[str] = mapped_column(Text, index=True)
    model_sha256: Mapped[str] = mapped_column(String(KEY_LENGTH), index=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    location: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    manifest: Mapped[str] = mapped_column(Text)


class ValidationRow(Base):
    """A comparison of an artifact with the reference."""

    __tablename__ = "validations"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    artifact_id: Mapped[int] = mapped_column(ForeignKey("artifacts.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    passed: Mapped[bool]
    samples: Mapped[int]
    max_abs: Mapped[float | None] = mapped_column(Double)
    max_abs_kind: Mapped[NumberKind] = mapped_column(TextEnum(NumberKind))
    report: Mapped[str] = mapped_column(Text)


class BenchmarkRow(Base):
    """Latencies of an artifact, or of a peer in the same benchmark."""

    __tablename__ = "benchmarks"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    artifact_id: Mapped[int] = mapped_column(ForeignKey("artifacts.id"), index=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("environments.id"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    arm: Mapped[str] = mapped_column(String(64))
    latency_us: Mapped[float | None] = mapped_column(Double)
    latency_kind: Mapped[NumberKind] = mapped_column(TextEnum(NumberKind))
    latencies: Mapped[str] = mapped_column(Text)
    conditions: Mapped[str] = mapped_column(Text)


class BatchRow(Base):
    """A plan that was begun."""

    __tablename__ = "batches"
    __table_args__ = (
        # A plan is carried out once at a time, whoever asks.
        Index("uq_batches_open", "key", unique=True, sqlite_where=OPEN, postgresql_where=OPEN),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), index=True)
    name: Mapped[str] = mapped_column(Text)
    path: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(BigInteger)
    heartbeat_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    outcome: Mapped[str | None] = mapped_column(Text)
    plan: Mapped[str] = mapped_column(Text)


class CellRow(Base):
    """A model in one shape, in one precision, for one target, of one batch."""

    __tablename__ = "cells"
    __table_args__ = (UniqueConstraint("batch_id", "name"), Index(None, "key", "state"))
    id: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"))
    position: Mapped[int]
    name: Mapped[str] = mapped_column(Text)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH))
    source: Mapped[str] = mapped_column(Text)
    shape: Mapped[str] = mapped_column(Text)
    buckets: Mapped[str] = mapped_column(Text)
    precision: Mapped[str] = mapped_column(String(16))
    effort: Mapped[str] = mapped_column(String(16))
    target: Mapped[str] = mapped_column(Text)
    importance: Mapped[int]
    tags: Mapped[str] = mapped_column(Text)
    max_latency_ms: Mapped[float | None] = mapped_column(Double)
    rtol: Mapped[float | None] = mapped_column(Double)
    atol: Mapped[float | None] = mapped_column(Double)
    state: Mapped[CellState] = mapped_column(TextEnum(CellState))
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)
    error: Mapped[str | None] = mapped_column(Text)
    model: Mapped[str | None] = mapped_column(Text)
    artifact: Mapped[str | None] = mapped_column(Text)
    artifact_key: Mapped[str | None] = mapped_column(String(KEY_LENGTH))
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    validated: Mapped[bool | None]
    untuned_ms: Mapped[float | None] = mapped_column(Double)
    shipped_ms: Mapped[float | None] = mapped_column(Double)
    peer: Mapped[str | None] = mapped_column(String(64))
    peer_ms: Mapped[float | None] = mapped_column(Double)
    seconds: Mapped[float | None] = mapped_column(Double)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)


class AttemptRow(Base):
    """One attempt at a cell by one driver."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("cell_id", "number"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    cell_id: Mapped[int] = mapped_column(ForeignKey("cells.id"))
    number: Mapped[int]
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int] = mapped_column(BigInteger)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    heartbeat_at: Mapped[datetime] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    state: Mapped[CellState] = mapped_column(TextEnum(CellState))
    error: Mapped[str | None] = mapped_column(Text)


class TagMoveRow(Base):
    """A tag of the registry set to an artifact, or taken away."""

    __tablename__ = "tag_moves"
    __table_args__ = (UniqueConstraint("tag", "number"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tag: Mapped[str] = mapped_column(String(64))
    number: Mapped[int]
    kind: Mapped[str] = mapped_column(String(16))
    artifact_id: Mapped[int | None] = mapped_column(ForeignKey("artifacts.id"), index=True)
    by: Mapped[str] = mapped_column(Text)
    why: Mapped[str] = mapped_column(Text)
    gate: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class GateRow(Base):
    """A gate's findings on an artifact and its baseline, which older gates do not name."""

    __tablename__ = "gates"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    artifact_id: Mapped[int] = mapped_column(ForeignKey("artifacts.id"), index=True)
    baseline_id: Mapped[int | None] = mapped_column(ForeignKey("artifacts.id"), index=True)
    passed: Mapped[bool]
    by: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    report: Mapped[str] = mapped_column(Text)
