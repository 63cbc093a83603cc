"""A small matmul, a schedule of it, and the record that stock MetaSchedule makes of that."""

from __future__ import annotations

import tvm
from tvm import te
from tvm.s_tir import meta_schedule as ms

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
SIZE = 64
TRIALS = 8


def matmul(size: int = SIZE) -> tvm.ir.IRModule:
    a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def split(mod: tvm.ir.IRModule, factor: int = 8) -> tvm.s_tir.Schedule:
    schedule = tvm.s_tir.Schedule(mod)
    schedule.split(schedule.get_loops(schedule.get_sblock("C"))[0], [None, factor])
    return schedule


def stock_record(workload: ms.database.Workload, run_secs: list[float], factor: int = 8) -> ms.database.TuningRecord:
    args = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    return ms.database.TuningRecord(split(workload.mod, factor).trace, workload, run_secs, TARGET, args)
