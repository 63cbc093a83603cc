"""Variants of the GEMM on mma.sync at BERT's and ViT's sizes, beside torch and cuBLASLt with and without wgmma.

    python -m benchmarks.kernels.bench_gemm_sm80 build DIR [--target cuda:sm_90] [--candidates 12] [--jobs 8]
                                                                        needs a CUDA compiler, no GPU
    python -m benchmarks.kernels.bench_gemm_sm80 run DIR [--rounds 20] [--cases REGEX] [--out FILE.json]
                                                                        on the GPU; needs no TVM

Code for sm_80 does not run on an H200 but by PTX, so that kernels are built for sm_90, which has no wgmma either. Each
kernel is compared with a product in float32 on fresh inputs before it is timed. Arms of a shape, timed in alternation
as CUDA graphs over buffers that do not fit the L2 cache together:

- first, N: the candidates that the template proposes, in their order; "first" is what is taken untuned;
- powers of two: the first candidate whose tile is as high as a power of two, where it is not among those;
- split N: candidates in which blocks share the sum of a tile;
- torch: `torch.matmul`, without the epilogue; cublaslt: what its heuristic takes first; cublaslt without wgmma: the
  fastest of all its algorithms whose kernels are older than Hopper, both with its own epilogue.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels.bench_gemm_sm90 import BYTES_PER_TURN, ERRORS_MAX, Case, fused_matmul, inputs, largest_errors
from benchmarks.kernels.cubins import (
    Kernel,
    build_and_run_parser,
    captured_graph,
    cubin_writer,
    read_kernels,
    time_by_turns,
)
from benchmarks.kernels.cublaslt import CublasLt, fastest_without_wgmma

CASES = {
    f"{name}-{rows}": Case(rows, *shape)
    for name, shape in {
        "qkv": (2304, 768, "bias"),
        "attention-output": (768, 768, "residual"),
        "ffn-up": (3072, 768, "gelu"),
        "ffn-down": (768, 3072, "residual"),
    }.items()
    for rows in (128, 512, 1024, 1576, 4096)
}
_SPLITS, _CHECKS, _LAUNCHES_MAX = 4, 3, 64
_FIRST, _OTHER_HEIGHT = "first", "powers of two"


def build(directory: Path, target: str, candidates: int, cases: list[str], jobs: int) -> None:
    """Compile the arms of the cases, each into a folder of its own, so many side by side."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for made in [pool.submit(build_case, directory / case, case, target, candidates) for case in cases]:
            print(made.result(), file=sys.stderr, flush=True)


def build_case(directory: Path, case: str, target_text: str, candidates: int) -> str:
    """Compile the arms of a case and describe them in a manifest; return a line of what was built."""
    from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
    from relaxtune.schedules.registry import TEMPLATES
    from relaxtune.schedules.targets import resolve_target

    target, template = resolve_target(target_text), TEMPLATES["gemm_sm80"]
    func = fused_matmul(CASES[case]).with_attr(CONSTANT_PARAMS_ATTR, [1])
    arms = arms_of([one for one in template.candidates(func, target)], candidates)
    with cubin_writer(directory, target) as writer:
        for arm, parameters in arms.items():
            writer.add(template.apply(func, target, parameters), case=case, arm=arm, decision=parameters.to_json())
    return f"{case}: {len(arms)} kernels"


def arms_of(found: list[Any], candidates: int) -> dict[str, Any]:
    """Return candidates by the names of their arms."""
    whole, split = ([one for one in found if (one.split_k > 1) is shared] for shared in (False, True))
    arms = {_FIRST if number == 0 else str(number): one for number, one in enumerate(whole[:candidates])}
    powers = [one for one in whole if one.block_m & (one.block_m - 1) == 0]
    if powers and powers[0] not in arms.values():
        arms[_OTHER_HEIGHT] = powers[0]
    return arms | {f"split {number}": one for number, one in enumerate(split[:_SPLITS])}


def graphs_of(case: Case, kernels: dict[str, Kernel], library: CublasLt) -> tuple[dict[str, Any], int, Any]:
    """Return a captured graph for every arm, the launches in one, and what must live as long as the graphs."""
    import torch

    first = inputs(case)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    count = min(_LAUNCHES_MAX, max(4, math.ceil(BYTES_PER_TURN / size)))
    sets = [first, *(inputs(case) for _ in range(count - 1))]
    graphs = {arm: captured_graph([kernel.bind(tensors) for tensors in sets]) for arm, kernel in kernels.items()}
    graphs["torch"] = captured_graph([partial(torch.matmul, one["A"], one["B"], out=one["output"]) for one in sets])
    bias = [one["bias"].half() for one in sets]
    problem = library.problem(case.rows, case.n, case.k, case.epilogue, transposed=case.transposed)
    chosen = {"cublaslt": problem.algorithms(1)[0]}
    old, note = fastest_without_wgmma(problem, partial(_launch, problem, first, bias[0]))
    if old is not None:
        chosen["cublaslt without wgmma"] = old
    for arm, algorithm in chosen.items():
        launches = [partial(problem.launch, algorithm, *one) for one in zip(sets, bias, strict=True)]
        graphs[arm] = captured_graph(launches)
    return graphs, count, (sets, bias, problem, note)


def _launch(problem: Any, tensors: dict[str, Any], bias: Any, algorithm: Any) -> None:
    problem.launch(algorithm, tensors, bias)


def run(directory: Path, cases: list[str], rounds: int, out: Path | None) -> int:
    """Check and time every arm of the cases; return 1 when one is wrong."""
    import torch

    library, wrong = CublasLt(), 0
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cublaslt": library.version,
        "cases": {},
    }
    for case in cases:
        kernels = {one.entry["arm"]: one for one in read_kernels(directory / case)}
        errors = largest_errors(CASES[case], kernels, _CHECKS)
        bad = [arm for arm, error in errors.items() if not error <= ERRORS_MAX["float16"]]
        wrong += len(bad)
        right = {arm: kernel for arm, kernel in kernels.items() if arm not in bad}
        graphs, count, alive = graphs_of(CASES[case], right, library)
        times = time_by_turns(graphs, count, rounds)
        results["cases"][case] = {
            "errors": errors,
            "decisions": {arm: kernel.entry["decision"] for arm, kernel in kernels.items()},
            "without_wgmma": alive[-1],
            "times_us": {arm: [round(value, 3) for value in values] for arm, values in times.items()},
        }
        print(line_of(case, times, list(right), bad), flush=True)
        del graphs, alive
        torch.cuda.empty_cache()
        if out is not None:
            out.write_text(json.dumps(results) + "\n")
    return 1 if wrong else 0


def line_of(case: str, times: dict[str, list[float]], ours: list[str], bad: list[str]) -> str:
    """Return what is printed of a case: medians in microseconds."""
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    best = min(ours, key=medians.__getitem__)
    splits = [medians[arm] for arm in ours if arm.startswith("split")]
    told = {
        "first": medians.get(_FIRST),
        "best": medians[best],
        "powers of two": medians.get(_OTHER_HEIGHT),
        "split": min(splits) if splits else None,
        **{arm: median for arm, median in medians.items() if arm not in ours},
    }
    text = "  ".join(f"{name} {value:.2f}" for name, value in told.items() if value is not None)
    teraflops = 2e-6 * CASES[case].rows * CASES[case].n * CASES[case].k / medians[best]
    return f"{case:22} {text}  best is {best}, {teraflops:.0f} TFLOP/s{f'  WRONG: {bad}' if bad else ''}"


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    for command in (building, running):
        command.add_argument("--cases", default="", help="regular expression; all by default")
    building.add_argument("--target", default="cuda:sm_90")
    building.add_argument("--candidates", type=int, default=12)
    building.add_argument("--jobs", type=int, default=2)
    running.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    cases = [case for case in CASES if re.search(arguments.cases, case)]
    if arguments.command == "build":
        build(arguments.directory, arguments.target, arguments.candidates, cases, arguments.jobs)
        return
    built = [case for case in cases if (arguments.directory / case).is_dir()]
    if not built:
        sys.exit(f"{arguments.directory} has kernels of no case that matches {arguments.cases!r}; build them first")
    sys.exit(run(arguments.directory, built, arguments.rounds, arguments.out))


if __name__ == "__main__":
    main()
