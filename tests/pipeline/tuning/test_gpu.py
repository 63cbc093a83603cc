"""Tuning on a GPU: a search, measuring out of L2, and a candidate that breaks its CUDA context."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te

from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.tasks.extract import as_workload
from relaxtune.pipeline.tuning.local.backend import LocalBackend, this_machine
from relaxtune.pipeline.tuning.local.build_pool import BuildPool
from relaxtune.pipeline.tuning.loop import TuningLoop
from relaxtune.pipeline.tuning.measure.backend import MeasureBackend, OnCompared, OnMeasured, Outcome
from relaxtune.pipeline.tuning.measure.rotation import RotatedTimer
from relaxtune.pipeline.tuning.measure.timing import MeasureOptions
from relaxtune.pipeline.tuning.measure.workload_spec import BuiltArtifact, WorkloadSpec
from relaxtune.pipeline.tuning.options import TuningOptions
from relaxtune.pipeline.tuning.session import require_valid, tune
from relaxtune.pipeline.tuning.tasks import TaskState
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.tuning_db.records import Environment, RecordFilter, Route, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.pipeline.tuning.tuning_cases import add_one_mod, all_records, built, matmul_task, measure, spec_of, task_of

HAS_GPU = bool(tvm.cuda(0).exist)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda" if HAS_GPU else "cuda:sm_90a")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with closing(BuildPool(1, tmp_path_factory.mktemp("artifacts"))) as opened:
        yield opened


def far_mod(size: int = 64) -> tvm.ir.IRModule:
    """Return a module that reads four terabytes past its argument."""
    a = te.placeholder((size,), name="A")
    away = tvm.tirx.IntImm("int64", 1 << 40)
    return as_workload(
        te.create_prim_func([a, te.compute((size,), lambda i: a[tvm.tirx.Cast("int64", i) + away], name="C")])
    )


def build(pool: BuildPool, target: ResolvedTarget, mod: tvm.ir.IRModule) -> tuple[BuiltArtifact, WorkloadSpec]:
    return built(pool, target.target, apply_fallback(mod, target.target)), spec_of(mod)


def test_the_cases_build_without_a_gpu(pool: BuildPool, target: ResolvedTarget) -> None:
    for mod in (add_one_mod(), far_mod()):
        assert Path(str(build(pool, target, mod)[0].content)).stat().st_size > 0


class NoDevice(MeasureBackend):
    """Answers as a device would, each candidate a little faster than the one before."""

    undisturbed = True
    capacity = 1

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.count = 0

    def submit(self, artifact: BuiltArtifact, spec: WorkloadSpec, on_measured: OnMeasured) -> None:
        self.count += 1
        on_measured(Outcome(Status.OK, (1e-5 / self.count,), environment=self._environment))

    def prepare_reference(self, spec: WorkloadSpec) -> None:
        pass

    def compare(
        self, artifacts: Sequence[BuiltArtifact], spec: WorkloadSpec, rounds: int, on_compared: OnCompared
    ) -> None:
        on_compared(None)

    def close(self) -> None:
        pass


def half_matmul(size: int) -> tvm.ir.IRModule:
    a, b = (te.placeholder((size, size), "float16", name=name) for name in "AB")
    r = te.reduce_axis((0, size), name="r")
    c = te.compute(
        (size, size), lambda i, j: te.sum(a[i, r].astype("float32") * b[r, j].astype("float32"), axis=r), name="dot"
    )
    return as_workload(te.create_prim_func([a, b, te.compute((size, size), lambda i, j: c[i, j].astype("float16"))]))


@pytest.mark.slow
def test_tune_searches_and_builds_for_a_gpu_at_the_same_time(database: TuningDatabase) -> None:
    """All but the device is real: templates, searches of two tasks, NVRTC, and what it says of each kernel."""
    target = resolve_target("cuda:sm_90a")
    summary = tune(
        [task_of("half", half_matmul(128)), task_of("add", add_one_mod(size=4096))],
        target=target,
        database=database,
        environment=detect_environment(target),
        still_true=all_records,
        options=TuningOptions(trials=48, trials_per_iteration=8, population=32, workers=2, seed=1),
        machine=partial(this_machine, backend=NoDevice(detect_environment(target))),
    )
    assert {task.task.name for task in summary.tasks if task.valid} == {"half", "add"}
    assert {"search", "build", "queue", "measure"} < set(summary.seconds_by_phase)
    records = database.list_records()
    routes = Counter(record.route for record in records)
    assert routes[Route.FALLBACK] == 2
    assert routes[Route.TEMPLATE] >= 8
    assert routes[Route.METASCHEDULE] > 0
    assert routes[Route.TEMPLATE] + routes[Route.METASCHEDULE] <= 48
    # What compilation would take comes first, of every task; then what it is compared with.
    order = [record.route for record in sorted(records, key=lambda record: record.id or 0)]
    assert order.index(Route.FALLBACK) >= 2 > order.index(Route.TEMPLATE)
    assert order.index(Route.METASCHEDULE) > order.index(Route.FALLBACK)
    built = [record for record in records if record.status is Status.OK]
    assert all(record.registers is not None and record.spill_bytes is not None for record in built)
    # Its tiles are asked for at launch.
    offered = [record for record in built if record.route is Route.TEMPLATE]
    gemms = [record for record in offered if "gemm" in json.loads(record.decision)["template"]]
    assert gemms
    assert all(record.smem_bytes > 1024 for record in gemms)


@pytest.mark.slow
def test_a_near_shape_lets_every_task_begin_with_one_template(
    database: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = resolve_target("cuda:sm_90a")
    sizes = (128, 256, 512)
    wanted: list[int] = []
    round_of = TuningLoop._propose_templates

    def noted_round(rounds: TuningLoop, state: TaskState, count: int) -> None:
        wanted.append(count)
        round_of(rounds, state, count)

    monkeypatch.setattr(TuningLoop, "_propose_templates", noted_round)
    tasks = {size: task_of(f"half{size}", half_matmul(size)) for size in sizes}

    def measured(chosen: tuple[int, ...], trials: int) -> dict[int, int]:
        tune(
            [tasks[size] for size in chosen],
            target=target,
            database=database,
            environment=detect_environment(target),
            still_true=all_records,
            options=TuningOptions(trials=trials, workers=1, finals=0, routes=frozenset({Route.TEMPLATE})),
            machine=partial(this_machine, backend=NoDevice(detect_environment(target))),
        )
        records = database.list_records(RecordFilter(route=Route.TEMPLATE))
        return Counter({size: sum(r.workload_hash == tasks[size].workload_hash for r in records) for size in chosen})

    # Nothing is known yet: the first of a task's proposals bring a second.
    assert measured((128,), 2) == {128: 2}
    assert measured((256, 512), 2) == {256: 1, 512: 1}
    assert wanted == [2, 1, 1]
    # Of a task that is known nothing comes before its rounds. Its two candidates count against the trials.
    assert measured((128,), 3) == {128: 3}
    assert wanted[3:] == [4]


@pytest.mark.gpu
@needs_gpu
def test_tune_finds_valid_candidates(target: ResolvedTarget, database: TuningDatabase) -> None:
    task = matmul_task(64, 128, 64)
    summary = tune(
        [task],
        target=target,
        database=database,
        environment=detect_environment(target),
        still_true=all_records,
        options=TuningOptions(trials=4, trials_per_iteration=4, population=32, workers=2, finals=0),
    )
    require_valid(summary)
    (result,) = summary.tasks
    assert result.valid > 0
    assert result.failures.get(Status.WRONG_RESULT, 0) == 0
    records = database.list_records(RecordFilter(workload_hash=task.workload_hash))
    # What templates propose comes first; how many there are is theirs to say.
    counts = Counter(record.route for record in records)
    assert counts.pop(Route.FALLBACK) == 1
    assert counts.total() == 4
    assert counts.keys() <= {Route.TEMPLATE, Route.METASCHEDULE}


@pytest.mark.gpu
@needs_gpu
def test_a_broken_context_does_not_poison_the_next(pool: BuildPool, target: ResolvedTarget) -> None:
    options = MeasureOptions(repeats=3, contender_repeats=0, min_repeat_s=0.0005)
    with closing(LocalBackend(["cuda:0"], detect_environment(target), options, timeout_s=20.0)) as backend:
        good = build(pool, target, add_one_mod())
        outcomes = measure(backend, good, build(pool, target, far_mod()), good)
        assert backend.restarts == 1
    assert [one.status for one in outcomes] == [Status.OK, Status.RUN_ERROR, Status.OK]
    assert len(outcomes[2].seconds) == options.repeats


@pytest.mark.gpu
@pytest.mark.timing
@needs_gpu
def test_rotated_arguments_cost_more_than_warm_ones(pool: BuildPool, target: ResolvedTarget) -> None:
    """16 MiB in and out fit into L2, and take longer from memory."""
    mod = add_one_mod(size=2 << 20)
    candidate = build(pool, target, mod)
    seconds = {}
    for rotate in (True, False):
        options = MeasureOptions(rotate=rotate, contender_repeats=0)
        with closing(LocalBackend(["cuda:0"], detect_environment(target), options, timeout_s=20.0)) as backend:
            (outcome,) = measure(backend, candidate)
        assert len(outcome.seconds) == options.repeats
        seconds[rotate] = float(np.median(outcome.seconds))
    assert 1e-6 < seconds[False] < seconds[True] < 1e-3


@pytest.mark.gpu
@pytest.mark.timing
@needs_gpu
def test_the_timer_agrees_with_tvms_on_a_long_kernel(pool: BuildPool, target: ResolvedTarget) -> None:
    mod = add_one_mod(size=64 << 20)
    module = tvm.runtime.load_module(str(build(pool, target, mod)[0].content))
    device = tvm.cuda(0)
    tensors = [tvm.runtime.empty((64 << 20,), "float32", device) for _ in range(2)]
    theirs = float(module.time_evaluator("main", device, number=10, repeat=3)(*tensors).median)
    ours = float(np.median(RotatedTimer(device).time(module["main"], [tensors], 10, 3)))
    assert ours == pytest.approx(theirs, rel=0.1)
