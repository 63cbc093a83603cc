"""Attention of any lengths beside attention of known ones, on a Hopper GPU; nothing is tuned.

    python -m benchmarks.kernels.bench_symbolic_attention [--cases REGEX] [--rounds 30] [--out FILE.json]

Shapes: the layers of BERT-base, GPT-2 small, Llama-1B (prefill, decode over caches) and T5-small. Each table and each
kernel is what is taken where nothing was measured. Masks hide nothing. Before they are timed, both run into poisoned
outputs, which are compared with torch's attention in float32. Both arms are timed alternately, as CUDA graphs of
launches over rotating buffers that do not fit the L2 cache together. Needs TVM, torch and a C++ compiler.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kernels.bench_attention_sm90 import (
    BYTES_PER_TURN,
    ERROR_MAX,
    Case,
    heads_of,
    inputs,
    reference,
    specification,
)
from benchmarks.kernels.bench_symbolic_gemm import captured, compare_tables, table_parser
from benchmarks.kernels.cubins import time_by_turns

_COPIES_MAX = 24
Make = Callable[[Any, Any], Case]
# Case of a batch and a length (of caches in decode), and the points that are timed.
CASES: dict[str, tuple[Make, Sequence[tuple[int, int]]]] = {
    "bert": (
        lambda batch, length: Case(batch, 12, 12, length, length, 64),
        ((1, 16), (1, 128), (8, 128), (32, 128), (1, 512), (8, 512), (4, 333)),
    ),
    "bert-mask": (
        lambda batch, length: Case(batch, 12, 12, length, length, 64, masked=True),
        ((1, 128), (8, 128), (32, 128), (1, 512), (8, 512)),
    ),
    "gpt2": (lambda batch, length: Case(batch, 12, 12, length, length, 64, True), ((1, 128), (8, 512))),
    "llama": (lambda batch, length: Case(batch, 32, 8, length, length, 64, True), ((1, 128), (1, 2048))),
    "decode": (
        lambda batch, length: Case(batch, 32, 8, 1, length, 64, packed=False),
        ((1, 128), (1, 1024), (16, 1024), (1, 2048)),
    ),
}


def build(name: str, folder: str) -> dict[str, int]:
    """Compile a case's table and its kernels of known sizes into one library; return the table's kernels."""
    import tvm
    from tvm import tirx

    from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
    from relaxtune.schedules.functions.plain_attention import attention_function
    from relaxtune.schedules.registry import apply_decision, list_candidates
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.schedules.templates.lowering import register_mixed_pipeline

    make, points = CASES[name]
    target, functions, kernels = resolve_target("cuda:sm_90a"), {}, 0
    symbolic = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
    for key, sizes in (("any", symbolic), *((f"at_{batch}_{length}", (batch, length)) for batch, length in points)):
        func = attention_function(*specification(make(*sizes)))
        decision = list_candidates(func, target)[0][0].to_json()
        functions[key] = apply_decision(func, target, decision).with_attr("global_symbol", key)
        kernels = len(json.loads(decision)["kernels"]) if key == "any" else kernels
    with cuda_compiler("sm_90a"):
        made = tvm.tirx.build(tvm.IRModule(functions), target=target.target, pipeline=register_mixed_pipeline())
    made.export_library(f"{folder}/{name}.so")
    return {name: kernels}


def measure(name: str, batch: int, length: int, library: Any, rounds: int) -> dict[str, Any]:
    """Return the medians of both arms in microseconds, and the largest errors."""
    import torch

    spec, params = specification(CASES[name][0](batch, length))
    names = [(f"p{number}", shape, dtype) for number, (shape, dtype) in enumerate(params)]
    entry = {"spec": json.loads(spec.to_json()), "params": names}
    bytes_each = 2 * sum(math.prod(shape) for shape, _ in params)
    copies = max(2, min(_COPIES_MAX, math.ceil(BYTES_PER_TURN / bytes_each)))
    buffers = [inputs(entry) for _ in range(copies)]
    for one in buffers if spec.bias is not None else ():
        one[names[spec.bias.param][0]].zero_()
    arms = {"symbolic": library["any"], "static": library[f"at_{batch}_{length}"]}
    errors, graphs = {}, {}
    for arm, kernel in arms.items():
        for one in buffers:
            one[names[-1][0]].fill_(math.nan)
        graphs[arm] = captured(kernel, [[one[key] for key, _, _ in names] for one in buffers])
        graphs[arm].replay()
        torch.cuda.synchronize()
        right, found = reference(entry, buffers[0]), heads_of(entry, buffers[0], "output").float()
        errors[arm] = float((found - right).norm() / right.norm())
    times = time_by_turns(graphs, copies, rounds)
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    return {**medians, "ratio": medians["symbolic"] / medians["static"], "errors": errors, "copies": copies}


def main() -> None:
    """Build, check, time, print."""
    arguments = table_parser(__doc__).parse_args()
    compare_tables(
        [name for name in CASES if re.search(arguments.cases, name)],
        build,
        lambda name, library: (
            (f"{name} {batch}x{length}", measure(name, batch, length, library, arguments.rounds))
            for batch, length in CASES[name][1]
        ),
        ERROR_MAX,
        arguments.out,
    )


if __name__ == "__main__":
    main()
