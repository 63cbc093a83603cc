"""Matmuls of one to 16 rows by 16-, 8- and 4-bit weights on a GPU, beside torch's and the bytes that have to be read.

    python -m benchmarks.kernels.bench_gemv build DIR [--candidates 6]       anywhere with a CUDA compiler; needs no GPU
    python -m benchmarks.kernels.bench_gemv run DIR [--rounds 60] [--checks 5] [--cases REGEX] [--out FILE.json]

`run` needs a GPU, torch and cuda-bindings, no TVM. Every kernel first runs on fresh random inputs into an output full
of NaN, and is compared with the product in float32 by the weights as the bytes and scales say. Then all arms of a case
are timed in alternation, as CUDA graphs over as many copies of the weights as do not fit into the L2 cache together:

- ours: the candidates that the templates `gemv` and `gemv_stream` propose, the first one of all is what a compilation
  takes unmeasured; with 16-bit weights also the first candidate of `gemm_sm90`;
- torch: `torch.nn.functional.linear` in float16 (cuBLAS), whatever the bits.

Small odd cases are checked and not timed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
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

# Relative error of a float16 result of float32 sums; of weights that are rounded to float16 first.
ERROR_MAX = 6e-4
# Weights that are read in turn: several times the L2 cache of an H200.
BYTES_IN_TURN = 300e6
LAUNCHES_MIN = 8


@dataclass(frozen=True)
class Case:
    """One product of [m, k] by [k, n]; `group` is 0 for 16-bit weights."""

    m: int
    n: int
    k: int
    bits: int
    group: int = 128
    epilogue: str = "cast"
    timed: bool = True

    @property
    def name(self) -> str:
        """Sizes, bits and what is unusual."""
        groups = "" if self.bits == 16 else f"-g{self.group}"
        extra = "" if self.epilogue == "cast" else f"-{self.epilogue}"
        return f"{self.m}x{self.n}x{self.k}-{self.bits}bit{groups}{extra}"

    @property
    def bytes(self) -> int:
        """Bytes that have to be read and written."""
        scales = 0 if self.bits == 16 else 2 * self.n * -(-self.k // self.group)
        return self.n * self.k * self.bits // 8 + scales + 2 * self.m * (self.k + self.n)


SHAPES = ((8192, 2048), (2048, 8192), (2048, 2048), (4096, 4096), (14336, 4096))
CASES = [
    *(Case(1, n, k, bits) for n, k in SHAPES for bits in (16, 8, 4)),
    *(Case(m, 8192, 2048, bits) for m in (2, 4, 8, 16) for bits in (16, 8, 4)),
    *(Case(m, 2048, 8192, bits) for m in (8, 16) for bits in (16, 8, 4)),
    *(Case(m, 14336, 4096, 4) for m in (4, 8, 16)),
    Case(1, 14336, 4096, 4, 4096),
    Case(1, 4096, 14336, 4),
    Case(1, 8192, 2048, 4, 32),
    Case(1, 8192, 2048, 8, 32),
    Case(1, 50257, 768, 16),
    # Edges: rows that are no multiple of a tile, K of no whole step, groups shorter than a step, all epilogues.
    *(Case(m, n, k, 16, timed=False) for m in (1, 3, 9, 16) for n, k in ((1000, 776), (17, 8), (50, 264))),
    *(Case(m, 1000, 800, 4, g, timed=False) for m in (1, 5, 16) for g in (32, 64, 96, 128, 800)),
    *(Case(m, 1000, 784, 8, g, timed=False) for m in (1, 5, 16) for g in (32, 64, 128, 784)),
    *(Case(4, 512, 256, bits, 128, "residual", timed=False) for bits in (16, 8, 4)),
]


def function_of(case: Case) -> Any:
    """Return the fused PrimFunc: parameters x, the weight (bytes and scales), those of the epilogue, the output."""
    from tvm import te

    from relaxtune.schedules.functions.quantised_matmul import matmul_of_rows
    from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR

    x = te.placeholder((case.m, case.k), "float16", name="x")
    if case.bits == 16:
        w = te.placeholder((case.n, case.k), "float16", name="w")
        over = te.reduce_axis((0, case.k), name="k")
        product = te.compute(
            (case.m, case.n),
            lambda i, j: te.sum(x[i, over].astype("float32") * w[j, over].astype("float32"), axis=over),
            name="matmul",
        )
        params = [x, w]
    else:
        packed = te.placeholder((case.n, case.k * case.bits // 8), "uint8", name="packed")
        scales = te.placeholder((-(-case.k // case.group), case.n), "float16", name="scales")
        product = matmul_of_rows(case.k, case.bits, case.group, "float32")(x, packed, scales)
        params = [x, packed, scales]
    constants = list(range(1, len(params)))
    if case.epilogue == "residual":
        bias = te.placeholder((case.n,), "float32", name="bias")
        other = te.placeholder((case.m, case.n), "float16", name="other")
        constants.append(len(params))
        params += [bias, other]
        product = te.compute(
            (case.m, case.n), lambda i, j: product[i, j] + bias[j] + other[i, j].astype("float32"), name="sum"
        )
    output = te.compute((case.m, case.n), lambda i, j: product[i, j].astype("float16"), name="output")
    func = te.create_prim_func([*params, output], index_dtype_override="int64")
    return func.with_attr(CONSTANT_PARAMS_ATTR, constants)


def build(directory: Path, candidates: int, cases: str) -> None:
    """Compile the first candidates of every case and describe them in a manifest."""
    from relaxtune.schedules.errors import Refusal
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.schedules.templates.base import Template
    from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
    from relaxtune.schedules.templates.gemv.template import Gemv, GemvStream

    target = resolve_target("cuda:sm_90a")
    with cubin_writer(directory, target) as writer:
        for case in CASES:
            if not re.search(cases, case.name):
                continue
            func = function_of(case)
            count = candidates if case.timed else 2
            wanted: list[tuple[Template, int]] = [(Gemv(), count), (GemvStream(), count)]
            if case.bits == 16 and case.timed:
                wanted.append((GemmSm90(), 1))
            for template, count in wanted:
                found = template.candidates(func, target)
                if isinstance(found, Refusal):
                    print(f"{case.name}: {template.name}: {found.reason}", file=sys.stderr)
                    continue
                for parameters in found[:count]:
                    kernel = template.apply(func, target, parameters)
                    if isinstance(kernel, Refusal):
                        sys.exit(f"{case.name}: {parameters.to_json()}: {kernel.reason}")
                    writer.add(kernel, case=case.name, decision=parameters.to_json())
            print(f"{case.name}: built", file=sys.stderr)


def random_tensors(case: Case, shift: float = 0) -> dict[str, Any]:
    """Return fresh inputs by parameter name, x around `shift`."""
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").half()

    found = {"x": normal(case.m, case.k) + shift}
    if case.bits == 16:
        found["w"] = normal(case.n, case.k)
    else:
        shape = (case.n, case.k * case.bits // 8)
        found["packed"] = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
        found["scales"] = (torch.rand(-(-case.k // case.group), case.n, device="cuda") * 0.01 + 0.001).half()
    if case.epilogue == "residual":
        found["bias"], found["other"] = torch.randn(case.n, device="cuda"), normal(case.m, case.n)
    return found


def weight_of(case: Case, tensors: dict[str, Any]) -> Any:
    """Return W [N, K] in float32."""
    import torch

    if case.bits == 16:
        return tensors["w"].float()
    levels = tensors["packed"]
    if case.bits == 4:
        levels = torch.stack([levels & 15, levels >> 4], dim=-1).reshape(case.n, case.k)
    scales = tensors["scales"].float().repeat_interleave(case.group, dim=0)[: case.k].T
    return (levels.float() - 2 ** (case.bits - 1)) * scales


def expected_of(case: Case, tensors: dict[str, Any]) -> Any:
    """Return the output in float32; the matmul in float64, as torch may use tf32."""
    product = (tensors["x"].double() @ weight_of(case, tensors).double().T).float()
    return product + tensors["bias"] + tensors["other"].float() if case.epilogue == "residual" else product


def bound(kernel: Kernel, tensors: dict[str, Any], output: Any) -> Callable[[], None]:
    return kernel.bind({**tensors, kernel.entry["params"][-1][0]: output})


def output_of(case: Case) -> Any:
    import torch

    return torch.full((case.m, case.n), float("nan"), device="cuda", dtype=torch.float16)


def largest_error(case: Case, kernel: Kernel, checks: int) -> float:
    """Return the largest relative error over fresh inputs; NaN when an output was not written."""
    worst = 0.0
    for number in range(checks):
        # Every other x is around 4: its sums do not cancel.
        tensors, output = random_tensors(case, number % 2 * 4), output_of(case)
        launch = bound(kernel, tensors, output)
        launch()
        expected = expected_of(case, tensors)
        error = float((output.float() - expected).norm() / expected.norm())
        if error != error:
            return error
        worst = max(worst, error)
    return worst


def arms_of(case: Case, kernels: dict[str, Kernel]) -> tuple[dict[str, list[Callable[[], Any]]], int, Any]:
    """Return the launches of every arm, how many a graph has, and what must live as long as they."""
    import torch

    sets = [(random_tensors(case), output_of(case)) for _ in range(max(LAUNCHES_MIN, int(BYTES_IN_TURN / case.bytes)))]
    arms: dict[str, list[Callable[[], Any]]] = {
        decision: [bound(kernel, tensors, output) for tensors, output in sets] for decision, kernel in kernels.items()
    }
    count = max(LAUNCHES_MIN, int(BYTES_IN_TURN / (2 * case.n * case.k)))
    halves = [torch.randn(case.n, case.k, device="cuda").half() for _ in range(count)]
    x = sets[0][0]["x"]
    arms["torch"] = [partial(torch.nn.functional.linear, x, halves[i % count]) for i in range(len(sets))]
    return arms, len(sets), (sets, halves)


def run(directory: Path, rounds: int, checks: int, cases: str, out: Path | None) -> int:
    """Check and time every kernel; return 1 when one is wrong."""
    import torch

    torch.zeros(1, device="cuda")
    loaded = read_kernels(directory)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    for case in CASES:
        kernels = {one.entry["decision"]: one for one in loaded if one.entry["case"] == case.name}
        if not kernels or not re.search(cases, case.name):
            continue
        errors = {decision: largest_error(case, one, checks) for decision, one in kernels.items()}
        right = {decision: one for decision, one in kernels.items() if errors[decision] <= ERROR_MAX}
        wrong += len(kernels) - len(right)
        entry: dict[str, Any] = {"bytes": case.bytes, "errors": errors}
        results["cases"][case.name] = entry
        if len(right) < len(kernels):
            print(f"{case.name:28} WRONG: {errors}", flush=True)
        if not right or not case.timed:
            continue
        launches, count, _alive = arms_of(case, right)
        graphs = {arm: captured_graph(calls) for arm, calls in launches.items()}
        times = time_by_turns(graphs, count, rounds)
        entry["times_us"] = {arm: [round(value, 3) for value in values] for arm, values in times.items()}
        _print_line(case, times, list(kernels), max(errors.values()))
        del launches, graphs, _alive
        torch.cuda.empty_cache()
    print(f"{len(results['cases'])} cases, {wrong} kernels wrong", flush=True)
    if out is not None:
        out.write_text(json.dumps(results))
    return 1 if wrong else 0


def _print_line(case: Case, times: dict[str, list[float]], decisions: list[str], error: float) -> None:
    medians = {arm: median_and_p95(values)[0] for arm, values in times.items()}
    parameters = {one: json.loads(one) for one in decisions if one in times}
    ours = [one for one, values in parameters.items() if values["template"].startswith("gemv")]
    others = [one for one in parameters if one not in ours]
    best = min(ours, key=lambda decision: medians[decision])
    shown = {key: value for key, value in parameters[best].items() if key != "dependent"}
    beside = "".join(f"  gemm {medians[one]:.2f}" for one in others)
    print(
        f"{case.name:28} first {medians[ours[0]]:7.2f} us  best {medians[best]:7.2f} #{decisions.index(best)} {shown} "
        f"{case.bytes / medians[best] / 1e6:.2f} TB/s{beside}  torch fp16 {medians['torch']:.2f}  error {error:.1e}",
        flush=True,
    )


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    for command in (building, running):
        command.add_argument("--cases", default="")
    building.add_argument("--candidates", type=int, default=6)
    running.add_argument("--rounds", type=int, default=60)
    running.add_argument("--checks", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory, arguments.candidates, arguments.cases)
    else:
        sys.exit(run(arguments.directory, arguments.rounds, arguments.checks, arguments.cases, arguments.out))


if __name__ == "__main__":
    main()
