"""Packed matmuls of symbolic rows on this CPU, beside ONNX Runtime's, on one thread.

    python -m benchmarks.kernels.bench_packed_matmul [--shapes 768x768,768x3072,3072x768] [--rows 16,64,128,256,384]
        [--weights-mb 40] [--seconds 1] [--out FILE.json]

A shape is K x N, of a constant weight that each side packs in its own way. The two sides alternate, and each is timed
by the CPU time of the calling thread, so that other work on the machine disturbs little; the least of all calls counts.
`--weights-mb` is the memory that equal weights take together, which the calls walk through: in a model, weights come
from memory and not from a cache. Results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te, tirx

from benchmarks.this_run import run_facts
from relaxtune.pipeline.tvm_runtime.threads import configure_threads
from relaxtune.schedules.cpu.base import cpu_limits
from relaxtune.schedules.cpu.packing import pack_weight, packed_matmul, panel_width
from relaxtune.schedules.fallback import schedule_by_rules
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.targets import resolve_target

SHAPES, ROWS = "768x768,768x2304,768x3072,3072x768", "16,64,128,256,384"
# Relative to the largest sum: two orders of adding up to 4,096 products in float32.
ERROR_MAX = 1e-5

Call = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """Least CPU times of one matmul, and what each side reaches."""

    k: int
    n: int
    rows: int
    own_us: float
    peer_us: float

    def gflops(self, time_us: float) -> float:
        """Return the multiply-adds of a call of that time, in GFLOP/s."""
        return 2e-3 * self.rows * self.k * self.n / time_us


def main() -> None:
    """Time each shape at each number of rows, and print what both sides reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--weights-mb", type=float, default=40)
    parser.add_argument("--seconds", type=float, default=1, help="for both sides of one matmul")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    configure_threads(1)
    loads = []
    results = []
    for shape in arguments.shapes.split(","):
        k, n = map(int, shape.split("x"))
        copies = max(1, round(arguments.weights_mb * 1e6 / (4 * k * n)))
        own, peer = build_arms(k, n, copies)
        for rows in map(int, arguments.rows.split(",")):
            result = measure(k, n, rows, (own, peer), arguments.seconds)
            reached = [result.gflops(time_us) for time_us in (result.own_us, result.peer_us)]
            ratio = result.own_us / result.peer_us
            print(f"{shape:10} rows {rows:4}  {reached[0]:6.1f} beside {reached[1]:6.1f} GFLOP/s  ({ratio:.3f})")
            results.append(result)
            loads.append(os.getloadavg()[0])
    if arguments.out is not None:
        document = {
            **run_facts(loads=loads),
            "command": shlex.join(["python", "-m", "benchmarks.kernels.bench_packed_matmul", *sys.argv[1:]]),
            "weights_mb": arguments.weights_mb,
            "onnxruntime": ort.__version__,
            "entries": [asdict(result) for result in results],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


#: Makes a call for each copy of the weight, of an input and the output that the calls write.
Arm = Callable[[tvm.runtime.Tensor, tvm.runtime.Tensor], list[Call]]


def build_arms(k: int, n: int, copies: int) -> tuple[Arm, Arm]:
    """Return our kernel and ONNX Runtime's for a random weight."""
    weight = np.random.default_rng(0).standard_normal((k, n)).astype("float32")
    target = resolve_target("llvm").target
    width = panel_width(None, n, "float32", cpu_limits(target))
    rows = te.var("rows", "int64")
    x = te.placeholder((1, rows, k), "float32", name="x")
    packed = te.placeholder((-(-n // width), k, width), "float32", name="packed")
    func = te.create_prim_func([x, packed, packed_matmul(n)(x, packed)])
    _, schedule = schedule_by_rules("main", func, target)
    scheduled = schedule.mod["main"].with_attr(SCHEDULED_ATTR, True).with_attr("global_symbol", "main")
    kernel = tirx.build(tvm.IRModule({"main": scheduled}), target=target)["main"]
    panels = [tvm.runtime.tensor(pack_weight(weight, width)) for _ in range(copies)]
    sessions = [matmul_session(weight) for _ in range(copies)]

    def own(value: tvm.runtime.Tensor, out: tvm.runtime.Tensor) -> list[Call]:
        return [partial(kernel, value, panel, out) for panel in panels]

    def peer(value: tvm.runtime.Tensor, out: tvm.runtime.Tensor) -> list[Call]:
        # The same memory, which is aligned as our kernels ask.
        own_value, own_out = np.from_dlpack(value), np.from_dlpack(out)
        calls: list[Call] = []
        for session in sessions:
            binding = session.io_binding()
            binding.bind_cpu_input("x", own_value)
            binding.bind_output("y", "cpu", 0, np.float32, own_out.shape, own_out.ctypes.data)
            calls.append(partial(session.run_with_iobinding, binding))
        return calls

    return own, peer


def matmul_session(weight: np.ndarray) -> ort.InferenceSession:
    """Return a session of one thread that multiplies by a constant."""
    k, n = weight.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "matmul",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "rows", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "rows", n])],
        [numpy_helper.from_array(weight, "weight")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(k: int, n: int, rows: int, arms: tuple[Arm, Arm], seconds: float) -> Result:
    """Return the least times of both sides, whose results agree."""
    value = tvm.runtime.tensor(np.random.default_rng(1).standard_normal((1, rows, k)).astype("float32"))
    outs = [tvm.runtime.tensor(np.full((1, rows, n), np.nan, "float32")) for _ in arms]
    calls = [arm(value, out) for arm, out in zip(arms, outs, strict=True)]
    for arm_calls in calls:
        arm_calls[0]()
    found, expected = (out.numpy() for out in outs)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    if not error <= ERROR_MAX:
        raise SystemExit(f"{k}x{n}, {rows} rows: the results differ by {error:.1e}; nothing was timed")
    least = [float("inf"), float("inf")]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for pair in zip(*calls, strict=True):
            for side, call in enumerate(pair):
                begin = time.thread_time_ns()
                call()
                least[side] = min(least[side], (time.thread_time_ns() - begin) / 1e3)
    return Result(k, n, rows, *least)


if __name__ == "__main__":
    main()
