from __future__ import annotations

import dataclasses
import logging
import sys
from types import ModuleType

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from relaxtune.tuning_db.errors import InvalidRecordError
from relaxtune.tuning_db.layers import LayeredDatabase
from relaxtune.tuning_db.metaschedule import (
    MetaScheduleAdapter,
    describe_unknown,
    ir_to_json,
    is_failure,
    replay_decision,
    trace_to_json,
    workload_hash,
)
from relaxtune.tuning_db.records import Mode, RecordFilter, Status
from relaxtune.tuning_db.store import TuningDatabase
from tests.tuning_db.metaschedule.matmul_case import SIZE, TARGET, TRIALS, matmul, split, stock_record


@derived_object
class InProcessBuilder(ms.builder.PyBuilder):
    """Builds to files in this process; the third candidate is made to fail."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.count = 0

    def build(self, build_inputs):
        results = []
        for build_input in build_inputs:
            self.count += 1
            if self.count == 3:
                results.append(ms.builder.BuilderResult(None, "made to fail"))
                continue
            # MetaSchedule deletes the folder of an artifact when it has been measured.
            path = str(self.folder / str(self.count) / "candidate.so")
            (self.folder / str(self.count)).mkdir()
            tvm.compile(build_input.mod, target=build_input.target).export_library(path)
            results.append(ms.builder.BuilderResult(path, None))
        return results


@derived_object
class Done(ms.runner.PyRunnerFuture):
    def __init__(self, run_secs):
        super().__init__()
        self.run_secs = run_secs

    def done(self):
        return True

    def result(self):
        return ms.runner.RunnerResult(self.run_secs, None)


@derived_object
class InProcessRunner(ms.runner.PyRunner):
    def run(self, runner_inputs):
        futures = []
        for runner_input in runner_inputs:
            arrays = [tvm.runtime.tensor(np.ones((SIZE, SIZE), "float32")) for _ in range(3)]
            module = tvm.runtime.load_module(str(runner_input.artifact_path))
            timer = module.time_evaluator("main", tvm.cpu(), number=2, repeat=3)
            futures.append(Done([float(value) for value in timer(*arrays).results]))
        return futures


def tiled(schedule: tvm.s_tir.Schedule) -> None:
    """Tile the rows and columns by sampled factors: a space that is quick to search."""
    block = schedule.get_sblock("C")
    i, j, k = schedule.get_loops(block)
    i0, i1 = schedule.split(i, schedule.sample_perfect_tile(i, n=2, max_innermost_factor=16))
    j0, j1 = schedule.split(j, schedule.sample_perfect_tile(j, n=2, max_innermost_factor=16))
    schedule.reorder(i0, j0, k, i1, j1)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, samples, environment):
    """Return the path of a database that a real MetaSchedule run filled."""
    folder = tmp_path_factory.mktemp("tuned")
    path = folder / "tuning.db"
    with TuningDatabase.open(path) as database, pytest.MonkeyPatch.context() as patch:
        # MetaSchedule imports 248 tensor intrinsics, which takes 17 s of CPU time: for each, TVM's parser reads the
        # source of the whole stack, twice. The space of this run has none of them.
        patch.setitem(sys.modules, "tvm.s_tir.tensor_intrin", ModuleType("tvm.s_tir.tensor_intrin"))
        job = database.start_job(model="matmul", model_sha256="0" * 64, target=samples.target())
        adapter = MetaScheduleAdapter(database, samples.target(), environment, tvm_target=TARGET, job_id=job.id, seed=1)
        ms.tune_tir(
            matmul(),
            TARGET,
            str(folder / "work"),
            TRIALS,
            num_trials_per_iter=4,
            builder=InProcessBuilder(folder),
            runner=InProcessRunner(),
            database=adapter,
            cost_model="random",
            space=ms.space_generator.ScheduleFn(tiled, sch_rules=[], postprocs=[], mutator_probs={}),
            strategy=ms.search_strategy.EvolutionarySearch(
                population_size=8, init_min_unmeasured=4, genetic_num_iters=1, genetic_max_fail_count=2
            ),
            num_tuning_cores=2,
            seed=1,
        )
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("tvm.s_tir.meta_schedule"):
            for handler in logging.getLogger(name).handlers:
                handler.close()
    return path


READ = """
import sys
import numpy as np, tvm, tvm_ffi
from tvm import te
from tvm.s_tir import meta_schedule as ms
from relaxtune.tuning_db.metaschedule import MetaScheduleAdapter
from relaxtune.tuning_db.records import Environment, Mode, TargetKey
from relaxtune.tuning_db.store import TuningDatabase
a, b = te.placeholder((64, 64), name="A"), te.placeholder((64, 64), name="B")
k = te.reduce_axis((0, 64), name="k")
c = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
mod = tvm.IRModule({"main": te.create_prim_func([a, b, c])})
here = Environment("cpu", "EPYC 9654", "znver4", None, None, tvm.__version__, tvm_ffi.__version__, 2)
target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
with TuningDatabase.open(sys.argv[1], mode=Mode.READ_ONLY) as database:
    adapter = MetaScheduleAdapter(database, TargetKey("llvm", "znver4"), here, tvm_target=target)
    schedule = adapter.query_schedule(mod, target, "main")
    (best,) = adapter.get_top_k(adapter.commit_workload(mod), 1)
    x = np.random.default_rng(0).random((2, 64, 64), dtype="float32")
    arrays = [tvm.runtime.tensor(v) for v in (x[0], x[1], np.zeros_like(x[0]))]
    tvm.compile(schedule.mod, target=target)(*arrays)
    np.testing.assert_allclose(arrays[2].numpy(), x[0] @ x[1], rtol=1e-4)
    latency = sorted(float(value) for value in best.run_secs)[1] * 1e6
    print(latency, adapter.skipped_traces, tvm_ffi.structural_equal(schedule.mod, mod))
"""


def test_run_of_metaschedule_keeps_every_candidate(tuned):
    with TuningDatabase.open(tuned, mode=Mode.READ_ONLY) as database:
        assert [w.workload_hash for w in database.list_workloads()] == [workload_hash(matmul())]
        records = database.list_records()
        assert len(records) == TRIALS
        (failed,) = [record for record in records if record.status is not Status.OK]
        assert failed.error == "MetaSchedule reported a failed build or run and gave no reason"
        assert failed.latencies_us == ()
        assert all(len(record.latencies_us) == 3 for record in records if record is not failed)
        assert {record.seed for record in records} == {1}
        assert {record.job_id for record in records} == {database.list_jobs()[0].id}


def test_best_schedule_is_found_replayed_and_right_in_a_fresh_process(tuned, python, samples, environment):
    process = python(READ, tuned)
    latency, skipped, unchanged = process.communicate()[0].split()
    assert process.returncode == 0
    with TuningDatabase.open(tuned, mode=Mode.READ_ONLY) as database:
        records = database.list_records(RecordFilter(status=Status.OK))
        assert float(latency) == pytest.approx(min(record.latency_us for record in records), rel=1e-12)
    assert (skipped, unchanged) == ("0", "False")


def test_reads_of_a_run_are_ordered_limited_and_complete(tuned, samples, environment):
    with TuningDatabase.open(tuned, mode=Mode.READ_ONLY) as database:
        adapter = MetaScheduleAdapter(database, samples.target(), environment, tvm_target=TARGET)
        workload = adapter.commit_workload(matmul())
        top = [sorted(float(value) for value in record.run_secs)[1] for record in adapter.get_top_k(workload, 100)]
        assert top == sorted(top)
        assert len(top) == len(adapter) == len(adapter.get_all_tuning_records()) == TRIALS - 1
        assert len(adapter.get_top_k(workload, 2)) == 2
        assert adapter.query_tuning_record(matmul(), TARGET, "main").args_info[0].shape == (SIZE, SIZE)
        assert adapter.query_schedule(matmul(32), TARGET, "main") is None
        assert not adapter.has_workload(matmul(16))


@pytest.mark.parametrize("changed", ["target", "tvm_version"])
def test_nothing_is_found_when_target_or_tvm_differs(tuned, samples, environment, changed, monkeypatch):
    target = samples.target("llvm", "znver3") if changed == "target" else samples.target()
    if changed == "tvm_version":
        monkeypatch.setattr(tvm, "__version__", "0.28")
        environment = dataclasses.replace(environment, tvm_version="0.28")
    with TuningDatabase.open(tuned, mode=Mode.READ_ONLY) as database:
        adapter = MetaScheduleAdapter(database, target, environment)
        assert adapter.query_tuning_record(matmul(), TARGET, "main") is None
        assert len(adapter) == 0


def test_workload_is_described_by_the_caller_and_kept_once(database, samples, environment):
    described = dataclasses.replace(describe_unknown(matmul()), family="matmul", name="dense", flops=2.0 * SIZE**3)
    adapter = MetaScheduleAdapter(database, samples.target(), environment, describe=lambda mod: described)
    assert not adapter.has_workload(matmul())
    first = adapter.commit_workload(matmul())
    assert adapter.has_workload(matmul())
    assert adapter.commit_workload(matmul()).same_as(first)
    assert database.list_workloads() == [described]


def test_workload_recorded_beforehand_keeps_its_description_and_gets_its_ir(database, adapter):
    described = dataclasses.replace(describe_unknown(matmul()), family="matmul", ir_json=None)
    database.record_workload(described)
    adapter.commit_workload(matmul())
    (stored,) = database.list_workloads()
    assert stored == dataclasses.replace(described, ir_json=ir_to_json(matmul()))


def test_module_is_not_taken_for_another_when_their_hashes_collide(database, adapter):
    other = dataclasses.replace(describe_unknown(matmul()), ir_json=ir_to_json(matmul(32)))
    database.record_workload(other)
    assert not adapter.has_workload(matmul())
    with pytest.raises(InvalidRecordError, match="Another module with the structural hash"):
        adapter.commit_workload(matmul())


def test_record_committed_by_metaschedule_is_stored_whole(database, adapter, samples, environment):
    adapter.commit_tuning_record(stock_record(adapter.commit_workload(matmul()), [2e-6, 1e-6, 3e-6]))
    (record,) = database.list_records()
    assert record.latencies_us == pytest.approx((2.0, 1.0, 3.0))
    assert (record.target, record.environment, record.seed) == (samples.target(), environment, 5)
    assert record.decision == trace_to_json(split(matmul()).trace)
    assert tvm_ffi.structural_equal(replay_decision(matmul(), record.decision).mod, split(matmul()).mod)


@pytest.mark.parametrize("run_secs", [[], [1e10], [1e-6, 1e10], [0.0], [float("nan")]])
def test_failure_marker_is_a_failure_and_never_returned(database, adapter, run_secs):
    assert is_failure(run_secs)
    workload = adapter.commit_workload(matmul())
    adapter.commit_tuning_record(stock_record(workload, run_secs))
    assert [record.status for record in database.list_records()] == [Status.RUN_ERROR]
    assert list(adapter.get_top_k(workload, 5)) == []
    assert len(adapter) == 0


def test_nothing_is_recorded_twice_when_the_caller_records(database, samples, environment):
    adapter = MetaScheduleAdapter(database, samples.target(), environment, commit_records=False)
    workload = adapter.commit_workload(matmul())
    adapter.commit_tuning_record(stock_record(workload, [1e-6]))
    assert database.count_records() == 0
    own = samples.record(
        describe_unknown(matmul()), environment=environment, decision=trace_to_json(split(matmul()).trace)
    )
    database.record_measurement(own)
    assert len(adapter.get_top_k(workload, 1)) == 1


def test_commits_are_dropped_when_the_database_is_read_only(path, samples, environment):
    TuningDatabase.open(path).close()
    with TuningDatabase.open(path, mode=Mode.READ_ONLY) as database:
        adapter = MetaScheduleAdapter(database, samples.target(), environment)
        adapter.commit_tuning_record(stock_record(adapter.commit_workload(matmul()), [1e-6]))
        assert database.info().workloads == 0
        assert list(adapter.get_top_k(ms.database.Workload(matmul()), 1)) == []


def test_database_is_asked_again_only_after_a_write(database, adapter, monkeypatch):
    workload = adapter.commit_workload(matmul())
    adapter.commit_tuning_record(stock_record(workload, [2e-6], 8))
    asked = []
    list_top = TuningDatabase.list_top

    def counted(self, question, *, k):
        asked.append(k)
        return list_top(self, question, k=k)

    monkeypatch.setattr(TuningDatabase, "list_top", counted)
    for _ in range(3):
        assert len(adapter.get_top_k(workload, 1)) == 1
    assert asked == [1]
    adapter.commit_tuning_record(stock_record(workload, [1e-6], 4))
    (best,) = adapter.get_top_k(workload, 1)
    assert [float(value) for value in best.run_secs] == pytest.approx([1e-6])
    assert asked == [1, 1]


def test_records_of_several_layers_are_told_apart_and_workloads_carried_up(tmp_path, samples, environment):
    paths = tmp_path / "mine.db", tmp_path / "shared.db"
    for path, factor, seconds in zip(paths, (8, 4), (3e-6, 2e-6), strict=True):
        with TuningDatabase.open(path) as database:
            adapter = MetaScheduleAdapter(database, samples.target(), environment)
            adapter.commit_tuning_record(stock_record(adapter.commit_workload(matmul()), [seconds], factor))
    with LayeredDatabase.open_layers(paths) as layers:
        adapter = MetaScheduleAdapter(layers, samples.target(), environment)
        best, second = adapter.get_top_k(ms.database.Workload(matmul()), 2)
        # Both have the id 1 in their own database.
        assert [float(value) for value in (*best.run_secs, *second.run_secs)] == pytest.approx([2e-6, 3e-6])
        assert str(best.trace) != str(second.trace)
    with LayeredDatabase.open_layers([tmp_path / "new.db", paths[1]]) as layers:
        adapter = MetaScheduleAdapter(layers, samples.target(), environment)
        adapter.commit_tuning_record(stock_record(adapter.commit_workload(matmul()), [1e-6]))
        assert (layers.info().workloads, layers.info().records, layers.count_records()) == (1, 1, 2)


def test_records_without_ir_are_left_out_of_the_full_list(database, samples, environment):
    described = dataclasses.replace(describe_unknown(matmul()), ir_json=None)
    database.record_workload(described)
    database.record_measurement(samples.record(described, environment=environment))
    adapter = MetaScheduleAdapter(database, samples.target(), environment)
    assert list(adapter.get_all_tuning_records()) == []
    assert len(adapter) == 1


def test_adapter_is_refused_when_the_environment_names_another_tvm(database, samples):
    with pytest.raises(InvalidRecordError, match=r"says TVM 0\.1, running is .*Detect the environment"):
        MetaScheduleAdapter(database, samples.target(), samples.environment(tvm_version="0.1"))


def test_error_of_the_database_keeps_its_class_through_tvm(samples, environment):
    database = TuningDatabase.open("sqlite://")
    adapter = MetaScheduleAdapter(database, samples.target(), environment)
    broken = dataclasses.replace(describe_unknown(matmul()), ir_json="broken")
    database.record_workload(broken)
    with pytest.raises(InvalidRecordError, match="cannot read the IR of a workload"):
        adapter.query_schedule(matmul(), TARGET, "main")
    database.close()
