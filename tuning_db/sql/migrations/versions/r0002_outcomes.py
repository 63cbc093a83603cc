"""Keep artifacts, validations and benchmarks; index records for a million of them.

Indices of `records`, and why (SQLite, a million records):

- The natural key becomes (created_at, key) instead of key: as unique as before, since the key covers the time, but new
  rows go to the end of the index instead of a random page each. It also serves questions by time.
- Look-ups walk one index in the order of latency and stop at the k-th hit; the route and the environment are in it, so
  rows that do not fit are passed over without being read.
- Only templates and libraries are found by signature, so only they are in that index.

There is no way back: undoing it would delete what was recorded since.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_KEY = sa.String(64)
_TIME = sa.DateTime(timezone=True)
_WORD = sa.String(16)
_BY_SIGNATURE = sa.text("route IN ('template', 'library')")


def upgrade() -> None:
    """Change the indices, then add the tables."""
    _index_records()
    _create_artifacts()
    _create_validations()
    _create_benchmarks()


def _index_records() -> None:
    for name in ("ix_records_by_workload", "ix_records_by_signature", "ix_records_created_at", "ix_records_status"):
        op.drop_index(name, "records")
    with op.batch_alter_table("records") as batch:
        batch.drop_constraint("uq_records_key", type_="unique")
        batch.create_unique_constraint("uq_records_created_at_key", ["created_at", "key"])
    order = ["status", "target_id", "latency_us", "route", "environment_id"]
    op.create_index("ix_records_by_workload", "records", ["workload_id", *order])
    op.create_index(
        "ix_records_by_signature",
        "records",
        ["signature_id", *order],
        sqlite_where=_BY_SIGNATURE,
        postgresql_where=_BY_SIGNATURE,
    )
    op.create_index(op.f("ix_records_status_created_at"), "records", ["status", "created_at"])


def _create_artifacts() -> None:
    op.create_table(
        "artifacts",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_sha256", _KEY, nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_artifacts_target_id_targets")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_artifacts_job_id_jobs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint("key", name=op.f("uq_artifacts_key")),
    )
    for column in ("model", "model_sha256", "job_id", "created_at"):
        op.create_index(op.f(f"ix_artifacts_{column}"), "artifacts", [column])


def _of_artifact(table: str, *columns: sa.Column[object]) -> None:
    op.create_table(
        table,
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("key", _KEY, nullable=False),
        sa.Column("artifact_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        *columns,
        sa.ForeignKeyConstraint(["artifact_id"], ["artifacts.id"], name=op.f(f"fk_{table}_artifact_id_artifacts")),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["environments.id"], name=op.f(f"fk_{table}_environment_id_environments")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{table}")),
        sa.UniqueConstraint("key", name=op.f(f"uq_{table}_key")),
    )
    for column in ("artifact_id", "created_at"):
        op.create_index(op.f(f"ix_{table}_{column}"), table, [column])


def _create_validations() -> None:
    _of_artifact(
        "validations",
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("max_abs", sa.Double()),
        sa.Column("max_abs_kind", _WORD, nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
    )


def _create_benchmarks() -> None:
    _of_artifact(
        "benchmarks",
        sa.Column("arm", sa.String(64), nullable=False),
        sa.Column("latency_us", sa.Double()),
        sa.Column("latency_kind", _WORD, nullable=False),
        sa.Column("latencies", sa.Text(), nullable=False),
        sa.Column("conditions", sa.Text(), nullable=False),
    )
