"""Candidates of the search space on tensor cores (`mma.sync`) beside cuBLAS, each checked before it is timed.

    python -m benchmarks.kernels.bench_tensor_tile build DIR
        [--candidates 64]      anywhere with a CUDA compiler; needs no GPU
    python -m benchmarks.kernels.bench_tensor_tile run DIR [--before DIR] [--out FILE.json]     on the GPU; needs no TVM

A case's candidates are drawn at random from its designs, as a search's first ones are, for `--target` (sm_90 by
default, which has the instructions of Ampere and Ada and no template of its own). `run` runs each on fresh random
inputs into an output full of NaN, compares it with a float64 product, looks at the time of each right one, and times
the three fastest and cuBLAS through torch alternately, as CUDA graphs over rotating buffers that do not fit the L2
cache. Cases of tf32 are beside torch's tf32, and their inputs are rounded to it. `--before` takes a folder that
`build` of an older version wrote.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels.cubins import (
    Kernel,
    build_and_run_parser,
    captured_graph,
    cubin_writer,
    median_and_p95,
    read_kernels,
    time_by_turns,
)


@dataclass(frozen=True)
class Case:
    """C[m, n] = A[m, k] @ B[k, n] + bias[n] in `dtype`, B as [n, k] if `turned`; cases that are not `timed` are odd."""

    m: int
    n: int
    k: int
    dtype: str
    turned: bool = False
    timed: bool = True


CASES = {
    f"{m}x{n}x{k}-{'tf32' if dtype == 'float32' else 'fp16'}": Case(m, n, k, dtype)
    for dtype in ("float16", "float32")
    for m, n, k in ((128, 768, 768), (128, 3072, 768), (4096, 3072, 768))
} | {
    f"odd-{m}x{n}x{k}-{dtype}{'-turned' if turned else ''}": Case(m, n, k, dtype, turned, timed=False)
    for m, n, k, dtype, turned in (
        (197, 768, 768, "float16", False),
        (197, 203, 100, "float16", False),
        (37, 50257, 64, "float16", False),
        (37, 50257, 64, "float16", True),
        (1, 1000, 52, "bfloat16", True),
        (77, 331, 129, "bfloat16", False),
        (197, 203, 100, "float32", False),
        (77, 330, 130, "float32", True),
        (1, 17, 7, "float32", False),
    )
}
# Relative to the largest value: rounding of the output; tensor cores cut off what does not fit a sum of float32.
ERROR_MAX = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 1e-5}
BYTES_PER_TURN = 160_000_000
LAUNCHES_MAX = 64
LOOK_ROUNDS = 5
CONTENDERS = 3


def build(directory: Path, cases: dict[str, Case], target_text: str, candidates: int, odd: int) -> None:
    """Draw and compile the candidates of every case."""
    from tvm import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    from relaxtune.pipeline.codegen.finish import finish_kernels
    from relaxtune.schedules.search.space import QuietTuneContext, list_designs, make_space
    from relaxtune.schedules.targets import resolve_target

    target = resolve_target(target_text)
    with cubin_writer(directory, target) as writer:
        for name, case in cases.items():
            mod = IRModule({"main": matmul(case)})
            space = make_space(target.target, mod)
            QuietTuneContext(mod, target.target, space)
            designs, seen, drawn, refused = list_designs(mod, target.target), set(), 0, 0
            while len(seen) < (candidates if case.timed else odd) and drawn < 8 * candidates:
                drawn += 1
                schedule = Schedule(mod, seed=drawn)
                with target.target:
                    trace = Trace(designs[drawn % len(designs)].trace.insts, {})
                    trace.apply_to_schedule(schedule, remove_postproc=True)
                decision = str(schedule.trace)
                schedule.enter_postproc()
                if not all(rule.apply(schedule) for rule in space.postprocs):
                    refused += 1
                elif decision not in seen:
                    seen.add(decision)
                    kernel = finish_kernels(schedule.mod, target.target)["main"]
                    writer.add(kernel, case=name, decision=[int(v) for v in schedule.trace.decisions.values()])
            print(f"{name}: {len(seen)} different of {drawn} drawn, {refused} refused", file=sys.stderr)


def matmul(case: Case) -> Any:
    """Return the function of a case; float32 may be multiplied in tf32."""
    from tvm import te

    from relaxtune.schedules.marks import TF32_ATTR

    m, n, k, dtype = case.m, case.n, case.k, case.dtype
    a = te.placeholder((m, k), dtype, name="A")
    b = te.placeholder((n, k) if case.turned else (k, n), dtype, name="B")
    bias = te.placeholder((n,), "float32", name="bias")
    over = te.reduce_axis((0, k), name="k")

    def product(i: Any, j: Any) -> Any:
        left, right = a[i, over], b[j, over] if case.turned else b[over, j]
        wide = left * right if dtype == "float32" else left.astype("float32") * right.astype("float32")
        return te.sum(wide, axis=over)

    sums = te.compute((m, n), product, name="matmul")
    output = te.compute((m, n), lambda i, j: (sums[i, j] + bias[j]).astype(dtype), name="output")
    return te.create_prim_func([a, b, bias, output]).with_attr(TF32_ATTR, True)


def inputs(case: Case) -> dict[str, Any]:
    """Return random tensors of a case, and an output full of NaN."""
    import torch

    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Any:
        values = torch.randn(*shape, device="cuda")
        # tf32 has 10 bits of mantissa; half an ulp up, then the rest cut off.
        return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).to(dtype)

    return {
        "A": normal(case.m, case.k),
        "B": normal(*((case.n, case.k) if case.turned else (case.k, case.n))),
        "bias": torch.randn(case.n, device="cuda"),
        "output": torch.full((case.m, case.n), float("nan"), device="cuda", dtype=dtype),
    }


def library(case: Case, tensors: dict[str, Any]) -> Any:
    """Launch cuBLAS through torch, without the bias."""
    import torch

    return torch.mm(tensors["A"], tensors["B"].t() if case.turned else tensors["B"], out=tensors["output"])


def largest_error(case: Case, kernel: Kernel, checks: int) -> float:
    """Return the largest error over fresh inputs relative to the largest value; NaN where nothing was written."""
    import torch

    worst = 0.0
    for _ in range(checks):
        tensors = inputs(case)
        right = tensors["B"].double().t() if case.turned else tensors["B"].double()
        expected = tensors["A"].double() @ right + tensors["bias"].double()
        kernel.bind(tensors)()
        error = float((tensors["output"].double() - expected).abs().max() / expected.abs().max())
        torch.cuda.synchronize()
        if math.isnan(error):
            return error
        worst = max(worst, error)
    return worst


def measure(case: Case, arms: dict[str, list[Kernel]], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the times of every arm's fastest kernels, and of cuBLAS, and the first look at each kernel."""
    first = inputs(case)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    count = min(LAUNCHES_MAX, max(2, math.ceil(BYTES_PER_TURN / size)))
    sets = [first, *(inputs(case) for _ in range(count - 1))]
    graphs: dict[str, Any] = {"cublas": captured_graph([partial(library, case, one) for one in sets])}
    looked: dict[str, Any] = {}
    for arm, kernels in arms.items():
        offered = {
            f"{arm} {place}": captured_graph([kernel.bind(one) for one in sets]) for place, kernel in enumerate(kernels)
        }
        look = {name: min(times) for name, times in time_by_turns(offered, count, LOOK_ROUNDS).items()}
        looked[arm] = sorted(round(value, 2) for value in look.values())
        graphs |= {name: offered[name] for name in sorted(look, key=look.__getitem__)[:CONTENDERS]}
    return time_by_turns(graphs, count, rounds), looked


def run(directories: dict[str, Path], cases: dict[str, Case], rounds: int, checks: int, out: Path | None) -> int:
    """Check every kernel and time the cases; return 1 when a kernel is wrong."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.zeros(1, device="cuda")
    loaded = {arm: read_kernels(directory) for arm, directory in directories.items()}
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    for name, case in cases.items():
        arms = {arm: [one for one in kernels if one.entry["case"] == name] for arm, kernels in loaded.items()}
        right: dict[str, list[Kernel]] = {}
        errors: dict[str, list[float]] = {}
        for arm, kernels in arms.items():
            errors[arm] = [largest_error(case, kernel, checks) for kernel in kernels]
            right[arm] = [k for k, error in zip(kernels, errors[arm], strict=True) if error <= ERROR_MAX[case.dtype]]
            wrong += len(kernels) - len(right[arm])
        counts = {arm: f"{len(right[arm])} of {len(kernels)}" for arm, kernels in arms.items()}
        worst = {arm: max(values, default=0.0) for arm, values in errors.items()}
        found: dict[str, Any] = {"right": counts, "largest_error": worst}
        text = f"{name:32} right {counts}  error {worst}"
        if case.timed:
            times, found["first_look_us"] = measure(case, right, rounds)
            found["times_us"] = {arm: [round(value, 3) for value in values] for arm, values in times.items()}
            for arm in ("cublas", *arms):
                mine = [one for one in times if one.split()[0] == arm]
                if mine:
                    best = min(mine, key=lambda one: statistics.median(times[one]))
                    median, p95 = median_and_p95(times[best])
                    text += (
                        f"  {arm} {median:.2f} us (p95 {p95:.2f}; {2e-6 * case.m * case.n * case.k / median:.0f} TF)"
                    )
                    if arm != "cublas":
                        kernel = right[arm][int(best.split()[1])]
                        found[f"best_{arm}"] = {key: kernel.entry[key] for key in ("decision", "grid", "block")}
        results["cases"][name] = found
        print(text, flush=True)
        if out is not None:
            out.write_text(json.dumps(results) + "\n")
    return 1 if wrong else 0


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    building.add_argument("--candidates", type=int, default=64)
    building.add_argument("--odd", type=int, default=8, help="candidates of cases that are checked only")
    building.add_argument("--target", default="cuda:sm_90")
    running.add_argument("--before", type=Path)
    running.add_argument("--rounds", type=int, default=100)
    running.add_argument("--checks", type=int, default=2, help="fresh random inputs that each kernel is checked on")
    for command in (building, running):
        command.add_argument("--cases", default="", help="regular expression; all by default")
    arguments = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if re.search(arguments.cases, name)}
    if arguments.command == "build":
        build(arguments.directory, cases, arguments.target, arguments.candidates, arguments.odd)
    else:
        directories = {"now": arguments.directory} | ({"before": arguments.before} if arguments.before else {})
        sys.exit(run(directories, cases, arguments.rounds, arguments.checks, arguments.out))


if __name__ == "__main__":
    main()
