"""Kernels for rows and elementwise functions on a GPU, beside a copy of as many bytes and beside torch.

    python -m benchmarks.bench_memory_bound build DIR [--candidates 4]      anywhere with a CUDA compiler; needs no GPU
    python -m benchmarks.bench_memory_bound run DIR [--rounds 100] [--inductor] [--cases REGEX] [--out FILE.json]

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cubins import (
    Kernel,
    build_and_run_parser,
    captured_graph,
    cubin_writer,
    median_and_p95,
    read_kernels,
    time_by_turns,
)

CHECKS = 20
# Relative error of a float16 result of float32 arithmetic: rounding gives 2.1e-4 on normal values.
ERROR_MAX = 6e-4
CHAIN = 48


@dataclass(frozen=True)
class Case:
    """One function at one shape.

    Attributes
    ----------
    kind
        Which function of `KINDS`.
    shape
        Its sizes.
    chained
        Whether it is timed as a chain; else over tensors larger than the L2 cache.
    """

    kind: str
    shape: tuple[int, ...]
    chained: bool = False


@dataclass(frozen=True)
class Kind:
    """A function: TE of the fused PrimFunc, its inputs, and torch's form; the first input is what a chain hands on."""

    build: Callable[..., Any]
    inputs: Callable[..., list[Any]]
    torch: Callable[..., Any]


def _randn(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda").half()


def _layer_norm(te: Any, topi: Any, rows: int, columns: int, residual: bool = False) -> list[Any]:
    x = te.placeholder((rows, columns), "float16", name="x")
    gamma, beta = (te.placeholder((columns,), "float16", name=name) for name in ("gamma", "beta"))
    if not residual:
        return [x, gamma, beta, topi.nn.layer_norm(x, gamma, beta, [1], 1e-5)]
    other = te.placeholder((rows, columns), "float16", name="residual")
    total = topi.add(topi.cast(x, "float32"), topi.cast(other, "float32"))
    scale, shift = topi.cast(gamma, "float32"), topi.cast(beta, "float32")
    return [x, other, gamma, beta, topi.cast(topi.nn.layer_norm(total, scale, shift, [1], 1e-5), "float16")]


def _rms_norm(te: Any, topi: Any, rows: int, columns: int) -> list[Any]:
    x = te.placeholder((rows, columns), "float16", name="x")
    gamma = te.placeholder((columns,), "float16", name="gamma")
    return [x, gamma, topi.nn.rms_norm(x, gamma, [1], 1e-5)]


def _softmax(te: Any, topi: Any, rows: int, columns: int) -> list[Any]:
    x = te.placeholder((rows, columns), "float16", name="x")
    return [x, topi.cast(topi.nn.softmax(topi.cast(x, "float32")), "float16")]


def _gelu(te: Any, topi: Any, rows: int, columns: int) -> list[Any]:
    from tvm import tirx

    x, bias = te.placeholder((rows, columns), "float16", name="x"), te.placeholder((columns,), "float16", name="bias")
    half, root = tirx.const(0.5, "float32"), tirx.const(0.5**0.5, "float32")
    wide = topi.add(topi.cast(x, "float32"), topi.cast(bias, "float32"))
    gelu = te.compute((rows, columns), lambda i, j: wide[i, j] * (half + half * te.erf(wide[i, j] * root)), name="gelu")
    return [x, bias, topi.cast(gelu, "float16")]


def _rotary(te: Any, topi: Any, batch: int, length: int, heads: int, size: int) -> list[Any]:
    packed = te.placeholder((batch, length, 3 * heads * size), "float16", name="x")
    cos, sin = (te.placeholder((1, 1, length, size), "float32", name=name) for name in ("cos", "sin"))
    query = topi.strided_slice(packed, [0, 0, 0], [batch, length, heads * size])
    query = topi.transpose(topi.reshape(query, (batch, length, heads, size)), (0, 2, 1, 3))
    query = topi.cast(query, "float32")
    low = topi.strided_slice(query, [0, 0, 0, 0], [batch, heads, length, size // 2])
    high = topi.strided_slice(query, [0, 0, 0, size // 2], [batch, heads, length, size])
    turned = topi.concatenate([topi.negative(high), low], axis=-1)
    return [packed, cos, sin, topi.cast(topi.add(topi.multiply(query, cos), topi.multiply(turned, sin)), "float16")]


def _embedding(te: Any, topi: Any, tokens: int, columns: int, vocabulary: int) -> list[Any]:
    ids = te.placeholder((tokens,), "int64", name="ids")
    table = te.placeholder((vocabulary, columns), "float16", name="table")
    position = te.placeholder((tokens, columns), "float16", name="position")
    return [ids, table, position, topi.add(topi.take(table, ids, axis=0, mode="clip"), position)]


def _embedding_layer_norm(te: Any, topi: Any, tokens: int, columns: int, vocabulary: int) -> list[Any]:
    ids = te.placeholder((tokens,), "int64", name="ids")
    table = te.placeholder((vocabulary, columns), "float16", name="table")
    position = te.placeholder((tokens, columns), "float16", name="position")
    gamma, beta = (te.placeholder((columns,), "float16", name=name) for name in ("gamma", "beta"))
    words = topi.cast(topi.take(table, ids, axis=0, mode="clip"), "float32")
    total = topi.add(words, topi.cast(position, "float32"))
    scale, shift = topi.cast(gamma, "float32"), topi.cast(beta, "float32")
    normed = topi.nn.layer_norm(total, scale, shift, [1], 1e-5)
    return [ids, table, position, gamma, beta, topi.cast(normed, "float16")]


def _dequantise(te: Any, topi: Any, columns: int, k: int, bits: int) -> list[Any]:
    from relaxtune.schedules.functions.quantised_matmul import dequantise_rows

    packed = te.placeholder((columns, k * bits // 8), "uint8", name="packed")
    scales = te.placeholder((k // 128, columns), "float16", name="scales")
    return [packed, scales, dequantise_rows(k, bits, 128, "float16")(packed, scales)]


def _torch_dequantise(packed: Any, scales: Any) -> Any:
    import torch

    k = 128 * scales.shape[0]
    bits = 8 * packed.shape[1] // k
    levels = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=-1).reshape(-1, k)
    return (levels.to(scales.dtype) - 2 ** (bits - 1)) * scales.repeat_interleave(128, dim=0).T


def _packed(columns: int, k: int, bits: int) -> list[Any]:
    import torch

    packed = torch.randint(0, 256, (columns, k * bits // 8), device="cuda", dtype=torch.uint8)
    return [packed, (torch.rand(k // 128, columns, device="cuda") * 0.01 + 0.001).half()]


def _torch_rotary(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    batch, length, width = x.shape
    size = cos.shape[-1]
    query = x[..., : width // 3].view(batch, length, -1, size).transpose(1, 2).float()
    low, high = query.chunk(2, -1)
    return (query * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


def _functional() -> Any:
    import torch

    return torch.nn.functional


KINDS = {
    "layer_norm": Kind(
        _layer_norm,
        lambda rows, columns: [_randn(rows, columns), _randn(columns), _randn(columns)],
        lambda x, gamma, beta: _functional().layer_norm(x, x.shape[-1:], gamma, beta),
    ),
    "residual_layer_norm": Kind(
        partial(_layer_norm, residual=True),
        lambda rows, columns: [_randn(rows, columns), _randn(rows, columns), _randn(columns), _randn(columns)],
        lambda x, other, gamma, beta: _functional().layer_norm(x + other, x.shape[-1:], gamma, beta),
    ),
    "rms_norm": Kind(
        _rms_norm,
        lambda rows, columns: [_randn(rows, columns), _randn(columns)],
        lambda x, gamma: _functional().rms_norm(x, x.shape[-1:], gamma, 1e-5),
    ),
    "softmax": Kind(
        _softmax,
        lambda rows, columns: [4 * _randn(rows, columns)],
        lambda x: _functional().softmax(x, -1),
    ),
    "bias_gelu": Kind(
        _gelu,
        lambda rows, columns: [_randn(rows, columns), _randn(columns)],
        lambda x, bias: _functional().gelu(x + bias),
    ),
    "rotary": Kind(
        _rotary,
        lambda batch, length, heads, size: [
            _randn(batch, length, 3 * heads * size),
            _randn(1, 1, length, size).float(),
            _randn(1, 1, length, size).float(),
        ],
        _torch_rotary,
    ),
    "dequantise": Kind(_dequantise, _packed, _torch_dequantise),
    "embedding_sum": Kind(
        _embedding,
        lambda tokens, columns, vocabulary: [
            _randn(tokens).float().mul(1e6).long() % vocabulary,
            _randn(vocabulary, columns),
            _randn(tokens, columns),
        ],
        lambda ids, table, position: table[ids] + position,
    ),
    "embedding_layer_norm": Kind(
        _embedding_layer_norm,
        lambda tokens, columns, vocabulary: [
            _randn(tokens).float().mul(1e6).long() % vocabulary,
            _randn(vocabulary, columns),
            _randn(tokens, columns),
            _randn(columns),
            _randn(columns),
        ],
        lambda ids, table, position, gamma, beta: _functional().layer_norm(
            table[ids] + position, position.shape[-1:], gamma, beta
        ),
    ),
}

CASES = [
    Case("residual_layer_norm", (65536, 768)),
    Case("layer_norm", (65536, 768)),
    Case("layer_norm", (65536, 1024)),
    Case("softmax", (65536, 1024)),
    Case("softmax", (262144, 128)),
    Case("softmax", (2048, 32000)),
    Case("softmax", (512, 131072)),
    Case("rms_norm", (32768, 2048)),
    Case("rms_norm", (8192, 8192)),
    Case("bias_gelu", (32768, 3072)),
    Case("rotary", (8, 2048, 32, 64)),
    Case("dequantise", (16384, 8192, 4)),
    Case("dequantise", (16384, 8192, 8)),
    Case("embedding_sum", (131072, 768, 30522)),
    Case("embedding_layer_norm", (131072, 768, 30522)),
    Case("layer_norm", (128, 768), chained=True),
    Case("residual_layer_norm", (128, 768), chained=True),
    Case("layer_norm", (1024, 768), chained=True),
    Case("layer_norm", (4096, 768), chained=True),
    Case("residual_layer_norm", (4096, 768), chained=True),
    Case("rms_norm", (128, 2048), chained=True),
    Case("rms_norm", (1, 2048), chained=True),
    Case("softmax", (1536, 128), chained=True),
    Case("softmax", (6144, 512), chained=True),
    Case("bias_gelu", (128, 3072), chained=True),
    Case("bias_gelu", (4096, 3072), chained=True),
]


def name_of(case: Case) -> str:
    return f"{case.kind}-{'x'.join(map(str, case.shape))}{'-chain' if case.chained else ''}"


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
