"""What the choice of the next task takes, from twenty tasks to twenty thousand; no GPU and no compiler needed.

    python -m benchmarks.tuning.bench_task_queue [--tasks 20 200 2000 20000] [--decisions 2000] [--out FILE]

Each decision is followed by what a tuning run does with it: a round is handed in, comes back with a latency, and the
task learns. A decision is `Tasks.choose`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import tvm

from relaxtune.pipeline.tasks.packed_module import PackedModule
from relaxtune.pipeline.tasks.task import TuningTask
from relaxtune.pipeline.tuning.tasks import Tasks, TaskState

_ROUND = 16
_MIN_GAIN = 1e-4


def main() -> None:
    """Print what decisions take, by the number of tasks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[20, 200, 2000, 20000])
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = [measure(count, arguments.decisions) for count in arguments.tasks]
    for one in found:
        print(json.dumps(one))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def make_states(count: int, seed: int = 0) -> list[TaskState]:
    """Return tasks with latencies and weights over three orders of magnitude, ready to be searched."""
    rng = random.Random(seed)
    packed = PackedModule.of(tvm.IRModule({}))
    task = TuningTask("task", "0", "matmul", "{}", 1, 1e6, 1e5, (), {}, {}, packed=packed)
    states = []
    for number in range(count):
        one = replace(task, name=f"task{number}", workload_hash=str(number), weight=rng.randint(1, 96))
        states.append(TaskState(one, ready=True, before_us=10 ** rng.uniform(0, 3)))
    return states


def measure(count: int, decisions: int) -> dict[str, object]:
    """Return what decisions over so many tasks take."""
    rng = random.Random(1)
    queue = Tasks(min_gain=_MIN_GAIN)
    queue.models = max(1, count // 20)
    began = time.perf_counter()
    queue.add(make_states(count))
    added_s = time.perf_counter() - began
    taken = []
    for _ in range(decisions):
        began = time.perf_counter()
        state = queue.choose()
        taken.append(time.perf_counter() - began)
        if state is None:
            break
        state.seconds += rng.uniform(0.5, 5.0)
        state.valid += _ROUND
        state.offer(None, (state.best_us or state.before_us or 1.0) * rng.uniform(0.7, 1.02))  # type: ignore[arg-type]
        state.close_round()
        queue.changed(state)
    ordered = sorted(taken)
    return {
        "tasks": count,
        "decisions": len(taken),
        "median_ms": 1e3 * statistics.median(taken),
        "p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "worst_ms": 1e3 * ordered[-1],
        "taking_all_in_ms": 1e3 * added_s,
    }


if __name__ == "__main__":
    main()
