"""PyTorch's arms: `max-autotune` as a user gets it, and eager torch captured in a CUDA graph."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_arms.arm import DeviceArm
from benchmarks.gpu_arms.torch_models import outputs_of
from relaxtune.pipeline.tuning.measure.device_lock import DeviceLock

_WARMUP = 3


def graph_arm(module: nn.Module, inputs: Sequence[Tensor]) -> DeviceArm:
    """Return eager torch, captured once in a CUDA graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARMUP):
            module(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = module(*inputs)
    return DeviceArm(graph.replay, torch.cuda.synchronize, lambda: outputs_of(module, returned))


def inductor_arm(module: nn.Module, inputs: Sequence[Tensor], turn: DeviceLock) -> DeviceArm:
    """Return `torch.compile(mode="max-autotune")`, which keeps its own CUDA graph.

    Its inputs are declared to stay where they are, so that no run copies them. While it compares candidates on the
    GPU, no other case's process uses it.
    """
    serialised = serialise_autotuning(turn)
    for tensor in inputs:
        torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(module, mode="max-autotune", fullgraph=True, dynamic=False)
    started = time.perf_counter()
    last: dict[str, Tensor] = {}

    def launch() -> None:
        last.update(compiled(*inputs))

    # The first call compiles, the second records the CUDA graph.
    for _ in range(_WARMUP):
        launch()
        torch.cuda.synchronize()
    notes = {"compile_seconds": time.perf_counter() - started, "autotuned_alone_on_the_gpu": serialised}
    return DeviceArm(launch, torch.cuda.synchronize, lambda: outputs_of(module, last), notes=notes)


def serialise_autotuning(turn: DeviceLock) -> bool:
    """Make inductor take the GPU's turn for each of its measurements; False where this torch has no such place."""
    from torch._inductor.runtime import benchmarking

    cls: Any = type(benchmarking.benchmarker)
    measure: Callable[..., float] | None = getattr(cls, "benchmark_gpu", None)
    if measure is None:
        return False

    @functools.wraps(measure)
    def in_turn(*args: Any, **kwargs: Any) -> float:
        with turn:
            return measure(*args, **kwargs)

    cls.benchmark_gpu = in_turn
    return True
