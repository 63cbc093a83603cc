"""Create the first released schema: workloads, targets, environments, records, jobs and their tasks.

There is no way back: undoing it would delete every measurement.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_KEY = sa.String(64)
_TIME = sa.DateTime(timezone=True)
# A word of an enumeration; not an ENUM, so that a new word needs no migration.
_WORD = sa.String(16)


def upgrade() -> None:
    """Create all tables, those referred to first."""
    _create_environments()
    _create_signatures()
    _create_targets()
    _create_jobs()
    _create_workloads()
    _create_job_tasks()
    _create_records()


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer(), primary_key=True)


def _create_environments() -> None:
    op.create_table(
        "environments",
        _id(),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("device_kind", sa.String(32), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("arch", sa.String(64), nullable=False),
        sa.Column("driver", sa.String(64)),
        sa.Column("cuda", sa.String(64)),
        sa.Column("tvm_version", sa.String(64), nullable=False),
        sa.Column("tvm_ffi_version", sa.String(64), nullable=False),
        sa.Column("cores", sa.Integer()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environments")),
        sa.UniqueConstraint("key", name=op.f("uq_environments_key")),
    )


def _create_signatures() -> None:
    op.create_table(
        "signatures",
        _id(),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("family", sa.String(64), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_signatures")),
        sa.UniqueConstraint("key", name=op.f("uq_signatures_key")),
    )
    op.create_index(op.f("ix_signatures_family"), "signatures", ["family"])


def _create_targets() -> None:
    op.create_table(
        "targets",
        _id(),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("arch", sa.String(64), nullable=False),
        sa.Column("attributes", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_targets")),
        sa.UniqueConstraint("key", name=op.f("uq_targets_key")),
    )
    op.create_index(op.f("ix_targets_kind_arch"), "targets", ["kind", "arch"])


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_sha256", _KEY, nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("outcome", sa.Text()),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_jobs_target_id_targets")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    for column in ("model", "model_sha256", "started_at"):
        op.create_index(op.f(f"ix_jobs_{column}"), "jobs", [column])


def _create_workloads() -> None:
    op.create_table(
        "workloads",
        _id(),
        sa.Column("workload_hash", sa.String(128), nullable=False),
        sa.Column("tvm_version", sa.String(64), nullable=False),
        sa.Column("signature_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("flops", sa.Double(), nullable=False),
        sa.Column("bytes", sa.Double(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("ir_json", sa.Text()),
        sa.ForeignKeyConstraint(["signature_id"], ["signatures.id"], name=op.f("fk_workloads_signature_id_signatures")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workloads")),
        sa.UniqueConstraint("workload_hash", "tvm_version", name=op.f("uq_workloads_workload_hash_tvm_version")),
    )
    op.create_index(op.f("ix_workloads_signature_id"), "workloads", ["signature_id"])


def _create_job_tasks() -> None:
    op.create_table(
        "job_tasks",
        _id(),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("workload_id", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("onnx_nodes", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_tasks_job_id_jobs")),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.id"], name=op.f("fk_job_tasks_workload_id_workloads")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_tasks")),
        sa.UniqueConstraint("job_id", "workload_id", name=op.f("uq_job_tasks_job_id_workload_id")),
    )
    op.create_index(op.f("ix_job_tasks_workload_id"), "job_tasks", ["workload_id"])


def _create_records() -> None:
    references = {"workload_id": "workloads", "signature_id": "signatures", "target_id": "targets"}
    references |= {"environment_id": "environments", "job_id": "jobs"}
    op.create_table(
        "records",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("workload_id", sa.Integer(), nullable=False),
        sa.Column("signature_id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("route", _WORD, nullable=False),
        sa.Column("status", _WORD, nullable=False),
        sa.Column("latency_us", sa.Double()),
        sa.Column("latency_kind", _WORD, nullable=False),
        sa.Column("latencies", sa.Text(), nullable=False),
        sa.Column("registers", sa.Integer()),
        sa.Column("smem_bytes", sa.BigInteger()),
        sa.Column("spill_bytes", sa.BigInteger()),
        sa.Column("seed", sa.BigInteger()),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("decision", sa.Text(), nullable=False),
        *(
            sa.ForeignKeyConstraint([column], [f"{table}.id"], name=op.f(f"fk_records_{column}_{table}"))
            for column, table in references.items()
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_records")),
        sa.UniqueConstraint("key", name=op.f("uq_records_key")),
    )
    for by in ("workload", "signature"):
        columns = [f"{by}_id", "route", "target_id", "environment_id", "status", "latency_us"]
        op.create_index(f"ix_records_by_{by}", "records", columns)
    for column in ("created_at", "job_id", "status"):
        op.create_index(op.f(f"ix_records_{column}"), "records", [column])
