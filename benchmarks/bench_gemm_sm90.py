"""Kernels of the GEMM template beside cuBLAS on a Hopper GPU, at BERT-base's shapes, each checked before it is timed.

    python benchmarks/bench_gemm_sm90.py build DIR [--candidates 8]     anywhere with a CUDA compiler; needs no GPU
    python benchmarks/bench_gemm_sm90.py run DIR [--rounds 100] [--out FILE.json]       on the GPU; needs no TVM

`run` needs torch and cuda-bindings. Every kernel first runs on fresh random inputs into an output full of NaN, and is
compared with a float32 product. Then all arms of a shape are timed by turns, as CUDA graphs over rotating buffers that
do not fit the L2 cache together:

- ours: the candidates that the template proposes, epilogue included;
- cublas: `torch.matmul` alone, without any epilogue (a floor for a library with every epilogue built in);
- torch: `torch.addmm` with the bias, and what else the epilogue needs in further kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cubins import Kernel, captured_graph, cubin_writer, read_kernels, time_by_turns

# name -> rows M, columns N, depth K, epilogue
CASES = {
    f"{name}-{rows}": (rows, n, k, epilogue)
    for rows in (128, 4096)
    for name, n, k, epilogue in (
        ("qkv", 2304, 768, "bias"),
        ("attention-output", 768, 768, "residual"),
        ("ffn-up", 3072, 768, "gelu"),
        ("ffn-down", 768, 3072, "residual"),
    )
}
CHECKS = 20
# Relative error of a float16 result of a float32 sum: rounding the output gives 2.1e-4 on normal values.
ERROR_MAX = 6e-4
BYTES_PER_TURN = 160_000_000
LAUNCHES_PER_GRAPH = 24


def build(directory: Path, candidates: int) -> None:
    """Compile the first candidates of every case and describe them in a manifest."""
    from schedules.targets import resolve_target
    from schedules.templates.base import Refusal
    from schedules.templates.gemm_sm90 import CONSTANT_PARAMS_ATTR, GemmSm90

    target, template = resolve_target("cuda:sm_90a"), GemmSm90()
    with cubin_writer(directory, target) as writer:
        for case, (rows, n, k, epilogue) in CASES.items():
            func = fused_matmul(rows, n, k, epilogue).with_attr(CONSTANT_PARAMS_ATTR, [1])
            found = template.candidates(func, target)
            if isinstance(found, Refusal):
                sys.exit(f"{case}: {found.reason}")
            for parameters in found[:candidates]:
                kernel = template.apply(func, target, parameters)
                writer.add(kernel, case=case, decision=parameters.to_json())
            print(f"{case}: {min(candidates, len(found))} of {len(found)} candidates built", file=sys.stderr)


def fused_matmul(rows: int, n: int, k: int, epilogue: str) -> Any:
    """Return float16 `A[rows, k] @ B[k, n] + bias`, then gelu or a residual, as FuseTIR leaves it."""
    from tvm import te, tirx

    a, b = te.placeholder((rows, k), "float16", name="A"), te.placeholder((k, n), "float16", name="B")
    bias, residual = te.placeholder((n,), "float32", name="bias"), te.placeholder((rows, n), "float16", name="residual")
    over = te.reduce_axis((0, k), name="k")
    half = tirx.const(0.5, "float32")

    def product(i: Any, j: Any) -> Any:
        return te.sum(a[i, over].astype("float32") * b[over, j].astype("float32"), axis=over)

    def finish(i: Any, j: Any) -> Any:
        x = biased[i, j]
        if epilogue == "gelu":
            x = x * (half + te.erf(x * tirx.const(0.5**0.5, "float32")) * half)
        if epilogue == "residual":
            x = x + residual[i, j].astype("float32")
        return x.astype("float16")

    total = te.compute((rows, n), product, name="matmul")
    biased = te.compute((rows, n), lambda i, j: total[i, j] + bias[j], name="biased")
    output = te.compute((rows, n), finish, name="output")
    return te.create_prim_func([a, b, bias, *([residual] if epilogue == "residual" else []), output])


def inputs(case: str) -> dict[str, Any]:
    """Return random tensors of a case, and an output full of NaN."""
    import torch

    rows, n, k, epilogue = CASES[case]
    tensors = {
        "A": torch.randn(rows, k, device="cuda").half(),
        "B": (torch.randn(k, n, device="cuda") / k**0.5).half(),
        "bias": torch.randn(n, device="cuda"),
        "output": torch.full((rows, n), float("nan"), device="cuda", dtype=torch.float16),
    }
    if epilogue == "residual":
        tensors["residual"] = torch.randn(rows, n, device="cuda").half()
    return tensors


def composed(case: str, tensors: dict[str, Any], product: Any) -> Any:
    """Return the epilogue of a case over a product with the bias added."""
    import torch

    epilogue = CASES[case][3]
    if epilogue == "gelu":
        return torch.nn.functional.gelu(product)
    return product + tensors["residual"].to(product.dtype) if epilogue == "residual" else product


def largest_error(case: str, kernel: Kernel) -> float:
    """Return the largest relative error over fresh inputs; NaN when an output was not written."""
    import torch

    worst = 0.0
    for _ in range(CHECKS):
        tensors = inputs(case)
        kernel.bind(tensors)()
        expected = composed(case, tensors, tensors["A"].float() @ tensors["B"].float() + tensors["bias"])
        error = float((tensors["output"].float() - expected).norm() / expected.norm())
        torch.cuda.synchronize()
        worst = error if error != error else max(worst, error)
        if worst != worst:
            break
    return worst


def graphs_of(case: str, kernels: dict[str, Kernel]) -> tuple[dict[str, Any], int, Any]:
    """Return a captured graph for every arm, the launches in one, and what must live as long as the graphs."""
    import torch

    first = inputs(case)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    sets = [first, *(inputs(case) for _ in range(max(1, min(LAUNCHES_PER_GRAPH, BYTES_PER_TURN // size))))]
    bias = [tensors["bias"].half() for tensors in sets]
    arms: dict[str, Callable[[int], Any]] = {
        "cublas": lambda i: torch.matmul(sets[i]["A"], sets[i]["B"], out=sets[i]["output"]),
        "torch": lambda i: composed(case, sets[i], torch.addmm(bias[i], sets[i]["A"], sets[i]["B"])),
    }
    for decision, kernel in kernels.items():
        bound = [kernel.bind(tensors) for tensors in sets]
        arms[decision] = lambda i, bound=bound: bound[i]()
    repeats = max(1, LAUNCHES_PER_GRAPH // len(sets))
    graphs = {
        name: captured_graph([partial(arm, i % len(sets)) for i in range(len(sets) * repeats)])
        for name, arm in arms.items()
    }
    return graphs, len(sets) * repeats, (sets, bias)


def run(directory: Path, rounds: int, out: Path | None) -> int:
    """Check and time every kernel; return 1 when one is wrong."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    loaded = read_kernels(directory)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    for case in CASES:
        kernels = {kernel.entry["decision"]: kernel for kernel in loaded if kernel.entry["case"] == case}
        errors = {decision: largest_error(case, kernel) for decision, kernel in kernels.items()}
        right = {decision: kernel for decision, kernel in kernels.items() if errors[decision] <= ERROR_MAX}
        wrong += len(kernels) - len(right)
        graphs, launches, _alive = graphs_of(case, right)
        times = time_by_turns(graphs, launches, rounds)
        results["cases"][case] = {"errors": errors, "times_us": times}
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = min(right, key=lambda decision: medians[decision])
        place = list(kernels).index(best) + 1
        print(
            f"{case:22} ours {medians[best]:7.2f} us (p95 {sorted(times[best])[int(0.95 * rounds)]:.2f})  "
            f"cublas {medians['cublas']:7.2f}  torch {medians['torch']:7.2f}  "
            f"wrong {len(kernels) - len(right)}/{len(kernels)}  candidate {place}: {best}",
            flush=True,
        )
    if out is not None:
        out.write_text(json.dumps(results, indent=1))
    return 1 if wrong else 0


def main() -> None:
    """Build or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building, running = commands.add_parser("build"), commands.add_parser("run")
    for command in (building, running):
        command.add_argument("directory", type=Path)
    building.add_argument("--candidates", type=int, default=8)
    running.add_argument("--rounds", type=int, default=100)
    running.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory, arguments.candidates)
    else:
        sys.exit(run(arguments.directory, arguments.rounds, arguments.out))


if __name__ == "__main__":
    main()
