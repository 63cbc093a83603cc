"""Tables of kernels for any number of rows beside the kernels for known ones, on a Hopper GPU; nothing is tuned.

    python -m benchmarks.kernels.bench_symbolic_gemm [--cases REGEX] [--rows 1 16 ...] [--rounds 30] [--out FILE.json]

Shapes: the matmuls of BERT-base (and GPT-2 small) and of Llama-1B of `benchmarks.kernels.bench_gemm_sm90`. Each table
and each kernel is what is taken where nothing was measured. Before it is timed, each runs into a poisoned output, which
is compared with a product in float32. Both arms of a shape are timed alternately, as CUDA graphs of launches over
rotating buffers that do not fit the L2 cache together. Needs TVM, torch and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu_arms.results import machine
from benchmarks.kernels.bench_gemm_sm90 import BYTES_PER_TURN, CASES, Case, fused_matmul, inputs
from benchmarks.kernels.cubins import time_by_turns

ROWS = (1, 7, 16, 50, 64, 100, 128, 200, 333, 512, 1000, 2048, 4097)
_SHAPES = {name.rpartition("-")[0]: case for name, case in CASES.items() if "vocabulary" not in name}
_COPIES_MAX = 24
_ERROR_MAX = 6e-4


def build(name: str, folder: str, rows: Sequence[int]) -> dict[str, int]:
    """Compile a shape's table and its kernels for known rows into one library; return the table's kernels."""
    import tvm
    from tvm import tirx

    from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
    from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
    from relaxtune.schedules.registry import apply_decision, list_candidates
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.schedules.templates.lowering import register_mixed_pipeline

    target, functions, kernels = resolve_target("cuda:sm_90a"), {}, 0
    for key, count in (("any", tirx.Var("rows", "int64")), *((f"rows_{count}", count) for count in rows)):
        func = fused_matmul(replace(_SHAPES[name], rows=count)).with_attr(CONSTANT_PARAMS_ATTR, [1])
        decision = list_candidates(func, target)[0][0].to_json()
        functions[key] = apply_decision(func, target, decision).with_attr("global_symbol", key)
        kernels = decision.count('"most"') if key == "any" else kernels
    with cuda_compiler("sm_90a"):
        made = tvm.tirx.build(tvm.IRModule(functions), target=target.target, pipeline=register_mixed_pipeline())
    made.export_library(f"{folder}/{name}.so")
    return {name: kernels}


def measure(case: Case, library: Any, rounds: int) -> dict[str, Any]:
    """Return the medians of both arms in microseconds, and the largest error."""
    import torch

    bytes_each = 2 * (case.rows * case.k + case.k * case.n + 2 * case.rows * case.n)
    copies = max(2, min(_COPIES_MAX, math.ceil(BYTES_PER_TURN / bytes_each)))
    buffers = [inputs(case) for _ in range(copies)]
    order = ["A", "B", *(name for name in ("bias", "residual") if name in buffers[0]), "output"]
    arms = {"symbolic": library["any"], "static": library[f"rows_{case.rows}"]}
    errors, graphs = {}, {}
    for arm, kernel in arms.items():
        for one in buffers:
            one["output"].fill_(math.nan)
        graphs[arm] = captured(kernel, [[one[name] for name in order] for one in buffers])
        graphs[arm].replay()
        torch.cuda.synchronize()
        errors[arm] = max(_error(case, one) for one in buffers[:2])
    times = time_by_turns(graphs, copies, rounds)
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    return {**medians, "ratio": medians["symbolic"] / medians["static"], "errors": errors, "copies": copies}


def captured(kernel: Callable[..., None], calls: Sequence[Sequence[Any]]) -> Any:
    """Return a CUDA graph of calls of a kernel, after one call."""
    import torch
    import tvm_ffi

    for arguments in calls[:1]:
        kernel(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
        for arguments in calls:
            kernel(*arguments)
    return graph


def _error(case: Case, tensors: dict[str, Any]) -> float:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    right = tensors["A"].float() @ tensors["B"].float()
    right = right + tensors["bias"] if "bias" in tensors else right
    right = torch.nn.functional.gelu(right) if case.epilogue == "gelu" else right
    right = right + tensors["residual"].float() if "residual" in tensors else right
    return float((tensors["output"].float() - right).norm() / right.norm())


def table_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that compares tables with kernels of known sizes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=".")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    return parser


def compare_tables(
    names: Sequence[str],
    build: Callable[[str, str], dict[str, int]],
    points: Callable[[str, Any], Iterable[tuple[str, dict[str, Any]]]],
    error_max: float,
    out: Path | None,
) -> None:
    """Build every case side by side, measure its points, print a line each and the mean; keep the raw values in `out`.

    `points` gives what a case's points are called and what was measured, from the case's library.
    """
    found: dict[str, Any] = {**machine(), "kernels": {}, "cases": {}}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(16, get_context("spawn")) as pool:
        for kernels in pool.map(build, names, [folder] * len(names)):
            found["kernels"].update(kernels)
        import tvm

        for name in names:
            for point, result in points(name, tvm.runtime.load_module(f"{folder}/{name}.so")):
                right = all(error <= error_max for error in result["errors"].values())
                found["cases"][point.replace(" ", "-")] = result
                print(
                    f"{point}: symbolic {result['symbolic']:.2f} us, static {result['static']:.2f} us, "
                    f"ratio {result['ratio']:.3f}, {'' if right else 'WRONG '}errors {result['errors']}",
                    flush=True,
                )
                if out:
                    out.write_text(json.dumps(found, indent=1) + "\n")
    ratios = [result["ratio"] for result in found["cases"].values()]
    print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, greatest {max(ratios):.3f}")
    print(f"kernels {found['kernels']}")


def main() -> None:
    """Build, check, time, print."""
    parser = table_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    arguments = parser.parse_args()
    compare_tables(
        [name for name in _SHAPES if name != "square" and re.search(arguments.cases, name)],
        partial(build, rows=arguments.rows),
        lambda name, library: (
            (f"{name} {rows}", measure(replace(_SHAPES[name], rows=rows), library, arguments.rounds))
            for rows in arguments.rows
        ),
        _ERROR_MAX,
        arguments.out,
    )


if __name__ == "__main__":
    main()
