"""MetaSchedule's JSON pair, against files that stock MetaSchedule wrote in this very test."""

from __future__ import annotations

import base64
import dataclasses
import json

import pytest
import tvm
import tvm_ffi
from tvm import te
from tvm.s_tir import meta_schedule as ms

from relaxtune.tuning_db.errors import ExchangeError
from relaxtune.tuning_db.exchange.stock_json import RECORD_FILE, WORKLOAD_FILE, StockImport, export_stock, import_stock
from relaxtune.tuning_db.lookup import Question
from relaxtune.tuning_db.metaschedule import describe_unknown, replay_decision, workload_hash
from relaxtune.tuning_db.records import RecordFilter, Route, Status
from relaxtune.tuning_db.store import TuningDatabase

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})


def matmul(size: int) -> tvm.ir.IRModule:
    a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def open_stock(folder):
    return ms.database.JSONDatabase(str(folder / WORKLOAD_FILE), str(folder / RECORD_FILE))


@pytest.fixture
def stock(tmp_path):
    """Return a folder that stock MetaSchedule filled: two workloads, three valid candidates and a failed one."""
    folder = tmp_path / "stock"
    folder.mkdir()
    database = open_stock(folder)
    for size, factor, seconds in ((8, 2, [1.1e-6, 2.3e-6, 1.7e-6]), (8, 4, [1e10]), (16, 4, [3e-6]), (8, 8, [9e-7])):
        mod = matmul(size)
        schedule = tvm.s_tir.Schedule(mod)
        schedule.split(schedule.get_loops(schedule.get_sblock("C"))[0], [None, factor])
        workload = database.commit_workload(mod)
        args = ms.arg_info.ArgInfo.from_entry_func(mod)
        database.commit_tuning_record(ms.database.TuningRecord(schedule.trace, workload, seconds, TARGET, args))
    return folder


@pytest.fixture(scope="module")
def environment(samples):
    return samples.environment(tvm_version=tvm.__version__, tvm_ffi_version=tvm_ffi.__version__)


@pytest.fixture
def memory():
    with TuningDatabase.open("sqlite://") as database:
        yield database


def test_files_of_stock_are_read_whole(database, stock, environment):
    done = import_stock(database, stock, environment=environment)
    assert done == StockImport(workloads=2, records=4, new_records=4, failed=1)
    records = database.list_records()
    assert [record.status for record in records] == [Status.OK, Status.RUN_ERROR, Status.OK, Status.OK]
    assert records[0].latencies_us == pytest.approx((1.1, 2.3, 1.7))
    assert {(r.target.kind, r.target.arch, r.route) for r in records} == {("llvm", "znver4", Route.METASCHEDULE)}
    assert "num-cores" in records[0].target.attributes
    scheduled = replay_decision(matmul(8), records[0].decision)
    assert len(scheduled.get_loops(scheduled.get_sblock("C"))) == 4
    best = database.find_best(
        Question(
            workload_hash=workload_hash(matmul(8)),
            signature_key=None,
            target=records[0].target,
            environment=environment,
        )
    )
    assert best.latency_us == pytest.approx(0.9)


def test_second_import_takes_only_what_stock_added(memory, stock, environment, samples):
    import_stock(memory, stock, environment=environment)
    assert import_stock(memory, stock, environment=environment).new_records == 0
    path = stock / RECORD_FILE
    last = path.read_text().splitlines()[-1]
    path.write_text(path.read_text() + last.replace("e-07", "e-06") + "\n")
    assert import_stock(memory, stock, environment=environment) == StockImport(2, 5, 1, 1)


def test_known_workload_keeps_its_description(memory, stock, environment, samples):
    described = dataclasses.replace(describe_unknown(matmul(8)), family="matmul", name="dense")
    memory.record_workload(described)
    import_stock(memory, stock, environment=environment, target=samples.target("llvm", "znver5"))
    assert memory.get_workload(described.workload_hash).name == "dense"
    assert {record.target.arch for record in memory.list_records()} == {"znver5"}


def test_export_is_read_by_stock_as_it_reads_its_own(memory, stock, environment, tmp_path):
    import_stock(memory, stock, environment=environment)
    assert export_stock(memory, tmp_path / "out") == (2, 4)
    ours, theirs = open_stock(tmp_path / "out"), open_stock(stock)
    assert len(ours) == len(theirs) == 4
    for size in (8, 16):
        mine = ours.get_top_k(ours.commit_workload(matmul(size)), 9)
        stocks = theirs.get_top_k(theirs.commit_workload(matmul(size)), 9)
        for one, other in zip(mine, stocks, strict=True):
            assert str(one.trace) == str(other.trace)
            assert [float(s) for s in one.run_secs] == pytest.approx([float(s) for s in other.run_secs])
            assert str(one.target) == str(other.target)
            assert [str(a) for a in one.args_info] == [str(a) for a in other.args_info]
    assert len(ours.get_all_tuning_records()) == 4
    assert import_stock(memory, tmp_path / "out", environment=environment).new_records == 0


def test_export_takes_what_the_filter_selects_and_leaves_other_routes_out(
    memory, stock, environment, samples, tmp_path
):
    import_stock(memory, stock, environment=environment)
    record = memory.list_records()[0]
    memory.record_measurement(dataclasses.replace(record, route=Route.TEMPLATE, decision="{}"))
    chosen = RecordFilter(workload_hash=record.workload_hash, status=Status.OK)
    assert export_stock(memory, tmp_path / "out", chosen) == (1, 2)


def test_export_is_refused_when_it_cannot_be_whole(memory, environment, samples, tmp_path, stock):
    with pytest.raises(ExchangeError, match=r"exists\. Name a folder that does not"):
        export_stock(memory, tmp_path)
    with pytest.raises(ExchangeError, match="whose parent exists"):
        export_stock(memory, tmp_path / "no" / "out")
    described = dataclasses.replace(describe_unknown(matmul(8)), ir_json=None)
    memory.record_workload(described)
    memory.record_measurement(samples.record(described, environment=environment))
    with pytest.raises(ExchangeError, match="has no IR"):
        export_stock(memory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def encoded(text: bytes) -> str:
    return base64.b64encode(len(text).to_bytes(8, "little") + text).decode()


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a":1}', r"expected \[hash, module\]"),
        ('["1"]', r"expected \[hash, module\]"),
        ('["1", "***"]', "not a module"),
        (json.dumps(["1", base64.b64encode(b"12345678abc").decode()]), "the module has 3 bytes, expected"),
        (json.dumps(["1", encoded(b"{}")]), "not a module of TVM"),
        (json.dumps(["1", encoded(b"\xff\xfe")]), "not a module of TVM"),
        (json.dumps(["1", encoded(b'{"root_index":9,"nodes":[]}')]), "not a module of TVM"),
    ],
)
def test_hostile_workload_is_refused_with_its_line(memory, stock, environment, line, match):
    path = stock / WORKLOAD_FILE
    path.write_text(path.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(ExchangeError, match=rf"{WORKLOAD_FILE}, line 2: .*{match}"):
        import_stock(memory, stock, environment=environment)
    assert memory.info().workloads == memory.info().records == 0


def test_workload_whose_hash_does_not_fit_is_refused(memory, stock, environment):
    path = stock / WORKLOAD_FILE
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    path.write_text(json.dumps(first) + "\n" + json.dumps([first[0], second[1]]) + "\n")
    with pytest.raises(ExchangeError, match=r"line 2: the module has the structural hash \d+, expected \d+"):
        import_stock(memory, stock, environment=environment)


TRACE = '[[["GetSBlock",[],["C","main"],["b0"]]],[]]'


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("not json", "not JSON"),
        ("[]", r"expected \[workload, \[trace"),
        ("[0]", r"expected \[workload, \[trace"),
        (f"[2,[{TRACE},[1e-6],null,null]]", "workload number 2, but the workload file has 2 lines"),
        (f"[-1,[{TRACE},[1e-6],null,null]]", "workload number -1"),
        (f"[true,[{TRACE},[1e-6],null,null]]", "workload number True"),
        (f'[0,[{TRACE},["1"],null,null]]', "seconds must be numbers"),
        (f'[0,[{TRACE},[1e-6],"llvm",null]]', "has no mcpu or arch"),
        (f'[0,[{TRACE},[1e-6],{{"kind":"llvm"}},null]]', "has no mcpu or arch"),
        (f'[0,[{TRACE},[1e-6],{{"kind":"cuda","arch":"sm_90"}},null]]', "measured on device kind 'cpu'"),
        ('[0,["import os",[1e-6],{"kind":"llvm","mcpu":"a"},null]]', "A trace is"),
        ('[0,[[[["EvalPython",[],["os"],[]]],[]],[1e-6],{"kind":"llvm","mcpu":"a"},null]]', "no instruction 'EvalP"),
        ('[0,[[["GetLoops"],[]],[1e-6],{"kind":"llvm","mcpu":"a"},null]]', "An instruction is"),
        ('[0,[[[],[[0,1]]],[1e-6],{"kind":"llvm","mcpu":"a"},null]]', "A decision is"),
    ],
)
def test_hostile_record_is_refused_with_its_line(memory, stock, environment, line, match):
    path = stock / RECORD_FILE
    path.write_text("\n".join([*path.read_text().splitlines()[:2], line]) + "\n")
    with pytest.raises(ExchangeError, match=rf"{RECORD_FILE}, line 3: .*{match}"):
        import_stock(memory, stock, environment=environment)
    assert memory.info().workloads == memory.info().records == 0


def test_missing_files_and_other_versions_are_refused(memory, stock, environment, samples, tmp_path):
    with pytest.raises(ExchangeError, match=rf"Cannot read .*Expected the folder of MetaSchedule's {WORKLOAD_FILE}"):
        import_stock(memory, tmp_path / "no", environment=environment)
    with pytest.raises(ExchangeError, match=r"says TVM 0\.1, running is"):
        import_stock(memory, stock, environment=samples.environment(tvm_version="0.1"))
    (stock / RECORD_FILE).unlink()
    with pytest.raises(ExchangeError, match=rf"Cannot read .*{RECORD_FILE}"):
        import_stock(memory, stock, environment=environment)


def test_long_line_is_refused_before_it_is_read(memory, stock, environment, monkeypatch):
    monkeypatch.setattr("relaxtune.tuning_db.exchange.stock_json.MAX_LINE_BYTES", 100)
    with pytest.raises(ExchangeError, match="line 1: longer than 100 bytes"):
        import_stock(memory, stock, environment=environment)
