"""One symbolic artifact at many sizes on a GPU, beside static artifacts, torch.compile(dynamic=True) and ONNX Runtime.

    python -m benchmarks.bench_any_length_gpu [--model bert-base] [--batches 1,8,32] [--lengths 1,7,16,...]
        [--static 16,64,128,333,512] [--arms static,torch,ort] [--runs 30] [--budget S] [--out FILE.json]

Precision is fp16; nothing is tuned: all kernels are what is taken without a record. Each call's output is first
compared with the float32 module in torch (relative error, Frobenius). Then the arms take turns; a time is what a caller
waits for, by the host clock, with inputs on the device. Sizes come a few times before they are timed, so that ours runs
as a CUDA graph, and ONNX Runtime and torch have compiled and allocated. `--static` names the lengths with a static
artifact. Needs torch; for `ort` onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (1, 7, 16, 50, 64, 100, 128, 200, 256, 333, 384, 512)
STATIC = (16, 64, 128, 333, 512)
_SYMBOLIC = "symbolic"
_ERROR_MAX = 2e-2
_WARM = 3
Arm = Callable[[], Any]


def compile_artifact(model: str, sizes: Mapping[str, int | str], directory: str) -> tuple[float, int]:
    """Compile the model for static sizes, or symbolic ones (names); return seconds and fallback kernels."""
    from relaxtune.models.axis_profile import AxisProfile
    from relaxtune.models.zoo.presets import get_preset
    from relaxtune.pipeline.artifact.compile import compile_module, portable_host
    from relaxtune.pipeline.artifact.export import write_artifact
    from relaxtune.pipeline.choose.selection import select_kernels
    from relaxtune.pipeline.passes.module import LoweringOptions
    from relaxtune.pipeline.prepare import ModelRequest, prepare_model

    began = time.monotonic()
    shapes = {spec.name: tuple(sizes.get(str(axis), axis) for axis in spec.shape) for spec in get_preset(model).inputs}
    symbolic = {axis for axis, size in sizes.items() if isinstance(size, str)}
    most = {"batch": AxisProfile(1, 8, 32), "sequence": AxisProfile(1, 128, 512)}
    request = ModelRequest(
        model,
        shapes,
        "cuda:sm_90a",
        LoweringOptions(precision="fp16"),
        profile={axis: most[axis] for axis in symbolic},
    )
    prepared = prepare_model(request)
    target = portable_host(prepared.target)
    choices = select_kernels(
        prepared.lowered, prepared.tasks, database=None, target=target, environment=prepared.environment
    )
    write_artifact(compile_module(prepared.lowered, choices, target), Path(directory))
    return time.monotonic() - began, sum(choice.scheduled is None for choice in choices)


class Peers:
    """The float32 reference, torch's arm and ONNX Runtime's."""

    def __init__(self, model: str, arms: Sequence[str]) -> None:
        """Build the modules and sessions that are asked for."""
        import torch

        from benchmarks.gpu_arms import torch_models
        from benchmarks.gpu_arms.cases import Case, weights_of
        from relaxtune.models import load_model
        from relaxtune.models.zoo.presets import get_preset

        self.notes: dict[str, str] = {}
        torch.set_grad_enabled(False)
        shapes = {spec.name: spec.shape for spec in get_preset(model).inputs}
        self.model = load_model(model, shapes=shapes)
        weights, case = weights_of(self.model.proto), Case(model, 1, 16)

        def built(dtype: Any) -> Any:
            return torch_models.build(case, weights, {}, device="cuda", dtype=dtype, masked=True)

        self._exact = built(torch.float32)
        self._torch = torch.compile(built(torch.float16), dynamic=True) if "torch" in arms else None
        self._session = self._ort(load_model(f"{model}:fp16", shapes=shapes)) if "ort" in arms else None

    def _ort(self, model: Any) -> Any:
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            self.notes["ort"] = f"onnxruntime {onnxruntime.__version__} has no CUDA provider"
            return None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.serialize(), options, providers=["CUDAExecutionProvider"])
        return session if "CUDAExecutionProvider" in session.get_providers() else None

    def expected(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the outputs in float32."""
        import torch

        tensors = [torch.from_numpy(feeds[spec.name]).cuda() for spec in self.model.inputs]
        return {name: tensor.float() for name, tensor in self._exact(*tensors).items()}

    def torch_arm(self, feeds: Mapping[str, np.ndarray]) -> Arm | None:
        """Return a call of the compiled module."""
        import torch

        if self._torch is None:
            return None
        tensors = [torch.from_numpy(feeds[spec.name]).cuda() for spec in self.model.inputs]

        def run() -> Any:
            outputs = self._torch(*tensors)
            torch.cuda.synchronize()
            return outputs

        return run

    def ort_arm(self, feeds: Mapping[str, np.ndarray]) -> Arm | None:
        """Return a call with inputs and outputs on the device."""
        import onnxruntime

        if self._session is None:
            return None
        session, binding = self._session, self._session.io_binding()
        held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in feeds.items()}
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for value in session.get_outputs():
            binding.bind_output(value.name, "cuda", 0)

        def run() -> Any:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            arrays = binding.copy_outputs_to_cpu() if not checked else ()
            checked.append(held)
            return {one.name: array for one, array in zip(session.get_outputs(), arrays, strict=False)}

        checked: list[object] = []
        return run


def own_arm(module: Any, feeds: Mapping[str, np.ndarray]) -> Arm:
    """Return a call of an artifact, its inputs on the device."""
    tensors = module.to_device(feeds)
    if module.input_buffers is not None:
        for tensor, buffer in zip(tensors, module.input_buffers, strict=True):
            tensor.copyto(buffer)
        tensors = module.input_buffers

    def run() -> Any:
        outputs = module.run_device(tensors)
        module.synchronise()
        return {spec.name: tensor for spec, tensor in zip(module.outputs, outputs, strict=True)}

    return run


def error_of(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest relative error of the outputs."""
    import torch

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float()
        return torch.from_numpy(np.asarray(value.numpy() if hasattr(value, "numpy") else value)).cuda().float()

    return max(
        float((wide(found[name]) - right).norm() / right.norm()) for name, right in expected.items() if name in found
    )


def measure(arms: Mapping[str, Arm], expected: Mapping[str, Any], runs: int) -> dict[str, dict[str, float]]:
    """Return the median and 99th percentile of each arm in microseconds, and its error; wrong arms are left out."""
    found: dict[str, dict[str, float]] = {}
    for name, arm in arms.items():
        error = error_of(arm(), expected)
        for _ in range(_WARM):
            arm()
        found[name] = {"error": error}
    right = [name for name, result in found.items() if result["error"] < _ERROR_MAX]
    times: dict[str, list[float]] = {name: [] for name in right}
    for _ in range(runs):
        for name in right:
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
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--batches", type=numbers, default=(1, 8, 32))
    parser.add_argument("--lengths", type=numbers, default=LENGTHS)
    parser.add_argument("--static", type=numbers, default=STATIC)
    parser.add_argument("--arms", default="static,torch,ort", type=lambda text: text.split(","))
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further size is begun")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began, names = time.monotonic(), {"batch": "batch", "sequence": "sequence"}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(14, get_context("spawn")) as pool:
        jobs: dict[Any, Future[tuple[float, int]]] = {}
        jobs[_SYMBOLIC] = pool.submit(compile_artifact, arguments.model, names, f"{folder}/{_SYMBOLIC}")
        points = [(batch, length) for batch in arguments.batches for length in arguments.lengths]
        for batch, length in points if "static" in arguments.arms else ():
            if length in arguments.static:
                sizes = {"batch": batch, "sequence": length}
                place = f"{folder}/{batch}x{length}"
                jobs[batch, length] = pool.submit(compile_artifact, arguments.model, sizes, place)
        run_points(arguments, jobs, Path(folder), points, began)


def run_points(
    arguments: argparse.Namespace,
    jobs: Mapping[Any, Future[tuple[float, int]]],
    folder: Path,
    points: Sequence[tuple[int, int]],
    began: float,
) -> None:
    """Time every point, and write the results after each."""
    from relaxtune.models.inputs import unpadded_inputs
    from relaxtune.pipeline.artifact.runtime import Module

    peers = Peers(arguments.model, arguments.arms)
    seconds, fallbacks = jobs[_SYMBOLIC].result()
    module = Module.load(folder / _SYMBOLIC)
    document: dict[str, Any] = {
        "model": arguments.model,
        "compile_s": seconds,
        "fallbacks": fallbacks,
        "notes": peers.notes,
        "points": {},
    }
    print(f"compiled in {seconds:.0f} s, {fallbacks} default schedules; {peers.notes}", flush=True)
    for batch, length in points:
        if time.monotonic() - began > arguments.budget:
            print("the budget is spent", flush=True)
            break
        feeds = unpadded_inputs(peers.model, seed=0, dims={"batch": batch, "sequence": length})
        arms: dict[str, Arm] = {_SYMBOLIC: own_arm(module, feeds)}
        if (batch, length) in jobs:
            document.setdefault("static_compile_s", {})[f"{batch}x{length}"] = jobs[batch, length].result()[0]
            arms["static"] = own_arm(Module.load(folder / f"{batch}x{length}"), feeds)
        others = {"torch": peers.torch_arm(feeds), "ort": peers.ort_arm(feeds)}
        arms |= {name: arm for name, arm in others.items() if arm is not None}
        found = measure(arms, peers.expected(feeds), arguments.runs)
        document["points"][f"{batch}x{length}"] = found
        text = ", ".join(
            f"{name} {one['median_us']:.0f}" if "median_us" in one else f"{name} WRONG {one['error']:.3g}"
            for name, one in found.items()
        )
        print(f"{batch}x{length}: {text} us; error {found[_SYMBOLIC]['error']:.2g}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for other in ("static", "torch", "ort"):
        pairs = [one for one in document["points"].values() if "median_us" in one.get(other, {})]
        own = [one[_SYMBOLIC].get("median_us", float("nan")) for one in pairs]
        ratios = [mine / one[other]["median_us"] for mine, one in zip(own, pairs, strict=True)]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"symbolic / {other}: geometric mean {mean:.3f}, greatest {max(ratios):.3f}, {len(ratios)} sizes")


if __name__ == "__main__":
    main()
