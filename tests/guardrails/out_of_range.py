"""Calls at and beyond the limits of a model, with unreadable memory behind each of its tables and inputs.

    python -m tests.guardrails.out_of_range MODEL.onnx ... [--calls 1000] [--seed 0]

Each weight and each input of `run_device` ends where a page without access begins; what lies before it on its own pages
is NaN, or -1. A read behind a table ends the process with a segmentation fault, one before it shows as NaN. `run` must
refuse what ONNX Runtime refuses, and give its numbers otherwise. On a CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import mmap
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import tvm_ffi
from onnxruntime.capi import onnxruntime_pybind11_state as reasons

import relaxtune
from relaxtune.models import OnnxModel, load_model, random_inputs
from relaxtune.models.axes.relations import axis_sizes
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError

_ALIGNMENT = 64
# Beyond every limit of small models, and within memory.
_SIZES = (1, 2, 3, 7, 16, 17, 31, 33)
_TOLERANCE = 2e-3
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEPT: list[mmap.mmap] = []


def guarded(array: np.ndarray, *, keep: bool = False) -> np.ndarray:
    """Return a copy that ends, but for its alignment, where memory cannot be read."""
    size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pages = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    _KEPT.append(memory) if keep else None
    whole = np.frombuffer(memory, "uint8")
    whole[:pages] = 0xFF
    _LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert _LIBC.mprotect(whole.ctypes.data + pages, mmap.PAGESIZE, 0) == 0
    start = pages - size
    made = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def guarded_module(directory: Path) -> Module:
    """Return an artifact loaded with guarded weights."""
    loaded = Module.load(directory, threads=1)
    weights = [tvm_ffi.from_dlpack(guarded(one.numpy(), keep=True)) for one in loaded._weights]
    return Module(loaded.manifest, loaded._machine, loaded.device, weights, 1)


class Caller:
    """Draws calls of a model and judges what comes of them."""

    def __init__(self, path: Path, folder: Path, seed: int) -> None:
        self.model: OnnxModel = load_model(path)
        compiled = relaxtune.compile(path, folder / path.stem, target="llvm", samples=0)
        self.module = guarded_module(compiled.directory)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        self.reference = onnxruntime.InferenceSession(path, options)
        self.rng = np.random.default_rng(seed)
        self.axes = sorted({axis for one in self.module.inputs for axis in one.shape if str(axis).isidentifier()})
        bounds = [int(one.size) for one in self.module.manifest.limits or () if one.size.isdecimal()]
        self.sizes = [*_SIZES, *(size + step for size in bounds for step in (-1, 0, 1, 2, 40))]
        self.indices = {one.input: one for one in self.module.manifest.indices}

    def draw(self) -> dict[str, np.ndarray]:
        """Return inputs; sizes, and half of the time ids, at and beyond the limits."""
        wanted = {axis: int(self.rng.choice(self.sizes)) for axis in self.axes if self.rng.random() < 0.6}
        wanted = {axis: min(size, 3) if "batch" in axis else size for axis, size in wanted.items()}
        dims = axis_sizes(self.model, wanted) | wanted
        feeds = random_inputs(self.model, seed=int(self.rng.integers(2**31)), dims=dims)
        for name, limit in self.indices.items():
            if self.rng.random() < 0.5 and feeds[name].size:
                far = np.iinfo(feeds[name].dtype)
                ends = (limit.least, limit.most, limit.least - 1, limit.most + 1, far.min, far.max)
                feeds[name].reshape(-1)[self.rng.integers(feeds[name].size)] = self.rng.choice(ends)
        return feeds

    def call(self, feeds: Mapping[str, np.ndarray]) -> str:
        """Return what came of a call by `run`, then by `run_device`."""
        return f"run {self._run(feeds)}, run_device {self._run_device(feeds)}"

    def _run(self, feeds: Mapping[str, np.ndarray]) -> str:
        try:
            got = self.module.run(dict(feeds))
        except PipelineError:
            return "refused"
        try:
            wanted = self.reference.run(list(got), dict(feeds))
        except (reasons.Fail, reasons.InvalidArgument, reasons.RuntimeException):
            return "answered what ONNX Runtime refuses"
        near = all(_near(one, other) for one, other in zip(got.values(), wanted, strict=True))
        return "right" if near else "WRONG"

    def _run_device(self, feeds: Mapping[str, np.ndarray]) -> str:
        tensors = [tvm_ffi.from_dlpack(guarded(feeds[one.name])) for one in self.module.inputs]
        try:
            outputs = self.module.run_device(tensors)
        except PipelineError:
            return "refused"
        numbers = [one.numpy() for one in outputs]
        return "inside" if all(one.dtype.kind != "f" or np.isfinite(one).all() for one in numbers) else "OUTSIDE"


def _near(got: np.ndarray, wanted: np.ndarray) -> bool:
    return got.shape == wanted.shape and np.allclose(got, wanted, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def try_calls(path: Path, folder: Path, calls: int, seed: int = 0) -> Counter[str]:
    """Return what came of random calls of a model, and how often."""
    caller = Caller(path, folder, seed)
    found: Counter[str] = Counter()
    for number in range(calls):
        feeds = caller.draw()
        said = caller.call(feeds)
        found[said] += 1
        if "WRONG" in said or "OUTSIDE" in said or "answered" in said:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            print(f"{path.stem} call {number}: {said}: {shapes}", flush=True)
    return found


def main() -> None:
    """Try calls of the models named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    faulthandler.enable()
    for path in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            for said, count in try_calls(path, Path(folder), asked.calls, asked.seed).most_common():
                print(f"{path.stem:32s} {count:6d}  {said}", flush=True)


if __name__ == "__main__":
    main()
