"""One symbolic artifact at many sizes on a GPU, beside static artifacts, torch.compile(dynamic=True) and ONNX Runtime.

    python -m benchmarks.whole_models.bench_any_length_gpu [--model bert-base] [--batches 1,8,32] [--lengths 1,7,16,...]
        [--static 1x128,8x512,...] [--arms static,torch,torch_graphs,torch_eager,ort] [--runs 30] [--stream 600]
        [--budget S] [--out FILE.json]

Precision is fp16; nothing is tuned: all kernels are what is taken without a record. Each call's output is first
compared with the float32 model in torch (relative error, Frobenius); it has modules of BERT, GPT-2, Llama, Llama's
decode step, T5 and ViT, none of GPT-2's decode step and Whisper. Then the arms take turns, every second one backwards,
each after a call of its own that is not timed; a time is what a caller waits for, by the host clock, with inputs on the
device. Sizes come a few times before they are timed, so that ours runs as a CUDA graph, and the peers have compiled and
allocated. `torch` is `torch.compile(dynamic=True)`, `torch_graphs` the same with its CUDA graphs
(`mode="reduce-overhead"`), `torch_eager` eager torch captured in a CUDA graph of each size (not a default). Lengths are
of the prompt, or of the cache of a decode step; images have none. `--static` names the points with a static artifact.
`--stream` then makes so many calls of random sizes, a quarter as many different ones up to the largest, by every arm
but static ones and torch's graphs, which are of one size. Artifacts are compiled beside each other; `cpu_s` of a
compilation is its processor time. With `--lock` torch compiles before the lock is taken, at the smallest points of each
kind that it specialises (by which axes are 1), so that runs of several models wait for each other only to measure;
"ready" is printed then. Needs torch; for `ort` onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.any_length.random_sizes import Arm, cut, random_points, time_stream

LENGTHS = (1, 7, 16, 50, 64, 100, 128, 200, 256, 333, 384, 512)
STATIC = tuple((batch, length) for batch in (1, 8, 32) for length in (16, 128, 512))
_SYMBOLIC = "symbolic"
_ERROR_MAX = 2e-2
_WARM = 3
Point = tuple[int, ...]


def axes_of(model: str) -> tuple[str, ...]:
    """Return the free axes of a zoo model: the batch, and a length where it has one."""
    from relaxtune.models.zoo.presets import get_preset

    names = {axis for spec in get_preset(model).inputs for axis in spec.shape if isinstance(axis, str)}
    return tuple(name for name in ("batch", "sequence", "past_sequence") if name in names)


def compile_artifact(model: str, sizes: Mapping[str, int], directory: str, *, unpad: bool = False) -> dict[str, float]:
    """Compile the model, its axes symbolic but for the given sizes; return what it took and made."""
    from relaxtune.models.axis_profile import AxisProfile
    from relaxtune.models.dims import evaluate_dim
    from relaxtune.models.zoo.presets import get_preset
    from relaxtune.pipeline.artifact.compile import compile_module
    from relaxtune.pipeline.artifact.export import write_artifact
    from relaxtune.pipeline.choose.selection import select_kernels
    from relaxtune.pipeline.passes.module import LoweringOptions
    from relaxtune.pipeline.prepare import ModelRequest, prepare_model
    from relaxtune.schedules.targets import portable_host

    began, cpu = time.monotonic(), time.process_time()
    profile = {"batch": AxisProfile(1, 8, 32), "sequence": AxisProfile(1, 128, 512)}
    profile |= {"past_sequence": AxisProfile(1, 512, 2048)}
    request = ModelRequest(
        f"{model}:fp16",
        {spec.name: tuple(evaluate_dim(axis, sizes) for axis in spec.shape) for spec in get_preset(model).inputs},
        "cuda:sm_90a",
        LoweringOptions(unpad=unpad),
        profile={axis: profile[axis] for axis in axes_of(model) if axis not in sizes},
    )
    prepared = prepare_model(request)
    target = portable_host(prepared.target)
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=target, environment=prepared.environment
    )
    compiled = compile_module(prepared.lowered, choices, target)
    took = {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
    write_artifact(compiled, Path(directory))
    calls = prepared.lowered.kernels
    return {
        **took,
        "codegen_s": compiled.seconds["codegen"],
        "default_schedules": sum(choice.scheduled is None for choice in choices),
        "functions": len(choices),
        "launches": sum(compiled.launches.get(name, 1) * len(where) for name, where in calls.items()),
        "library_bytes": sum(path.stat().st_size for path in Path(directory).rglob("*.so")),
    }


def own_arm(module: Any, feeds: Mapping[str, np.ndarray]) -> tuple[Arm, Arm]:
    """Return a call of an artifact, its inputs on the device, and one that does not wait for the device."""
    tensors = module.to_device(feeds)
    if module.input_buffers is not None:
        for tensor, buffer in zip(tensors, module.input_buffers, strict=True):
            tensor.copyto(buffer)
        tensors = module.input_buffers

    def run() -> Any:
        outputs = module.run_device(tensors)
        module.synchronise()
        return {spec.name: tensor for spec, tensor in zip(module.outputs, outputs, strict=True)}

    return run, lambda: module.run_device(tensors)


def host_us(launch: Arm, run: Arm, runs: int) -> float:
    """Return the median time on the host until a call is on its way."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        launch()
        times.append((time.perf_counter() - began) * 1e6)
        run()
    return statistics.median(times)


def error_of(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest relative error of the outputs."""
    import torch

    return max(
        float((torch.from_dlpack(found[name]).to(right.device) - right).norm() / right.norm())
        for name, right in expected.items()
        if name in found
    )


def measure(arms: Mapping[str, Arm], expected: dict[str, Any], runs: int) -> dict[str, dict[str, float]]:
    """Return the median and 99th percentile of each arm in microseconds, and its error; wrong arms are left out.

    `expected` is emptied before arms are timed: what it holds may be large.
    """
    found: dict[str, dict[str, float]] = {}
    for name, arm in arms.items():
        error = error_of(arm(), expected)
        for _ in range(_WARM):
            arm()
        found[name] = {"error": error}
    expected.clear()
    right = [name for name, result in found.items() if result["error"] < _ERROR_MAX]
    times: dict[str, list[float]] = {name: [] for name in right}
    for turn in range(runs):
        for name in right if turn % 2 == 0 else right[::-1]:
            # After another arm's call a short one is up to 50 us late: each arm is timed after a call of its own.
            arms[name]()
            began = time.perf_counter()
            arms[name]()
            times[name].append((time.perf_counter() - began) * 1e6)
    for name, values in times.items():
        found[name] |= {"median_us": statistics.median(values), "p99_us": float(np.percentile(values, 99))}
    return found


def main() -> None:
    """Compile, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    points = lambda text: tuple(tuple(map(int, point.split("x"))) for point in text.split(",") if point)  # noqa: E731
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--batches", type=numbers, default=(1, 8, 32))
    parser.add_argument("--lengths", type=numbers, default=LENGTHS)
    parser.add_argument("--static", type=points, default=STATIC)
    parser.add_argument("--arms", default="static,torch,torch_graphs,ort", type=lambda text: text.split(","))
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--stream", type=int, default=0, help="calls of random sizes, after the points")
    parser.add_argument("--jobs", type=int, default=12, help="artifacts that are compiled at a time")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further size is begun")
    parser.add_argument("--lock", type=Path, help="a file that runs lock which take the GPU one after another")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began, axes = time.monotonic(), axes_of(arguments.model)
    lengths = [(length,) for length in arguments.lengths] if len(axes) > 1 else [()]
    points_of = [(batch, *length) for length in lengths for batch in arguments.batches]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool,
    ):
        jobs: dict[Point, Future[dict[str, float]]] = {}
        for point in [(), *(arguments.static if "static" in arguments.arms else ())]:
            sizes = dict(zip(axes, point, strict=False))
            jobs[point] = pool.submit(compile_artifact, arguments.model, sizes, f"{folder}/{text_of(point)}")
        run_points(arguments, jobs, Path(folder), points_of, began)


def text_of(point: Point) -> str:
    """Return a point as a key of the results."""
    return "x".join(map(str, point)) or _SYMBOLIC


def smallest_of_kinds(points: Sequence[Point]) -> list[Point]:
    """Return the smallest point of each kind for which torch compiles code of its own: by which axes are 1."""
    kinds = {tuple(size == 1 for size in point): point for point in sorted(points, key=math.prod, reverse=True)}
    return list(kinds.values())


def run_points(
    arguments: argparse.Namespace,
    jobs: Mapping[Point, Future[dict[str, float]]],
    folder: Path,
    points: Sequence[Point],
    began: float,
) -> None:
    """Time every point, and write the results after each."""
    from benchmarks.any_length.peers import Peers
    from benchmarks.gpu_arms.results import machine
    from relaxtune.models.inputs import unpadded_inputs
    from relaxtune.pipeline.artifact.module import Module

    axes = axes_of(arguments.model)
    compiled = {text_of(point): job.result() for point, job in jobs.items()}
    for name, facts in compiled.items():
        print(name, ", ".join(f"{key} {value:.6g}" for key, value in facts.items()), flush=True)
    peers = Peers(arguments.model, arguments.arms)

    def feeds_of(point: Point) -> dict[str, np.ndarray]:
        return unpadded_inputs(peers.model, seed=0, dims=dict(zip(axes, point, strict=True)))

    def results_of(point: Point) -> dict[str, dict[str, float]]:
        feeds = feeds_of(point)
        expected = peers.expected(feeds)
        symbolic, launch = own_arm(module, feeds)
        arms = {_SYMBOLIC: symbolic, **peers.arms(feeds, checks=True)}
        if point in jobs:
            arms["static"] = own_arm(Module.load(folder / text_of(point)), feeds)[0]
        found = measure(arms, expected, arguments.runs)
        found[_SYMBOLIC]["host_us"] = host_us(launch, symbolic, arguments.runs)
        return found

    if arguments.lock:
        for point in smallest_of_kinds(points):
            peers.compile_at(feeds_of(point))
        print("ready", flush=True)
        # Held until the process ends.
        fcntl.flock(os.open(arguments.lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    module = Module.load(folder / _SYMBOLIC)
    document: dict[str, Any] = {
        **machine(),
        "model": arguments.model,
        "notes": peers.notes,
        "compiled": compiled,
        "points": {},
    }
    print(peers.notes, flush=True)
    for point in points:
        if time.monotonic() - began > arguments.budget:
            print("the budget is spent", flush=True)
            break
        found = results_of(point)
        document["points"][text_of(point)] = found
        text = ", ".join(
            f"{name} {one['median_us']:.0f}" if "median_us" in one else f"{name} WRONG {one['error']:.3g}"
            for name, one in found.items()
        )
        host = found[_SYMBOLIC]["host_us"]
        print(f"{text_of(point)}: {text} us; host {host:.0f}; error {found[_SYMBOLIC]['error']:.2g}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.stream and time.monotonic() - began < arguments.budget:
        most = tuple(max(sizes) for sizes in zip(*points, strict=True))
        arms_of: dict[str, list[Arm]] = {}
        largest = feeds_of(most)
        for point in random_points(most, arguments.stream // 4):
            feeds = cut(largest, peers.model.inputs, dict(zip(axes, point, strict=True)))
            of_point = {_SYMBOLIC: own_arm(module, feeds)[0], **peers.arms(feeds, checks=False)}
            for name in of_point.keys() - {"torch_graphs", "torch_eager"}:
                arms_of.setdefault(name, []).append(of_point[name])
        document["stream"] = {"calls": arguments.stream, **time_stream(arms_of, arguments.stream)}
        print("stream:", document["stream"], flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for other in ("static", "torch", "torch_graphs", "torch_eager", "ort"):
        pairs = [one for one in document["points"].values() if "median_us" in one.get(other, {})]
        own = [one[_SYMBOLIC].get("median_us", float("nan")) for one in pairs]
        ratios = [mine / one[other]["median_us"] for mine, one in zip(own, pairs, strict=True)]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"symbolic / {other}: geometric mean {mean:.3f}, greatest {max(ratios):.3f}, {len(ratios)} sizes")


if __name__ == "__main__":
    main()
