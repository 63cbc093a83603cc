"""How exact sums of float8 products are on a Hopper GPU: the GEMM template, and both ways of cuBLASLt.

    python -m benchmarks.kernels.float8_sums build DIR                      anywhere with a CUDA compiler; needs no GPU
    python -m benchmarks.kernels.float8_sums run DIR
        [--out FILE.json]      on the GPU; needs torch and cuda-bindings, no TVM

C[256, 256] = A @ B^T of float8_e4m3fn in float32, with sums of K = 128 to 16384 products: of normal numbers, where
terms of both signs cancel, and of numbers between 0 and 1, where sums grow. Printed: ||C - right|| / ||right||, and the
mean of C / right - 1 over large elements (a drift to smaller sums is truncation), `right` being the product of the same
float8 numbers in float64; and the same of a float32 product, which is what float32 sums would give.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels.bench_gemm_sm90 import Case, fused_matmul
from benchmarks.kernels.cubins import build_and_run_parser, cubin_writer, read_kernels
from benchmarks.kernels.cublaslt import CublasLt

SIZE = 256
DEPTHS = (128, 512, 2048, 8192, 16384)
DISTRIBUTIONS = ("normal", "positive")
CHECKS = 20
_CASE = Case(SIZE, SIZE, 128, "none", True, "float8_e4m3fn", "float32")


def build(directory: Path) -> None:
    """Compile one kernel of each depth, whose sum no cluster shares, and describe them in a manifest."""
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
    from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90

    target = resolve_target("cuda:sm_90a")
    with cubin_writer(directory, target) as writer:
        for depth in DEPTHS:
            kernel = GemmSm90().apply(fused_matmul(replace(_CASE, k=depth)), target, GemmParameters(64, 64, 4, 1))
            writer.add(kernel, depth=depth)


def operand(distribution: str, depth: int) -> Any:
    """Return a random matrix [SIZE, depth] of float8_e4m3fn."""
    import torch

    draw = torch.randn if distribution == "normal" else torch.rand
    return draw(SIZE, depth, device="cuda").to(torch.float8_e4m3fn)


def library_product(library: CublasLt, depth: int, tensors: dict[str, Any], *, exact: bool) -> None:
    """Launch cuBLASLt's favourite algorithm."""
    problem = library.problem(
        SIZE,
        SIZE,
        depth,
        "none",
        transposed=True,
        operands=_CASE.operands,
        output=_CASE.output,
        exact_sums=exact,
    )
    problem.launch(problem.algorithms(1)[0], tensors, None)


def run(directory: Path, out: Path | None) -> None:
    """Print the errors of every arm."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    library, results = CublasLt(), []
    kernels = {kernel.entry["depth"]: kernel for kernel in read_kernels(directory)}
    for distribution in DISTRIBUTIONS:
        for depth, kernel in kernels.items():
            errors: dict[str, list[tuple[float, float]]] = {}
            for _ in range(CHECKS):
                a, b = operand(distribution, depth), operand(distribution, depth)
                right = a.double() @ b.double().t()
                output = torch.full((SIZE, SIZE), float("nan"), device="cuda")
                tensors = {"A": a, "B": b, "output": output}
                arms = {
                    "template": kernel.bind(tensors),
                    "cublaslt, fast": partial(library_product, library, depth, tensors, exact=False),
                    "cublaslt, exact": partial(library_product, library, depth, tensors, exact=True),
                }
                for name, launch in arms.items():
                    output.fill_(float("nan"))
                    launch()
                    errors.setdefault(name, []).append(_errors(output, right))
                errors.setdefault("float32", []).append(_errors(a.float() @ b.float().t(), right))
            for name, found in errors.items():
                largest = max(error for error, _ in found)
                drift = sum(one for _, one in found) / len(found)
                results.append([distribution, depth, name, largest, drift])
                print(f"{distribution:9} K={depth:<6} {name:16} error {largest:.2e}  drift {drift:+.2e}", flush=True)
    if out is not None:
        names = ["distribution", "depth", "arm", "error", "drift"]
        document = {"device": torch.cuda.get_device_name(), "cublaslt": library.version, "checks": CHECKS}
        document["results"] = [dict(zip(names, one, strict=True)) for one in results]
        out.write_text(json.dumps(document, indent=1) + "\n")


def _errors(found: Any, right: Any) -> tuple[float, float]:
    """Return the relative error, and the mean relative deviation where sums are not near 0."""
    error = float((found - right).norm() / right.norm())
    large = right.abs() > right.abs().mean()
    return error, float((found[large] / right[large] - 1).mean())


def main() -> None:
    """Build or run."""
    parser, _, _ = build_and_run_parser(__doc__)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory)
    else:
        run(arguments.directory, arguments.out)


if __name__ == "__main__":
    main()
