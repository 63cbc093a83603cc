"""Kernels of the GEMM template beside cuBLASLt on a Hopper GPU, each checked before it is timed.

    python -m benchmarks.kernels.bench_gemm_sm90 build DIR [--candidates 4]  anywhere with a CUDA compiler; needs no GPU
        [--template gemm_sm80 --target cuda:sm_90]                      kernels of mma.sync that an H200 runs
    python -m benchmarks.kernels.bench_gemm_sm90 run DIR [--rounds 100] [--cases REGEX] [--rest S] [--out FILE.json]
                                                                        on the GPU; needs no TVM

Shapes: the matmuls of BERT-base and GPT-2 small (its vocabulary's weights are [N, K], all others [K, N]) and of a Llama
of 1 billion parameters, with 1, 16, 128, 512 and 4096 rows, and 4096 cubed; in float16, and with 128 and 4096 rows in
int8 ("int8-...": requantised to int8, and 4096 cubed to int32 too) and float8_e4m3fn ("float8-...": to float16), whose
weights are [N, K]. `run` needs torch and cuda-bindings. Every kernel first runs on fresh random inputs into a poisoned
output, and is compared with a product in float32 (of 8 bits, in float64; integers must be equal). Then all arms of a
shape are timed in alternation, as CUDA graphs over rotating buffers that do not fit the L2 cache together:

- ours: the candidates that the template proposes, epilogue included; "first" is the one that is taken untuned;
- cublaslt: the algorithms that cuBLASLt's heuristic offers (up to 40), each with cuBLASLt's own epilogue; the three
  that are fastest in a first look are timed, and the best of them counts. Its gelu is the tanh form, ours the erf form.
  Of float8, it is asked for exact sums, as ours are, and beside them for those of the tensor cores alone ("fast
  accumulation"), which do not count: their error grows with K (`benchmarks.kernels.float8_sums`).

A kernel of ours may start while the one before it ends (dependent launch) and loads weights before it waits for it.
With `--rest S` the GPU is idle for S seconds before each turn of each arm, ours and theirs: a large matmul again and
again reaches the card's power limit, which then says how fast it is, whosever kernel it is.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
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
from benchmarks.kernels.cublaslt import CublasLt

ROWS = (1, 16, 128, 512, 4096)


@dataclass(frozen=True)
class Case:
    """C[rows, n] = epilogue(A[rows, k] @ B); B is [k, n], or [n, k] where `transposed`.

    Epilogues: "none", "bias", "gelu" (of the sum with a bias), "add" (a residual), "residual" (and a bias); of int8,
    "none" (the int32 sums) and "requantise" (times `SCALE`, rounded to int8).
    """

    rows: int
    n: int
    k: int
    epilogue: str
    transposed: bool = False
    operands: str = "float16"
    output: str = "float16"


CASES = {
    f"{name}-{rows}": Case(rows, *shape)
    for name, shape in {
        "bert-qkv": (2304, 768, "bias"),
        "bert-attention-output": (768, 768, "residual"),
        "bert-ffn-up": (3072, 768, "gelu"),
        "bert-ffn-down": (768, 3072, "residual"),
        "gpt2-vocabulary": (50257, 768, "none", True),
        "llama-qkv": (3072, 2048, "none"),
        "llama-attention-output": (2048, 2048, "add"),
        "llama-ffn-up": (16384, 2048, "none"),
        "llama-ffn-down": (2048, 8192, "add"),
        "llama-vocabulary": (32000, 2048, "none"),
    }.items()
    for rows in ROWS
} | {"square-4096": Case(4096, 4096, 4096, "none")}
EIGHT_BIT_CASES = {
    f"{prefix}-{name}-{rows}": Case(rows, n, k, epilogue, True, *dtypes)
    for name, n, k, of_float8 in (
        ("bert-qkv", 2304, 768, "bias"),
        ("bert-attention-output", 768, 768, "bias"),
        ("bert-ffn-up", 3072, 768, "bias"),
        ("bert-ffn-down", 768, 3072, "bias"),
        ("llama-qkv", 3072, 2048, "none"),
        ("llama-attention-output", 2048, 2048, "none"),
        ("llama-ffn-up", 16384, 2048, "none"),
        ("llama-ffn-down", 2048, 8192, "none"),
        ("square", 4096, 4096, "none"),
    )
    for prefix, epilogue, dtypes in (
        ("int8", "requantise", ("int8", "int8")),
        ("float8", of_float8, ("float8_e4m3fn", "float16")),
    )
    for rows in ((4096,) if name == "square" else (128, 4096))
} | {"int8-square-4096-sums": Case(4096, 4096, 4096, "none", True, "int8", "int32")}
ALL_CASES = CASES | EIGHT_BIT_CASES
BYTES = {"float16": 2, "int8": 1, "float8_e4m3fn": 1, "int32": 4}
# Relative error of a float16 result of a float32 sum: rounding the output gives 2.1e-4 on normal values. Of integers,
# the part of the elements that differ.
ERRORS_MAX = {"float16": 6e-4, "float8_e4m3fn": 6e-4, "int8": 0.0}
# Of "requantise": sums of random bytes stay in the range of int8 for the most part.
SCALE = 2.0**-13
FAST = "fast "
POISON = {"float16": math.nan, "int8": -77, "int32": -(2**30)}
BYTES_PER_TURN = 160_000_000
LAUNCHES_MAX = 128
ALGORITHMS = 40
ALGORITHMS_TIMED = 3


def build(directory: Path, cases: Sequence[str], candidates: int, template_name: str, target_text: str) -> None:
    """Compile the first candidates of every case and describe them in a manifest."""
    from relaxtune.schedules.errors import Refusal
    from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
    from relaxtune.schedules.registry import TEMPLATES
    from relaxtune.schedules.targets import resolve_target

    target, template = resolve_target(target_text), TEMPLATES[template_name]
    with cubin_writer(directory, target) as writer:
        for case in cases:
            func = fused_matmul(ALL_CASES[case]).with_attr(CONSTANT_PARAMS_ATTR, [1])
            found = template.candidates(func, target)
            if isinstance(found, Refusal):
                sys.exit(f"{case}: {found.reason}")
            for parameters in found[:candidates]:
                kernel = template.apply(func, target, parameters)
                writer.add(kernel, case=case, decision=parameters.to_json())
            print(f"{case}: {min(candidates, len(found))} of {len(found)} candidates built", file=sys.stderr)


def fused_matmul(case: Case) -> Any:
    """Return the function of a case as FuseTIR leaves it."""
    from tvm import te, tirx

    rows, n, k = case.rows, case.n, case.k
    sums = "int32" if case.operands == "int8" else "float32"
    a = te.placeholder((rows, k), case.operands, name="A")
    b = te.placeholder((n, k) if case.transposed else (k, n), case.operands, name="B")
    bias, residual = te.placeholder((n,), "float32", name="bias"), te.placeholder((rows, n), "float16", name="residual")
    over = te.reduce_axis((0, k), name="k")
    half = tirx.const(0.5, "float32")

    def product(i: Any, j: Any) -> Any:
        right = b[j, over] if case.transposed else b[over, j]
        return te.sum(a[i, over].astype(sums) * right.astype(sums), axis=over)

    def finish(i: Any, j: Any) -> Any:
        x = value[i, j]
        if case.epilogue == "gelu":
            x = x * (half + te.erf(x * tirx.const(0.5**0.5, "float32")) * half)
        if case.epilogue in ("add", "residual"):
            x = x + residual[i, j].astype("float32")
        if case.epilogue == "requantise":
            x = te.nearbyint(x.astype("float32") * tirx.const(SCALE, "float32"))
            x = tirx.max(tirx.min(x, tirx.const(127.0, "float32")), tirx.const(-128.0, "float32"))
        return x if case.output == "float32" else x.astype(case.output)

    bare = case.epilogue == "none" and case.output == sums
    value = total = te.compute((rows, n), product, name="output" if bare else "matmul")
    params = [a, b]
    if bare:
        return te.create_prim_func([*params, total])
    if case.epilogue in ("bias", "gelu", "residual"):
        value = te.compute((rows, n), lambda i, j: total[i, j] + bias[j], name="biased")
        params.append(bias)
    if case.epilogue in ("add", "residual"):
        params.append(residual)
    return te.create_prim_func([*params, te.compute((rows, n), finish, name="output")])


def inputs(case: Case) -> dict[str, Any]:
    """Return random tensors of a case, and a poisoned output."""
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.float16)

    def operand(*shape: int, scale: float = 1.0) -> Any:
        if case.operands == "int8":
            return torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
        return normal(*shape).mul_(scale) if case.operands == "float16" else normal(*shape).to(torch.float8_e4m3fn)

    rows, n, k = case.rows, case.n, case.k
    tensors = {
        "A": operand(rows, k),
        "B": operand(*((n, k) if case.transposed else (k, n)), scale=k**-0.5),
        "output": torch.full((rows, n), POISON[case.output], device="cuda", dtype=getattr(torch, case.output)),
    }
    if case.epilogue in ("bias", "gelu", "residual"):
        tensors["bias"] = normal(n).float()
    if case.epilogue in ("add", "residual"):
        tensors["residual"] = normal(rows, n)
    return tensors


def expected(case: Case, tensors: dict[str, Any]) -> Any:
    """Return what a case is, in float32 or, of 8 bits, in float64."""
    import torch

    wide = torch.float32 if case.operands == "float16" else torch.float64
    b = tensors["B"].to(wide)
    value = tensors["A"].to(wide) @ (b.t() if case.transposed else b)
    if case.epilogue == "requantise":
        return (value.float() * SCALE).round().clamp(-128, 127)
    if "bias" in tensors:
        value += tensors["bias"]
    if case.epilogue == "gelu":
        return torch.nn.functional.gelu(value)
    return value.add_(tensors["residual"]) if "residual" in tensors else value


def largest_errors(case: Case, kernels: dict[str, Kernel], checks: int) -> dict[str, float]:
    """Return each kernel's largest relative error over fresh inputs; NaN when an output was not written.

    Of integers, it is the part of the elements that differ.
    """
    import torch

    errors = dict.fromkeys(kernels, 0.0)
    for _ in range(checks):
        tensors = inputs(case)
        right = expected(case, tensors)
        exact = case.operands == "int8"
        norm = right.norm()
        for name, kernel in kernels.items():
            tensors["output"].fill_(POISON[case.output])
            kernel.bind(tensors)()
            found = tensors["output"]
            error = float((found != right).double().mean() if exact else (found - right).norm() / norm)
            torch.cuda.synchronize()
            errors[name] = error if math.isnan(error) or error > errors[name] else errors[name]
    return errors


def graphs_of(case: Case, kernels: dict[str, Kernel], library: CublasLt) -> tuple[dict[str, Any], int, Any]:
    """Return a captured graph for every arm, the launches in one, and what must live as long as the graphs."""
    first = inputs(case)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    count = min(LAUNCHES_MAX, max(2, math.ceil(BYTES_PER_TURN / size)))
    sets = [first, *(inputs(case) for _ in range(count - 1))]
    graphs = {}
    for decision, kernel in kernels.items():
        graphs[decision] = captured_graph([kernel.bind(tensors) for tensors in sets])
    bias = [tensors["bias"].half() if "bias" in tensors else None for tensors in sets]
    problems = []
    for counts in (True, False) if case.operands.startswith("float8") else (True,):
        problem = library.problem(
            case.rows,
            case.n,
            case.k,
            case.epilogue,
            transposed=case.transposed,
            operands=case.operands,
            output=case.output,
            scale=SCALE if case.epilogue == "requantise" else 1.0,
            exact_sums=counts,
        )
        problems.append(problem)
        offered = {}
        for number, algorithm in enumerate(problem.algorithms(ALGORITHMS)):
            launches = [partial(problem.launch, algorithm, *one) for one in zip(sets, bias, strict=True)]
            offered[f"cublaslt {'' if counts else FAST}{number}"] = captured_graph(launches)
        looked = time_by_turns(offered, count, 3)
        fastest = sorted(offered, key=lambda name: min(looked[name]))[:ALGORITHMS_TIMED]
        graphs |= {name: offered[name] for name in fastest}
    return graphs, count, (sets, bias, problems)


def run(directory: Path, cases: str, *, rounds: int, rest_s: float, checks: int, out: Path | None) -> int:
    """Check and time every kernel of the cases that match; return 1 when one is wrong."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    library = CublasLt()
    loaded = [kernel for kernel in read_kernels(directory) if re.search(cases, kernel.entry["case"])]
    if not loaded:
        sys.exit(
            f"{directory} has kernels of no case that matches {cases!r}; build them first, or look at its manifest"
        )
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cublaslt": library.version,
        "rest_s": rest_s,
        "cases": {},
    }
    ratios: dict[str, list[float]] = {"best": [], "first": []}
    wrong = 0
    for case in dict.fromkeys(kernel.entry["case"] for kernel in loaded):
        kernels = {kernel.entry["decision"]: kernel for kernel in loaded if kernel.entry["case"] == case}
        allowed = ERRORS_MAX[ALL_CASES[case].operands]
        errors = largest_errors(ALL_CASES[case], kernels, checks)
        right = {decision: kernel for decision, kernel in kernels.items() if errors[decision] <= allowed}
        wrong += len(kernels) - len(right)
        graphs, launches, _alive = graphs_of(ALL_CASES[case], right, library)
        times = time_by_turns(graphs, launches, rounds, rest_s)
        rounded = {name: [round(value, 3) for value in values] for name, values in times.items()}
        results["cases"][case] = {"launches_a_graph": launches, "errors": errors, "times_us": rounded}
        ours = {name: statistics.median(times[name]) for name in right}
        theirs = {name: statistics.median(times[name]) for name in times if name not in right and FAST not in name}
        if not ours:
            print(f"{case}: no kernel is right: {errors}", flush=True)
            continue
        best, other = min(ours, key=ours.__getitem__), min(theirs, key=theirs.__getitem__)
        ratios["best"].append(theirs[other] / ours[best])
        ratios["first"].append(theirs[other] / ours.get(next(iter(kernels)), math.inf))
        print(_line(case, times, list(kernels), best, other), flush=True)
        fast = [statistics.median(values) for name, values in times.items() if FAST in name]
        if fast:
            print(f"  cublaslt's fast accumulation: {min(fast):.2f} us", flush=True)
        if len(right) < len(kernels):
            print("  wrong:", {name: error for name, error in errors.items() if name not in right}, flush=True)
        del graphs, _alive
        if out is not None:
            out.write_text(json.dumps(results) + "\n")
    for name, values in ratios.items():
        mean = math.exp(statistics.fmean(math.log(max(value, 1e-9)) for value in values))
        print(f"cublaslt's time over ours ({name} candidate), geometric mean of {len(values)}: {mean:.3f}")
    return 1 if wrong else 0


def _line(case: str, times: dict[str, list[float]], decisions: list[str], best: str, other: str) -> str:
    shape = ALL_CASES[case]
    ours, p95 = median_and_p95(times[best])
    theirs, theirs_p95 = median_and_p95(times[other])
    first = statistics.median(times.get(decisions[0], [math.inf]))
    teraflops = 2e-6 * shape.rows * shape.n * shape.k / ours
    read = BYTES[shape.operands] * (shape.rows * shape.k + shape.n * shape.k)
    moved = read + BYTES[shape.output] * shape.rows * shape.n
    gigabytes = 1e-3 * moved / ours
    return (
        f"{case:27} ours {ours:7.2f} us (p95 {p95:.2f})  first {first:7.2f}  {other} {theirs:7.2f} ({theirs_p95:.2f})  "
        f"x{theirs / ours:.2f}  {teraflops:.0f} TFLOP/s  {gigabytes:.0f} GB/s  "
        f"candidate {decisions.index(best) + 1} of {len(decisions)}: {best}"
    )


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    for command in (building, running):
        command.add_argument("--cases", default="", help="regular expression; all by default")
    building.add_argument("--candidates", type=int, default=4)
    building.add_argument("--template", default="gemm_sm90")
    building.add_argument("--target", default="cuda:sm_90a")
    running.add_argument("--rounds", type=int, default=100)
    running.add_argument("--rest", type=float, default=0.0, help="seconds that the GPU is idle before each turn")
    running.add_argument("--checks", type=int, default=20, help="fresh random inputs that each kernel is checked on")
    arguments = parser.parse_args()
    if arguments.command == "build":
        cases = [case for case in ALL_CASES if re.search(arguments.cases, case)]
        build(arguments.directory, cases, arguments.candidates, arguments.template, arguments.target)
    else:
        sys.exit(
            run(
                arguments.directory,
                arguments.cases,
                rounds=arguments.rounds,
                rest_s=arguments.rest,
                checks=arguments.checks,
                out=arguments.out,
            )
        )


if __name__ == "__main__":
    main()
