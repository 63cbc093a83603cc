"""Kernels of the attention template beside torch's attention on a Hopper GPU, each checked before it is timed.

    python -m benchmarks.kernels.bench_attention_sm90 build DIR
        [--candidates 4]    anywhere with a CUDA compiler; needs no GPU
        [--template attention_sm80 --target cuda:sm_90]                     kernels of mma.sync that an H200 runs
    python -m benchmarks.kernels.bench_attention_sm90 run DIR [--rounds 100] [--out FILE.json]  on the GPU; needs no TVM

`run` needs torch and cuda-bindings. Every kernel first runs on fresh random inputs into an output full of NaN, and is
compared with float32 arithmetic. Then all arms of a case are timed in alternation, as CUDA graphs over rotating
buffers:

- ours: the candidates that the template proposes; "first" is the one that is taken untuned;
- cudnn, flash, efficient: `scaled_dot_product_attention` with one backend each, on the same tensors (flash takes no
  mask; efficient is run where there is one, or where V has another width). A bias of distances is made whole for them
  beforehand, in float16.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_arms.results import machine
from benchmarks.kernels.cubins import (
    Kernel,
    build_and_run_parser,
    captured_graph,
    cubin_writer,
    median_and_p95,
    read_kernels,
    time_by_turns,
)

CHECKS = 20
# Of the norm of the difference; the weights are rounded to 11 bits, as is the output.
ERROR_MAX = 1e-3
BYTES_PER_TURN = 160_000_000
LAUNCHES_PER_GRAPH = 24
BACKENDS = ("cudnn", "flash", "efficient")
ELEMENT_BYTES = 2
FURTHEST = 4095


@dataclass(frozen=True)
class Case:
    """Sizes; Q, K and V are slices of one product where `packed`, else K and V are [batch, kv_heads, keys, d].

    `masked`: a mask of padding [batch, 1, 1, keys] is added, in float16. `distances`: a bias for each head and distance
    is added, in float32, read from a "table" of 8191, or "whole". `value_dim`: V's width; 0 for that of Q and K.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    packed: bool = True
    masked: bool = False
    value_dim: int = 0
    distances: str = ""


T5_SIZES = {"1x128": (1, 128, 128), "8x128": (8, 128, 128), "8x512": (8, 512, 512)}
T5_SIZES |= {f"decode-8x{keys}": (8, 1, keys) for keys in (512, 2048)}


def square(length: int, head_dim: int, *, causal: bool) -> Case:
    """Return the case of 16384 tokens of hidden size 2048 in sequences of one length."""
    heads = 2048 // head_dim
    return Case(16384 // length, heads, heads, length, length, head_dim, causal)


CASES = {
    "bert-1x128": Case(1, 12, 12, 128, 128, 64),
    "bert-8x128": Case(8, 12, 12, 128, 128, 64),
    "bert-32x128": Case(32, 12, 12, 128, 128, 64),
    "bert-1x512": Case(1, 12, 12, 512, 512, 64),
    "bert-8x512": Case(8, 12, 12, 512, 512, 64),
    "gpt2-1x128": Case(1, 12, 12, 128, 128, 64, True),
    "gpt2-8x512": Case(8, 12, 12, 512, 512, 64, True),
    "vit-8x197": Case(8, 12, 12, 197, 197, 64),
    "llama-1x128": Case(1, 32, 8, 128, 128, 64, True),
    "llama-1x2048": Case(1, 32, 8, 2048, 2048, 64, True),
    "decode-1x1024": Case(1, 32, 8, 1, 1024, 64, packed=False),
    "decode-16x1024": Case(16, 32, 8, 1, 1024, 64, packed=False),
    "decode-1x4096": Case(1, 32, 8, 1, 4096, 64, packed=False),
    "bert-32x128-mask": Case(32, 12, 12, 128, 128, 64, masked=True),
    "bert-8x512-mask": Case(8, 12, 12, 512, 512, 64, masked=True),
    **{
        f"t5-{name}-{kind}": Case(batch, 8, 8, queries, keys, 64, queries > 1, packed=queries > 1, distances=kind)
        for name, (batch, queries, keys) in T5_SIZES.items()
        for kind in ("table", "whole")
    },
    "2048-d80": Case(8, 26, 26, 2048, 2048, 80),
    "2048-d96": Case(8, 21, 21, 2048, 2048, 96),
    "2048-d256": Case(8, 8, 8, 2048, 2048, 256),
    # DeepSeek-V3's heads, 16 of them: of 8192 tokens, and of one new token.
    **{
        f"{length}-d192-128{'-causal' if causal else ''}": Case(
            max(1, 8192 // length), 16, 16, length, length, 192, causal, value_dim=128
        )
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192)
    },
    "decode-4x2048-d192-128": Case(4, 16, 16, 1, 2048, 192, packed=False, value_dim=128),
    "2048-d128-64": Case(8, 16, 16, 2048, 2048, 128, value_dim=64),
    "2048-d64-128": Case(8, 16, 16, 2048, 2048, 64, value_dim=128),
    **{
        f"{length}-d{head_dim}{'-causal' if causal else ''}": square(length, head_dim, causal=causal)
        for head_dim in (64, 128)
        for causal in (False, True)
        for length in (128, 512, 2048, 8192)
    },
}


def build(directory: Path, candidates: int, only: str, template_name: str, target_text: str) -> None:
    """Compile the first candidates of every case whose name has a text in it, and describe them in a manifest."""
    from relaxtune.schedules.errors import Refusal
    from relaxtune.schedules.functions.plain_attention import attention_function
    from relaxtune.schedules.registry import TEMPLATES
    from relaxtune.schedules.targets import resolve_target

    target, template = resolve_target(target_text), TEMPLATES[template_name]
    with cubin_writer(directory, target) as writer:
        for name, case in ((name, case) for name, case in CASES.items() if only in name):
            spec, params = specification(case)
            func = attention_function(spec, params)
            found = template.candidates(func, target)
            if isinstance(found, Refusal):
                sys.exit(f"{name}: {found.reason}")
            for parameters in found[:candidates]:
                kernel = template.apply(func, target, parameters)
                writer.add(kernel, case=name, decision=parameters.to_json(), spec=json.loads(spec.to_json()))
            print(f"{name}: {min(candidates, len(found))} of {len(found)} candidates built", file=sys.stderr)


def specification(case: Case) -> tuple[Any, list[tuple[tuple[int, ...], str]]]:
    """Return the AttentionSpec of a case, and shape and dtype of its parameters."""
    from relaxtune.schedules.functions.attention import AttentionSpec, HeadLayout, ScoreBias

    heads, shared, d, wide = case.heads, case.kv_heads, case.head_dim, case.value_dim or case.head_dim
    if case.packed:
        width = (heads + shared) * d + shared * wide
        params = [((case.batch, case.queries, width), "float16")]
        starts = ((0, d), (heads * d, d), ((heads + shared) * d, wide))
        query, key, value = (HeadLayout(0, start, case.queries * width, width, own) for start, own in starts)
    else:
        params = [((case.batch, case.queries, heads * d), "float16")]
        params += [((case.batch, shared, case.keys, own), "float16") for own in (d, wide)]
        query = HeadLayout(0, 0, case.queries * heads * d, heads * d, d)
        key, value = (
            HeadLayout(param, 0, shared * case.keys * own, own, case.keys * own) for param, own in ((1, d), (2, wide))
        )
    bias = None
    if case.masked:
        bias = ScoreBias(len(params), "add", case.keys, 0, 0, 1)
        params.append(((case.batch, 1, 1, case.keys), "float16"))
    if case.distances == "table":
        first = FURTHEST - (case.keys - case.queries)
        bias = ScoreBias(len(params), "add", 0, 2 * FURTHEST + 1, -1, 1, offset=first, limit=2 * FURTHEST)
        params.append(((1, heads, 2 * FURTHEST + 1, 1), "float32"))
    elif case.distances:
        bias = ScoreBias(len(params), "add", 0, case.queries * case.keys, case.keys, 1)
        params.append(((1, heads, case.queries, case.keys), "float32"))
    output = HeadLayout(len(params), 0, case.queries * heads * wide, heads * wide, wide)
    params.append(((case.batch, case.queries, heads * wide), "float16"))
    sizes = (case.batch, heads, shared, case.queries, case.keys, d, wide)
    return AttentionSpec(*sizes, d**-0.5, case.causal, 0, query, key, value, output, bias), params


def inputs(entry: dict[str, Any]) -> dict[str, Any]:
    """Return random tensors for a kernel's parameters, and an output full of NaN."""
    import torch

    tensors = {}
    bias = entry["spec"]["bias"]
    for index, (name, shape, dtype) in enumerate(entry["params"]):
        kind = getattr(torch, dtype)
        if index == len(entry["params"]) - 1:
            tensors[name] = torch.full(shape, float("nan"), device="cuda", dtype=kind)
        elif bias is not None and index == bias["param"] and bias["kind"] == "keep":
            tensors[name] = (torch.rand(shape, device="cuda") < 0.7).to(kind)
        else:
            tensors[name] = torch.randn(shape, device="cuda").to(kind)
    return tensors


def heads_of(entry: dict[str, Any], tensors: dict[str, Any], role: str) -> Any:
    """Return Q, K, V or O as a view [batch, heads, positions, d] of a parameter."""
    spec = entry["spec"]
    layout = spec[role]
    heads, positions = ("kv_heads", "keys") if role in ("key", "value") else ("heads", "queries")
    tensor = tensors[entry["params"][layout["param"]][0]]
    width = spec["head_dim"] if role in ("query", "key") else spec.get("value_dim", spec["head_dim"])
    shape = (spec["batch"], spec[heads], spec[positions], width)
    strides = (layout["batch_stride"], layout["head_stride"], layout["position_stride"], 1)
    return tensor.as_strided(shape, strides, layout["offset"])


def whole_mask(entry: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Return the mask [batch or 1, heads, queries, keys] of a kernel, a view where it is one; None without."""
    import torch

    spec = entry["spec"]
    bias = spec["bias"]
    if bias is None:
        return None
    mask = tensors[entry["params"][bias["param"]][0]]
    batch = spec["batch"] if bias["batch_stride"] else 1
    steps = (bias["batch_stride"], bias["head_stride"], bias["query_stride"], bias["key_stride"])
    shape = (batch, spec["heads"], spec["queries"], spec["keys"])
    if not bias.get("limit"):
        return mask.as_strided(shape, steps)
    at = torch.meshgrid(*(torch.arange(size, device="cuda") for size in shape), indexing="ij")
    place = (at[2] * steps[2] + at[3] * steps[3] + bias["offset"]).clamp(0, bias["limit"])
    return mask.flatten()[at[0] * steps[0] + at[1] * steps[1] + place]


def reference(entry: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Return the output in float32, one batch element at a time."""
    import torch

    spec = entry["spec"]
    query, key, value = (heads_of(entry, tensors, role) for role in ("query", "key", "value"))
    group = spec["heads"] // spec["kv_heads"]
    ahead = torch.arange(spec["keys"], device="cuda")[None, :] - torch.arange(spec["queries"], device="cuda")[:, None]
    ahead = ahead - (spec["keys"] - spec["queries"])
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if spec["causal"]:
        seen &= ahead <= 0
    if spec["window"]:
        seen &= ahead.abs() < spec["window"]
    bias, mask = spec["bias"], whole_mask(entry, tensors)
    results = []
    for b in range(spec["batch"]):
        scores = query[b].float() @ key[b].float().repeat_interleave(group, 0).mT * spec["scale"]
        visible = seen
        if mask is not None:
            own = mask[b if mask.shape[0] > 1 else 0]
            if bias["kind"] == "add":
                scores = scores + own.float()
            else:
                visible = seen & (own != 0)
        scores.masked_fill_(~visible, -math.inf)
        results.append(torch.softmax(scores, -1) @ value[b].float().repeat_interleave(group, 0))
    return torch.stack(results)


def largest_error(kernel: Kernel, checks: int = CHECKS) -> float:
    """Return the largest relative error over fresh inputs; NaN when an output was not written."""
    import torch

    worst = 0.0
    for _ in range(checks):
        tensors = inputs(kernel.entry)
        kernel.bind(tensors)()
        expected = reference(kernel.entry, tensors)
        found = heads_of(kernel.entry, tensors, "output").float()
        # A row that sees no key is NaN in both.
        empty = expected.isnan()
        if not torch.equal(empty, found.isnan()):
            return math.nan
        error = float((found - expected)[~empty].norm() / expected[~empty].norm())
        torch.cuda.synchronize()
        worst = max(worst, error)
    return worst


def torch_arm(backend: str, case: Case, entry: dict[str, Any], tensors: dict[str, Any]) -> Callable[[], Any]:
    """Return torch's attention with one backend on a case's tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[backend]
    mask = whole_mask(entry, tensors)
    if mask is not None:
        hidden = torch.ones(case.queries, case.keys, device="cuda", dtype=torch.bool).triu(1 + case.keys - case.queries)
        mask = mask.half().masked_fill(hidden, -math.inf) if case.causal else mask.half()
    query, key, value = (heads_of(entry, tensors, role) for role in ("query", "key", "value"))
    grouped = case.heads != case.kv_heads

    def attend() -> Any:
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=case.causal and mask is None, enable_gqa=grouped
            )

    return attend


def graphs_of(case: Case, kernels: dict[str, Kernel], entry: dict[str, Any]) -> tuple[dict[str, Any], int, Any]:
    """Return a captured graph for every arm, the launches in one, and what must live as long as the graphs."""
    first = inputs(entry)
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    sets = [first, *(inputs(entry) for _ in range(max(1, min(LAUNCHES_PER_GRAPH, BYTES_PER_TURN // size))))]
    repeats = max(1, LAUNCHES_PER_GRAPH // len(sets)) if size < BYTES_PER_TURN else 1
    arms: dict[str, list[Callable[[], Any]]] = {}
    with_mask = case.masked or case.distances
    peers = ("cudnn", "efficient") if with_mask else BACKENDS if case.value_dim else ("cudnn", "flash")
    for backend in peers:
        arms[backend] = [torch_arm(backend, case, entry, tensors) for tensors in sets]
    for decision, kernel in kernels.items():
        arms[decision] = [kernel.bind(tensors) for tensors in sets]
    graphs = {}
    for name, launches in arms.items():
        try:
            graphs[name] = captured_graph(launches * repeats)
        except RuntimeError as error:
            if name not in BACKENDS:
                raise
            print(f"{name} does not run this case: {str(error).splitlines()[0]}", file=sys.stderr)
    return graphs, len(sets) * repeats, sets


def flops(case: Case) -> float:
    """Return the operations of both products, of a causal one those that are needed."""
    widths = case.head_dim + (case.value_dim or case.head_dim)
    full = 2.0 * case.batch * case.heads * case.queries * case.keys * widths
    return full / 2 if case.causal else full


def run(directory: Path, rounds: int, out: Path | None, only: str) -> int:
    """Check and time every kernel; return 1 when one is wrong."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    every = read_kernels(directory)
    results: dict[str, Any] = {"machine": machine(), "torch": torch.__version__, "cases": {}}
    wrong = 0
    ratios: list[tuple[float, float]] = []
    for name, case in CASES.items():
        kernels = {kernel.entry["decision"]: kernel for kernel in every if kernel.entry["case"] == name}
        if not kernels or only not in name:
            continue
        # Large cases are slow to check in float32.
        checks = CHECKS if case.batch * case.heads * case.queries * case.keys < 2**28 else 2
        errors = {decision: largest_error(kernel, checks) for decision, kernel in kernels.items()}
        right = {decision: kernel for decision, kernel in kernels.items() if errors[decision] <= ERROR_MAX}
        wrong += len(kernels) - len(right)
        graphs, launches, _alive = graphs_of(case, right, next(iter(kernels.values())).entry)
        times = time_by_turns(graphs, launches, rounds if flops(case) < 5e11 else max(10, rounds // 5))
        rounded = {arm: [round(value, 3) for value in values] for arm, values in times.items()}
        results["cases"][name] = {"errors": errors, "times_us": rounded}
        statistics = {arm: median_and_p95(values) for arm, values in times.items()}
        peers = {arm: statistics[arm][0] for arm in BACKENDS if arm in statistics}
        listed = "  ".join(f"{arm} {median:8.2f}" for arm, median in peers.items())
        if not right:
            print(f"{name:16} WRONG {errors}  {listed}", flush=True)
            continue
        best = min(right, key=lambda decision: statistics[decision][0])
        median, p95 = statistics[best]
        first = statistics[next(iter(right))][0]
        peer = min(peers.values(), default=math.nan)
        ratios.append((peer / median, peer / first))
        print(
            f"{name:16} ours {median:8.2f} us (p95 {p95:.2f}, {flops(case) / median / 1e6:4.0f} TFLOP/s)  "
            f"first {first:8.2f}  {listed}  ratio {peer / median:.2f}  "
            f"wrong {len(kernels) - len(right)}/{len(kernels)}  candidate {list(kernels).index(best) + 1}: {best}",
            flush=True,
        )
    known = [pair for pair in ratios if pair[0] == pair[0]]
    for which, values in zip(("best", "first"), zip(*known, strict=True), strict=False):
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"geometric mean of {len(values)} ratios of the peers' best to our {which}: {mean:.3f}")
    if out is not None:
        out.write_text(json.dumps(results, indent=1))
    return 1 if wrong else 0


def main() -> None:
    """Build or run."""
    parser, building, running = build_and_run_parser(__doc__)
    building.add_argument("--candidates", type=int, default=4)
    building.add_argument("--template", default="attention_sm90")
    building.add_argument("--target", default="cuda:sm_90a")
    running.add_argument("--rounds", type=int, default=100)
    for part in (building, running):
        part.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.directory, arguments.candidates, arguments.only, arguments.template, arguments.target)
    else:
        sys.exit(run(arguments.directory, arguments.rounds, arguments.out, arguments.only))


if __name__ == "__main__":
    main()
