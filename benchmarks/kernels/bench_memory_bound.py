"""Kernels for rows and elementwise functions on a GPU, beside a copy of as many bytes and beside torch.

    python -m benchmarks.kernels.bench_memory_bound build DIR
        [--candidates 4]      anywhere with a CUDA compiler; needs no GPU
    python -m benchmarks.kernels.bench_memory_bound run DIR [--rounds 100] [--inductor] [--cases REGEX]
        [--out FILE.json]

`run` needs a GPU, torch and cuda-bindings, no TVM. Every kernel first runs on fresh random inputs into an output full
of NaN, and is compared with torch in float32. Then all arms of a case are timed in alternation, as CUDA graphs:

- ours: the candidates that the template proposes; the first one is what a compilation takes without a measurement;
- copy: a device-to-device copy that moves as many bytes (read and written) as the function has to;
- torch: eager, and with `--inductor` the same function compiled by torch.compile.

Large cases work on tensors that do not fit the L2 cache, and rotate among them. Small ones are chains, each kernel on
the output of the one before, as in a model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
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
from benchmarks.kernels.memory_bound_cases import CASES, KINDS, Case, Kind, name_of

CHECKS = 20
# Relative error of a float16 result of float32 arithmetic: rounding gives 2.1e-4 on normal values.
ERROR_MAX = 6e-4
CHAIN = 48


def build(directory: Path, candidates: int, cases: str) -> None:
    """Compile the first candidates of every case and describe them in a manifest."""
    from tvm import te, topi

    from relaxtune.schedules.errors import Refusal
    from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR
    from relaxtune.schedules.targets import resolve_target
    from relaxtune.schedules.templates.rows.elementwise import Elementwise
    from relaxtune.schedules.templates.rows.template import Rows

    target = resolve_target("cuda:sm_90a")
    with cubin_writer(directory, target) as writer:
        for case in CASES:
            if not re.search(cases, name_of(case)):
                continue
            tensors = KINDS[case.kind].build(te, topi, *case.shape)
            func = te.create_prim_func(tensors, index_dtype_override="int64")
            # What a model's weights would be: all but the first input and the output, and the second of a residual.
            names = [str(param.name) for param in func.params]
            constants = [i for i, name in enumerate(names[:-1]) if name not in ("x", "residual", "ids")]
            func = func.with_attr(CONSTANT_PARAMS_ATTR, constants)
            for template in (Rows(), Elementwise()):
                found = template.candidates(func, target)
                if isinstance(found, Refusal):
                    continue
                for parameters in found[:candidates]:
                    kernel = template.apply(func, target, parameters)
                    if isinstance(kernel, Refusal):
                        sys.exit(f"{name_of(case)}: {parameters.to_json()}: {kernel.reason}")
                    writer.add(kernel, case=name_of(case), decision=parameters.to_json())
                print(f"{name_of(case)}: {min(candidates, len(found))} of {len(found)} built", file=sys.stderr)


def bound(kernel: Kernel, inputs: Sequence[Any], output: Any) -> Callable[[], None]:
    names = [name for name, _, _ in kernel.entry["params"]]
    return kernel.bind(dict(zip(names, [*inputs, output], strict=True)))


def output_of(kernel: Kernel) -> Any:
    """Return an output full of NaN."""
    import torch

    return torch.full(kernel.entry["params"][-1][1], float("nan"), device="cuda", dtype=torch.float16)


def largest_error(kind: Kind, case: Case, kernel: Kernel, checks: int) -> float:
    """Return the largest relative error over fresh inputs; NaN when an output was not written."""
    import torch

    worst = 0.0
    for _ in range(checks):
        inputs, output = kind.inputs(*case.shape), output_of(kernel)
        bound(kernel, inputs, output)()
        wide = [one.float() if one.is_floating_point() else one for one in inputs]
        expected = kind.torch(*wide)
        error = float((output.float() - expected).norm() / expected.norm())
        torch.cuda.synchronize()
        worst = error if error != error else max(worst, error)
        if worst != worst:
            break
    return worst


def arms_of(
    kind: Kind, case: Case, kernels: dict[str, Kernel], inductor: bool
) -> tuple[dict[str, list[Callable[[], Any]]], int, Any]:
    """Return the launches of every arm, the bytes that one has to move, and what must live as long as they."""
    import torch

    first = next(iter(kernels.values()))
    inputs = kind.inputs(*case.shape)
    size = sum(one.numel() * one.element_size() for one in (*inputs, output_of(first)))
    if case.kind == "rotary":
        size -= inputs[0].numel() * inputs[0].element_size() * 2 // 3
    sets = [[*inputs, output_of(first)]]
    if case.chained:
        # There and back: what one kernel writes is the first input of the next.
        sets.append([sets[0][-1], *inputs[1:], inputs[0]])
    else:
        sets.append([*kind.inputs(*case.shape), output_of(first)])
    turns = [sets[i % 2] for i in range(CHAIN if case.chained else 4)]
    arms: dict[str, list[Callable[[], Any]]] = {}
    for decision, kernel in kernels.items():
        launches = {id(one): bound(kernel, one[:-1], one[-1]) for one in sets}
        arms[decision] = [launches[id(one)] for one in turns]
    eager: list[Callable[[], Any]] = []
    compiled: list[Callable[[], Any]] = []
    fast = torch.compile(kind.torch, dynamic=False) if inductor else None
    for one in turns:
        eager.append(partial(kind.torch, *one[:-1]))
        compiled.append(partial(fast, *one[:-1]) if fast else eager[-1])
    arms["torch"] = eager
    if inductor:
        arms["inductor"] = compiled
    # Rounded up: a copy of an odd number of bytes takes half as long again.
    halves = [torch.empty(-(-size // 2**13) * 2**12, dtype=torch.uint8, device="cuda") for _ in range(4)]
    if case.chained:
        arms["copy"] = [partial(halves[i % 2].copy_, halves[(i + 1) % 2]) for i in range(len(turns))]
    else:
        arms["copy"] = [partial(halves[i % 2].copy_, halves[2 + i % 2]) for i in range(len(turns))]
    return arms, size, (sets, halves)


def run(directory: Path, rounds: int, checks: int, inductor: bool, cases: str, out: Path | None) -> int:
    """Check and time every kernel; return 1 when one is wrong."""
    import torch

    torch.zeros(1, device="cuda")
    loaded = read_kernels(directory)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    for case in CASES:
        name, kind = name_of(case), KINDS[case.kind]
        kernels = {one.entry["decision"]: one for one in loaded if one.entry["case"] == name}
        if not kernels or not re.search(cases, name):
            continue
        errors = {decision: largest_error(kind, case, one, checks) for decision, one in kernels.items()}
        right = {decision: one for decision, one in kernels.items() if errors[decision] <= ERROR_MAX}
        wrong += len(kernels) - len(right)
        if not right:
            print(f"{name:36} all wrong: {errors}", flush=True)
            continue
        launches, size, _alive = arms_of(kind, case, right, inductor)
        graphs = {arm: captured_graph(calls) for arm, calls in launches.items()}
        times = time_by_turns(graphs, CHAIN if case.chained else 4, rounds)
        rounded = {arm: [round(value, 3) for value in values] for arm, values in times.items()}
        results["cases"][name] = {"bytes": size, "errors": errors, "times_us": rounded}
        _print_line(name, size, times, list(kernels), len(kernels) - len(right))
        del launches, graphs, _alive
        torch.cuda.empty_cache()
    if out is not None:
        out.write_text(json.dumps(results))
    return 1 if wrong else 0


def _print_line(name: str, size: int, times: dict[str, list[float]], decisions: list[str], wrong: int) -> None:
    medians = {arm: median_and_p95(values) for arm, values in times.items()}
    ours = [decision for decision in decisions if decision in times]
    best = min(ours, key=lambda decision: medians[decision][0])
    first = medians[ours[0]][0]
    share = medians["copy"][0] / first
    others = "  ".join(f"{arm} {medians[arm][0]:.2f}" for arm in ("torch", "inductor", "copy") if arm in medians)
    shown = {key: value for key, value in json.loads(best).items() if key not in ("template", "held", "dependent")}
    p95 = medians[ours[0]][1]
    print(
        f"{name:36} first {first:7.2f} us (p95 {p95:.2f}, {size / first / 1e6:.2f} TB/s, {share:.0%} of copy)  "
        f"best {medians[best][0]:7.2f} #{decisions.index(best)} {shown}  {others}  wrong {wrong}/{len(decisions)}",
        flush=True,
    )


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    for command in (building, running):
        command.add_argument("--cases", default="")
    building.add_argument("--candidates", type=int, default=4)
    running.add_argument("--rounds", type=int, default=100)
    running.add_argument("--checks", type=int, default=CHECKS)
    running.add_argument("--inductor", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory, arguments.candidates, arguments.cases)
    else:
        options = (arguments.rounds, arguments.checks, arguments.inductor, arguments.cases, arguments.out)
        sys.exit(run(arguments.directory, *options))


if __name__ == "__main__":
    main()
