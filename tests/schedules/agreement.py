"""Compare a scheduled PrimFunc with the same PrimFunc unscheduled, at sizes that its symbols take at run time.

Nothing is left to the luck of the memory's contents: every buffer lies between guards (NaN around inputs, so that a
read past an end is seen; a mark around outputs, so that a write is), outputs start as NaN, and before the true inputs
each kernel runs on NaN alone, so that an intermediate element which is never written holds a NaN left by that run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from relaxtune.schedules.fallback import schedule_by_rules
from relaxtune.schedules.marks import SCHEDULED_ATTR
from relaxtune.schedules.templates.lowering import tir_pipeline_for
from tests.unoptimised import unoptimised

GUARD = 1024
MARK = 91


@dataclass(frozen=True)
class Pair:
    """A kernel built twice from one PrimFunc, by the rules and as it came."""

    rule: str
    func: tirx.PrimFunc
    scheduled: tvm.runtime.Module
    plain: tvm.runtime.Module


def build_pair(func: tirx.PrimFunc, target: tvm.target.Target) -> Pair:
    func = func.with_attr("global_symbol", "main")
    rule, schedule = schedule_by_rules("main", func, target)
    scheduled = schedule.mod["main"].with_attr(SCHEDULED_ATTR, True)
    module = tvm.IRModule({"main": scheduled})
    scheduled_lib = tirx.build(module, target=target, pipeline=tir_pipeline_for(module))
    plain_lib = tirx.build(tvm.IRModule({"main": func}), target=unoptimised(target))
    return Pair(rule, func, scheduled_lib, plain_lib)


def symbols_of(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the symbolic sizes, in order of appearance."""
    return [var.name for var in symbol_vars(func)]


def assert_pair_agrees(
    pair: Pair, sizes: Mapping[str, int], rtol: float = 2e-4, atol: float = 2e-4, seed: int = 0
) -> None:
    """Run both builds on the same inputs and compare every output; the message has rule, sizes and worst error."""
    rng = np.random.default_rng(seed)
    written = written_params(pair.func)
    analyzer = tvm.sym.Analyzer()
    for var in symbol_vars(pair.func):
        analyzer.bind(var, tirx.const(sizes[var.name], str(var.ty.dtype)))
    shapes = [_shape(param, analyzer) if is_buffer(param) else None for param in pair.func.params]
    # Values of integer inputs may be indices into any axis of a float input.
    floats = [s for s, p in zip(shapes, pair.func.params, strict=True) if s and str(p.ty.dtype).startswith("float")]
    bound = min((min(shape) for shape in floats if shape), default=2)
    inputs = [
        None if shape is None or index in written else _draw(rng, shape, str(pair.func.params[index].ty.dtype), bound)
        for index, shape in enumerate(shapes)
    ]
    results = []
    for library in (pair.plain, pair.scheduled):
        for poisoned in (True, False):
            arguments, outputs = [], []
            for index, (param, shape) in enumerate(zip(pair.func.params, shapes, strict=True)):
                if shape is None:
                    arguments.append(sizes[param.name])
                    continue
                dtype = str(param.ty.dtype)
                value = inputs[index]
                if value is None:
                    value = np.full(shape, _poison(dtype), _numpy_dtype(dtype))
                elif poisoned and value.dtype.kind == "f":
                    value = np.full(shape, np.nan, value.dtype)
                guarded = Guarded(value, is_output=index in written)
                arguments.append(guarded.tensor)
                if index in written:
                    outputs.append(guarded)
            library["main"](*arguments)
        results.append([output.checked(f"{pair.rule} at {dict(sizes)}") for output in outputs])
    for plain, scheduled in zip(*results, strict=True):
        message = f"rule {pair.rule} at {dict(sizes)}"
        np.testing.assert_allclose(scheduled, plain, rtol=rtol, atol=atol, err_msg=message)


class Guarded:
    """An array between guards, as a tensor that shares its memory."""

    def __init__(self, value: np.ndarray, is_output: bool) -> None:
        self._is_output = is_output
        fill = MARK if is_output or value.dtype.kind != "f" else np.nan
        fill = bool(fill) if value.dtype.kind == "b" else fill
        size = value.size * value.dtype.itemsize
        raw = np.empty(size + 2 * GUARD + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self._flat = raw[start : start + (size + 2 * GUARD) // value.dtype.itemsize * value.dtype.itemsize].view(
            value.dtype
        )
        self._flat[:] = fill
        self._fill = fill
        self._lead = GUARD // value.dtype.itemsize
        self.array = self._flat[self._lead : self._lead + value.size].reshape(value.shape)
        self.array[...] = value
        self.tensor = tvm.runtime.from_dlpack(self.array)

    def checked(self, what: str) -> np.ndarray:
        """Return the values; the guards must be as they were."""
        for side in (self._flat[: self._lead], self._flat[self._lead + self.array.size :]):
            assert (side == self._fill).all(), f"{what}: wrote past the end of an output"
        return self.array


def is_buffer(param: tirx.Var) -> bool:
    return hasattr(param.ty, "shape")


def symbol_vars(func: tirx.PrimFunc) -> list[tirx.Var]:
    found: list[tirx.Var] = []
    for param in func.params:
        for size in param.ty.shape if is_buffer(param) else [param]:
            tvm_ffi.structural_walk(size, (tirx.Var, found.append))
    unique: list[tirx.Var] = []
    for var in found:
        if not any(var.same_as(other) for other in unique):
            unique.append(var)
    return unique


def written_params(func: tirx.PrimFunc) -> set[int]:
    stored: list[tirx.Var] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, lambda store: stored.append(store.buffer)))
    return {index for index, param in enumerate(func.params) if any(param.same_as(buffer) for buffer in stored)}


def _shape(param: tirx.Var, analyzer: tvm.sym.Analyzer) -> tuple[int, ...]:
    return tuple(int(analyzer.simplify(size)) for size in param.ty.shape)


def _numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(dtype)


def _poison(dtype: str) -> float:
    return np.nan if dtype.startswith("float") else 0 if dtype == "bool" else 77


def _draw(rng: np.random.Generator, shape: Sequence[int], dtype: str, bound: int) -> np.ndarray:
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, max(1, bound), shape).astype(dtype)
