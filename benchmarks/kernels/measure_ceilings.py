"""What this GPU can do at most, for `relaxtune report --ceilings FILE`: large matmuls, a large copy, an empty kernel.

    python -m benchmarks.kernels.measure_ceilings [--out benchmarks/results/gpu-ceilings.json]

Random data, CUDA events, the fastest of several groups of runs. Needs torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_arms.results import machine
from relaxtune.pipeline.report.ceilings import Ceilings

RESULTS = Path(__file__).parents[1] / "results" / "gpu-ceilings.json"
_MATMUL_SIZE = 8192
_COPY_BYTES = 1 << 32
_GROUPS = 10
_RUNS = 5
_SMALL_KERNELS = 100


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the JSON")
    arguments = parser.parse_args()
    ceilings = measure_gpu_ceilings()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {**ceilings.to_json(), "machine": machine()}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    rates = ", ".join(f"{dtype} {rate / 1e12:.0f} TFLOP/s" for dtype, rate in ceilings.flops_per_s.items())
    print(f"{ceilings.device}: {rates}, {(ceilings.bytes_per_s or 0.0) / 1e12:.2f} TB/s, {ceilings.launch_us:.2f} us")


def measure_gpu_ceilings() -> Ceilings:
    """Return the ceilings of the first GPU."""
    flops = {
        name: 2 * _MATMUL_SIZE**3 / _fastest_s(_matmul(dtype))
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    source = torch.randn(_COPY_BYTES // 4, device="cuda")
    destination = torch.empty_like(source)
    bandwidth = 2 * _COPY_BYTES / _fastest_s(lambda: destination.copy_(source))
    return Ceilings(
        device=torch.cuda.get_device_name(0),
        flops_per_s=flops,
        bytes_per_s=bandwidth,
        launch_us=_fastest_s(_small_kernels()) / _SMALL_KERNELS * 1e6,
        source=(
            f"torch {torch.__version__}: matmul {_MATMUL_SIZE}^3 on random data (float32 without TF32), copy of "
            f"{_COPY_BYTES >> 30} GiB, {_SMALL_KERNELS} kernels of one element in a CUDA graph; the fastest of "
            f"{_GROUPS} groups of {_RUNS} runs"
        ),
    )


def _matmul(dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)


def _small_kernels() -> Callable[[], object]:
    """Return the launch of a graph of kernels that depend on each other, as those of a model do."""
    value = torch.zeros(1, device="cuda")
    value.add_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_SMALL_KERNELS):
            value.add_(1.0)
    return graph.replay


def _fastest_s(run: Callable[[], object]) -> float:
    """Return the seconds of one run, of the fastest group."""
    run()
    times = []
    for _ in range(_GROUPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / _RUNS)
    return min(times)


if __name__ == "__main__":
    main()
