"""Records of whole models, which decide how a model is compiled: graph decisions, and re-ranked kernels.

A kernel timed alone may mislead, and so may the sum of a model's kernels. Results of a tuning run in the compiled model
(`pipeline.choose.graph_search`, `pipeline.choose.rerank`) are recorded as a measurement of a workload of its own,
the model: its latencies are the model's, and its decision is what `relaxtune compile` follows. Each graph decision that
was tried is a workload, too, with the model's latencies with it, and without it in the decision.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from relaxtune.pipeline.environment import code_version, target_key
from relaxtune.tuning_db.errors import DatabaseOpenError
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.records import (
    MODEL_FAMILY,
    Environment,
    Route,
    Status,
    TargetKey,
    TuningRecord,
    Workload,
    canonical_json,
    content_key,
    utc_now,
)
from relaxtune.tuning_db.store import TuningDatabase
from relaxtune.tuning_db.winner import Preferred

if TYPE_CHECKING:
    from relaxtune.pipeline.prepare import PreparedModel

logger = logging.getLogger(__name__)

_US_PER_MS = 1e3
_LISTED = 64
_EARLIER = "measured by an earlier version"
_NORMS = {0: {"norms apart": _EARLIER}, 1 << 31: {"norms in all matmuls": _EARLIER}}


@dataclass(frozen=True)
class ModelDecision:
    """How a model is compiled."""

    # Decisions of `pipeline.passes.graph_decisions`, each with the reason for it.
    graph: Mapping[str, str] = field(default_factory=dict)
    # Workload hash -> route and decision of the kernel that is faster inside the model than the fastest one alone.
    kernels: Mapping[str, tuple[Route, str]] = field(default_factory=dict)
    untuned: bool = False  # Whether the whole model is no faster with kernels from records: it is compiled without any.
    # When; a kernel whose fastest record is newer goes by that record. None for a decision that is being made.
    made_at: datetime | None = None

    def to_json(self) -> dict[str, object]:
        """Return the decision as plain JSON data, without its time."""
        kernels = {key: [str(route), text] for key, (route, text) in self.kernels.items()}
        return {"graph": dict(self.graph), "kernels": kernels, **({"untuned": True} if self.untuned else {})}

    def preferred(self, workload_hash: str) -> Preferred | None:
        """Return the decision that the model prefers for a kernel."""
        kernel = self.kernels.get(workload_hash)
        return None if kernel is None or self.made_at is None else Preferred(*kernel, self.made_at)


@dataclass(frozen=True)
class MeasuredModel:
    """A model as the database knows it: the workload, and where its measurements are true."""

    workload: Workload
    target: TargetKey
    environment: Environment

    def with_decision(self, name: str) -> MeasuredModel:
        """Return the database's form of the experiment on a graph decision of the model."""
        key = content_key([self.workload.workload_hash, name])
        signature = canonical_json({"family": MODEL_FAMILY, "kernels": self.workload.workload_hash, "decision": name})
        workload = replace(self.workload, workload_hash=key, signature=signature, name=f"{self.workload.name}: {name}")
        return replace(self, workload=workload)

    def newest(self, database: TuningDatabase) -> TuningRecord | None:
        """Return the newest valid record that is true here, None without one."""
        question = Question(self.workload.workload_hash, self.workload.signature_key, self.target, self.environment)
        records = database.list_top(question, k=_LISTED)
        return max(records, key=lambda record: (record.created_at, record.id or 0), default=None)

    def find(self, database: TuningDatabase) -> ModelDecision | None:
        """Return the newest decision that is true here, None without one."""
        newest = self.newest(database)
        if newest is None:
            return None
        decision = read_decision(newest)
        logger.info(
            "record %s (%s) decides for the whole model: %s%s; %d re-ranked kernels",
            newest.id, newest.environment.device_name,
            "untuned kernels, since tuned ones were not surely faster; " * decision.untuned,
            ", ".join(decision.graph) or "the usual graph", len(decision.kernels),
        )  # fmt: skip
        return decision

    def record(
        self,
        database: TuningDatabase,
        decision: ModelDecision | Mapping[str, object],
        *,
        seed: int,
        job_id: str | None,
        latencies_ms: Sequence[float] = (),
        error: str | None = None,
    ) -> None:
        """Record what a model takes that is compiled by a decision (or its JSON data), or why it does not compile."""
        plain = decision.to_json() if isinstance(decision, ModelDecision) else decision
        before = self.newest(database)
        record = TuningRecord(
            workload_hash=self.workload.workload_hash,
            signature_key=self.workload.signature_key,
            target=self.target,
            environment=self.environment,
            route=Route.TEMPLATE,
            decision=canonical_json({"template": MODEL_FAMILY, **plain}),
            status=Status.OK if error is None else Status.BUILD_ERROR,
            latencies_us=tuple(ms * _US_PER_MS for ms in latencies_ms),
            error=error,
            seed=seed,
            job_id=job_id,
            code_version=code_version(),
            # The newest counts, also where a clock was set back since.
            created_at=utc_now() if before is None else max(utc_now(), before.created_at),
        )
        database.record_all(workloads=[self.workload], records=[record])


def read_decision(record: TuningRecord) -> ModelDecision:
    """Return the decision of a model's record.

    Raises `DatabaseOpenError`: it is none: the record is damaged.
    """
    try:
        plain = json.loads(record.decision)
        kernels = {key: (Route(route), str(text)) for key, (route, text) in plain["kernels"].items()}
        # Earlier versions decided about norms alone, by rows.
        graph = plain["graph"] if "graph" in plain else _NORMS.get(int(plain["norm_rows_max"]), {})
        graph = {str(name): str(reason) for name, reason in graph.items()}
        return ModelDecision(graph, kernels, plain.get("untuned") is True, record.created_at)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise damaged_record(record, e) from e


def damaged_record(record: TuningRecord, error: Exception) -> DatabaseOpenError:
    """Return the error about a record of a model that cannot be read."""
    return DatabaseOpenError(
        f"record {record.id} does not say how its model is compiled ({error}): the database is damaged. Restore it "
        f"from a copy, or remove the record: relaxtune db delete {record.id}"
    )


def measured_model(prepared: PreparedModel) -> MeasuredModel:
    """Return the database's form of a model that was lowered as its request says: it is known by its kernels."""
    import tvm  # a report reads decisions without it

    key = kernels_key(prepared)
    workload = Workload(
        workload_hash=key,
        family=MODEL_FAMILY,
        signature=canonical_json({"family": MODEL_FAMILY, "kernels": key}),
        name=prepared.model.name,
        flops=sum(task.flops * task.weight for task in prepared.tasks),
        bytes=sum(task.bytes * task.weight for task in prepared.tasks),
        ir_json=None,
        tvm_version=tvm.__version__,
    )
    return MeasuredModel(workload, target_key(prepared.target), prepared.environment)


def kernels_key(prepared: PreparedModel) -> str:
    """Return the hash of what kernels a model has, and how often it calls them."""
    tasks = sorted((task.workload_hash, task.weight) for task in prepared.tasks)
    return content_key([tasks, sorted((one.name, one.calls) for one in prepared.untunable)])
