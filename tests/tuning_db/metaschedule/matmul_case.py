"""A small matmul, and a schedule of it."""

from __future__ import annotations

import tvm
from tvm import te

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
SIZE = 64


def matmul(size: int = SIZE) -> tvm.ir.IRModule:
    a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def split(mod: tvm.ir.IRModule, factor: int = 8) -> tvm.s_tir.Schedule:
    schedule = tvm.s_tir.Schedule(mod)
    schedule.split(schedule.get_loops(schedule.get_sblock("C"))[0], [None, factor])
    return schedule
