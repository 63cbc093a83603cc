"""Latencies that no device reaches: a record that has one was never measured, or belongs to another kernel."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.tuning_db.records import TuningRecord

logger = logging.getLogger(__name__)

# The smallest CPU kernels (a row of 128 floats) take 5.5 to 9 ns where many calls are timed together (measured, 2 cores
# of a Zen 5 EPYC). An empty kernel of a CUDA graph takes 1.3 to 2.5 us on an H100 or H200.
_CALL_US = {"cpu": 0.002, "cuda": 0.5}
# About ten times what the fastest device of today does, caches and 4-bit arithmetic included. Bytes are those of all
# parameters; a gather reads a part of them only.
_BYTES_PER_US = 1e9
_FLOPS_PER_US = 1e11


def least_latency_us(task: TuningTask, device_kind: str) -> float:
    """Return microseconds that a kernel of the task takes on any device of a kind (`cpu` or `cuda`)."""
    return max(_CALL_US.get(device_kind, 0.0), task.bytes / _BYTES_PER_US, task.flops / _FLOPS_PER_US)


def believable_records(task: TuningTask, records: Sequence[TuningRecord]) -> list[TuningRecord]:
    """Return a task's records less those whose latency no device reaches; each of those is told."""
    believed = []
    for record in records:
        least_us = least_latency_us(task, record.environment.device_kind)
        if record.latency_us is None or record.latency_us >= least_us:
            believed.append(record)
            continue
        logger.warning(
            "record %s of task %s is not believed: its latency is %.3g us, and no device takes less than %.3g us. "
            "Remove it with `relaxtune db delete %s`",
            record.id, task.name, record.latency_us, least_us, record.id,
        )  # fmt: skip
    return believed
