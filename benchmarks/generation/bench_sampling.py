"""Time the sampling of a token: one launch on a GPU in a CUDA graph, or the loops of a CPU.

Logits are normal with a standard deviation of 3, as a decoder's are about. Needs torch for a GPU.

    python -m benchmarks.generation.bench_sampling [--target cuda] [--vocabulary 128256] [--batches 1,16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm

from benchmarks.kernels.bench_symbolic_gemm import captured
from benchmarks.kernels.cubins import time_by_turns
from relaxtune.pipeline.codegen.cuda_compiler import cuda_compiler
from relaxtune.schedules.functions.sampling import NEUTRAL, PARAMETERS, SamplingSpec
from relaxtune.schedules.marks import LAUNCH_ATTR
from relaxtune.schedules.sampling import sampling_function
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.lowering import register_mixed_pipeline

_CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k and top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "all filters": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "all, penalties too": {
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition": 1.1,
        "presence": 0.1,
        "frequency": 0.1,
    },
}
_REPLAYS, _ROUNDS = 50, 30


def main() -> None:
    """Print a line a case: median and fastest microseconds a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="auto")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--independent", action="store_true", help="no launch before the one before it has ended")
    options = parser.parse_args()
    target = resolve_target(options.target)
    with _compiler(target):
        for batch in map(int, options.batches.split(",")):
            for optional in (False, True):
                spec = SamplingSpec(batch, options.vocabulary, options.dtype, optional, optional, optional)
                _measure(spec, target, options.independent)


@contextmanager
def _compiler(target: ResolvedTarget) -> Iterator[None]:
    if target.kind != "cuda":
        yield
        return
    with cuda_compiler(target.arch):
        yield


def _measure(spec: SamplingSpec, target: ResolvedTarget, independent: bool) -> None:
    func = sampling_function(spec, target).with_attr("global_symbol", "main")
    if independent:
        func = func.without_attr(LAUNCH_ATTR)
    library = tvm.tirx.build(tvm.IRModule({"main": func}), target=target.target, pipeline=register_mixed_pipeline())
    arms = {name: _arrays(spec, case) for name, case in _CASES.items() if spec.counts or "repetition" not in case}
    timed = _time_on_gpu(library["main"], arms) if target.kind == "cuda" else _time_on_cpu(library["main"], arms)
    inputs = "counts, bias and mask" if spec.counts else "logits alone"
    for name, times in timed.items():
        print(
            f"batch {spec.batch:3}  {inputs:22} {name:20} {statistics.median(times):8.2f} us, "
            f"fastest {min(times):8.2f}",
            flush=True,
        )


def _arrays(spec: SamplingSpec, case: dict[str, float]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    row = [case.get(name, neutral) for name, neutral in zip(PARAMETERS, NEUTRAL, strict=True)]
    values = {
        "logits": lambda shape: rng.standard_normal(shape) * 3,
        "parameters": lambda shape: np.broadcast_to(row, shape),
        "seed": lambda shape: np.arange(shape[0]),
        "counts": lambda shape: rng.random(shape) < 0.01,
        "mask": lambda shape: np.full(shape, -1),
    }
    return [
        np.ascontiguousarray(values.get(name, np.zeros)(shape)).astype(dtype)
        for name, shape, dtype in [*spec.inputs, *spec.outputs]
    ]


def _time_on_gpu(kernel: Any, arms: dict[str, list[np.ndarray]]) -> dict[str, list[float]]:
    import torch

    graphs = {
        name: captured(kernel, [[torch.from_numpy(array).cuda() for array in arrays]] * _REPLAYS)
        for name, arrays in arms.items()
    }
    return time_by_turns(graphs, _REPLAYS, _ROUNDS)


def _time_on_cpu(kernel: Any, arms: dict[str, list[np.ndarray]]) -> dict[str, list[float]]:
    calls = {name: [tvm.runtime.tensor(array) for array in arrays] for name, arrays in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(_ROUNDS):
        for name, tensors in calls.items():
            start = time.perf_counter()
            kernel(*tensors)
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


if __name__ == "__main__":
    main()
