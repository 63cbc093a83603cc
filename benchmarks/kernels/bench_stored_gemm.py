"""Matmuls of more than 16 rows by 4- and 8-bit weights on mma.sync: dequantised in the kernel, or by one before it.

    python -m benchmarks.kernels.bench_stored_gemm build DIR [--arch sm_90] [--candidates 3]     needs no GPU
    python -m benchmarks.kernels.bench_stored_gemm run DIR [--rounds 20] [--cases REGEX] [--out FILE.json]

`run` needs a GPU, torch and cuda-bindings, no TVM. Arms, each of which is compared with float64 on fresh inputs first,
and timed in alternation with the others, as CUDA graphs over more weights than the L2 cache holds:

- stored: the first candidates of `gemm_sm80` for the quantised matmul (the first is what a compilation takes);
- apart: the kernel that writes the weight in float16, then the first candidate of `gemm_sm80` by that;
- torch: `torch.nn.functional.linear` in float16, without any dequantisation.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.kernels.bench_gemv import BYTES_IN_TURN, Case, expected_of, function_of, output_of, random_tensors
from benchmarks.kernels.cubins import (
    Kernel,
    build_and_run_parser,
    captured_graph,
    cubin_writer,
    median_and_p95,
    read_kernels,
    time_by_turns,
)

# Relative error of a float16 result of float32 sums by weights that are rounded to float16.
ERROR_MAX = 6e-4
SETS_MAX = 24
SHAPES = ((4096, 4096), (8192, 2048), (2048, 8192))
CASES = [
    *(Case(m, n, k, bits) for m, (n, k), bits in product((32, 64, 128, 192, 256, 512, 2048), SHAPES, (4, 8))),
    # Edges: rows that no tile divides, groups shorter than a stage, all epilogues.
    *(Case(m, 1000, 800, bits, group, timed=False) for m, bits, group in product((17, 300), (4, 8), (32, 96, 800))),
    *(Case(129, 512, 256, bits, 128, "residual", timed=False) for bits in (4, 8)),
]
Launch = Callable[[], Any]


def dequantisation_of(case: Case) -> Any:
    """Return the PrimFunc (bytes, scales) -> weight [N, K] in float16."""
    from tvm import te

    from relaxtune.schedules.functions.quantised_matmul import dequantise_rows
    from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR

    packed = te.placeholder((case.n, case.k * case.bits // 8), "uint8", name="packed")
    scales = te.placeholder((-(-case.k // case.group), case.n), "float16", name="scales")
    weight = dequantise_rows(case.k, case.bits, case.group, "float16")(packed, scales)
    func = te.create_prim_func([packed, scales, weight], index_dtype_override="int64")
    return func.with_attr(CONSTANT_PARAMS_ATTR, [0, 1])


def build(directory: Path, arch: str, candidates: int, cases: str) -> None:
    """Compile the arms of every case and describe them in a manifest."""
    from relaxtune.schedules.registry import TEMPLATES
    from relaxtune.schedules.targets import resolve_target

    target = resolve_target(f"cuda:{arch}")
    with cubin_writer(directory, target) as writer:

        def add(case: Case, template: str, func: Any, count: int, arm: str) -> None:
            found = TEMPLATES[template].candidates(func, target)
            if not isinstance(found, list):
                sys.exit(f"{case.name}: {template}: {found}")
            for number, parameters in enumerate(found[:count]):
                kernel = TEMPLATES[template].apply(func, target, parameters)
                writer.add(kernel, case=case.name, arm=f"{arm} {number}", decision=parameters.to_json())

        for case in CASES:
            if not re.search(cases, case.name):
                continue
            add(case, "gemm_sm80", function_of(case), candidates, "stored")
            if case.timed:
                add(case, "elementwise", dequantisation_of(case), 1, "dequantise")
                add(case, "gemm_sm80", function_of(Case(case.m, case.n, case.k, 16)), 1, "multiply")
            print(f"{case.name}: built", file=sys.stderr)


def launches_of(kernels: dict[str, Kernel], tensors: dict[str, Any], output: Any) -> dict[str, Launch]:
    """Return each arm's launches, of one or two kernels, on some tensors."""
    import torch

    def bound(arm: str, written: Any) -> Launch:
        return kernels[arm].bind({**tensors, kernels[arm].entry["params"][-1][0]: written})

    arms = {arm: bound(arm, output) for arm in kernels if arm.startswith("stored")}
    if "multiply 0" in kernels:
        weight = torch.empty(output.shape[1], tensors["x"].shape[1], device="cuda", dtype=torch.float16)
        tensors["w"] = weight
        first, second = bound("dequantise 0", weight), bound("multiply 0", output)

        def apart() -> None:
            first()
            second()

        arms["apart"] = apart
        arms["torch"] = partial(torch.nn.functional.linear, tensors["x"], weight)
    return arms


def errors_of(case: Case, kernels: dict[str, Kernel]) -> dict[str, float]:
    """Return each arm's relative error on fresh inputs, NaN where an output was not written."""
    errors = {}
    for shift in (0, 4):
        tensors, output = random_tensors(case, shift), output_of(case)
        expected = expected_of(case, tensors)
        for arm, launch in launches_of(kernels, tensors, output).items():
            if arm == "torch":
                continue
            output.fill_(float("nan"))
            launch()
            error = float((output.float() - expected).norm() / expected.norm())
            errors[arm] = error if error != error else max(error, errors.get(arm, 0.0))
    return errors


def run(directory: Path, rounds: int, cases: str, out: Path | None) -> int:
    """Check and time every arm; return 1 when one is wrong."""
    import torch

    torch.zeros(1, device="cuda")
    loaded = read_kernels(directory)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    for case in CASES:
        kernels = {one.entry["arm"]: one for one in loaded if one.entry["case"] == case.name}
        if not kernels or not re.search(cases, case.name):
            continue
        errors = errors_of(case, kernels)
        bad = [arm for arm, error in errors.items() if not error <= ERROR_MAX]
        wrong += len(bad)
        decisions = {arm: one.entry["decision"] for arm, one in kernels.items()}
        entry: dict[str, Any] = {"errors": errors, "decisions": decisions}
        results["cases"][case.name] = entry
        told = f"WRONG: {bad}" if bad else f"error {max(errors.values()):.1e}"
        if case.timed and not bad:
            count = min(SETS_MAX, max(4, int(BYTES_IN_TURN / (case.bytes + 2 * case.n * case.k))))
            sets = [(random_tensors(case), output_of(case)) for _ in range(count)]
            made = [launches_of(kernels, tensors, output) for tensors, output in sets]
            graphs = {arm: captured_graph([one[arm] for one in made]) for arm in made[0]}
            times = time_by_turns(graphs, count, rounds)
            entry["times_us"] = {arm: [round(value, 3) for value in values] for arm, values in times.items()}
            told = "  ".join(f"{arm} {median_and_p95(values)[0]:.2f}" for arm, values in times.items()) + f"  {told}"
            del sets, made, graphs
            torch.cuda.empty_cache()
        print(f"{case.name:28} {told}", flush=True)
        if out is not None:
            out.write_text(json.dumps(results))
    print(f"{len(results['cases'])} cases, {wrong} arms wrong", flush=True)
    return 1 if wrong else 0


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    for command in (building, running):
        command.add_argument("--cases", default="")
    building.add_argument("--arch", default="sm_90")
    building.add_argument("--candidates", type=int, default=3)
    running.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory, arguments.arch, arguments.candidates, arguments.cases)
    else:
        sys.exit(run(arguments.directory, arguments.rounds, arguments.cases, arguments.out))


if __name__ == "__main__":
    main()
