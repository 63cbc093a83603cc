"""Whether tensors are what a model takes and gives: names, dtypes, shapes with their symbolic axes, memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import tvm_ffi
from tvm_ffi import Device, Tensor

from relaxtune.models.dims import may_be_empty
from relaxtune.models.spec import AxisRelation, IndexLimit, TensorSpec, numpy_dtype
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from relaxtune.pipeline.printable import last_line

_LOG = logging.getLogger(__name__)

# Compiled code reads its arguments in vectors of this many bytes.
_ALIGNMENT = 64
# TVM's messages for tensors that its code was not compiled for.
_REFUSALS = (
    "ErrorContext(fn=",
    "ErrorContext(match_cast",
    "Mismatched ",
    "Invoking function",
    "storage allocation failure",
)


class SupportsDLPack(Protocol):
    """A tensor of any library that exchanges tensors by DLPack."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        """Return the tensor as a DLPack capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind and the number of its device."""


@dataclass(frozen=True)
class AxisLimits:
    """Symbolic axis -> its least size, where that is more than 1, and its largest, where it has one."""

    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    tables: Sequence[AxisRelation] = ()  # What tables of the graph allow.
    indices: Sequence[IndexLimit] = ()  # What values are looked up in tables.

    def problems(self, sizes: Mapping[str, tuple[int, str]]) -> list[str]:
        """Return what is wrong with axis -> (size, the input it is from)."""
        small = [
            f"axis {axis!r} has size {size} (from {name!r}), expected {least} or more, the room that poolings and "
            "convolutions need; give larger inputs"
            for axis, (size, name) in sizes.items()
            if size < (least := self.least.get(axis, 0))
        ]
        numbers = {axis: size for axis, (size, _) in sizes.items()}
        small += [self._of_table(one, problem, sizes) for one in self.tables if (problem := one.problem(numbers))]
        return small + [
            f"axis {axis!r} has size {size} (from {name!r}), the profile it was compiled with has {most} at most"
            for axis, (size, name) in sizes.items()
            if size > (most := self.most.get(axis, size))
        ]

    @staticmethod
    def _of_table(relation: AxisRelation, problem: str, sizes: Mapping[str, tuple[int, str]]) -> str:
        words = re.split(r"[(), ]+", f"{relation.axis} {relation.size}")
        named = (axis for axis in sizes if axis in words)
        parts = (f"{axis}={sizes[axis][0]} from {sizes[axis][1]!r}" for axis in named)
        return f"{problem} ({', '.join(parts)})"


_NO_LIMITS = AxisLimits()


def limits_of(manifest: Manifest) -> AxisLimits:
    """Return between which sizes the axes of an artifact's inputs may be."""
    return AxisLimits(manifest.minima, manifest.maxima, manifest.limits or (), manifest.indices)


def warn_without_limits(manifest: Manifest, directory: Path) -> None:
    """Warn of an artifact with symbolic axes that does not know their limits."""
    if manifest.limits is None and not all(spec.is_static for spec in manifest.inputs):
        _LOG.warning(
            "%s was compiled by a version that did not keep the limits of its axes: sizes beyond a table of the "
            "model are not refused; compile it again", directory,
        )  # fmt: skip


def check_inputs(inputs: Mapping[str, object], specs: Sequence[TensorSpec], limits: AxisLimits = _NO_LIMITS) -> None:
    """Check arrays against a signature; a symbolic axis takes one size over all the inputs, within its limits.

    Integers that are looked up in a table are inside of it.

    Raises
    ------
    PipelineError
        Names every input that does not fit, with expected against got.
    """
    if not hasattr(inputs, "keys"):
        _refuse([f"expected arrays by name, got a {type(inputs).__name__}"], specs)
    names = {spec.name for spec in specs}
    problems = [f"unexpected input {name!r}" for name in inputs if name not in names]
    symbols: dict[str, tuple[int, str]] = {}
    for spec in specs:
        array = inputs.get(spec.name)
        if array is None:
            problems.append(f"missing input {spec}")
            continue
        if not isinstance(array, np.ndarray | np.generic):
            problems.append(
                f"input {spec.name!r}: expected a NumPy array, got a {type(array).__name__}; give "
                f"numpy.asarray(..., dtype={spec.dtype!r})"
            )
            continue
        if array.dtype != numpy_dtype(spec.dtype):
            problems.append(f"input {spec.name!r}: expected dtype {spec.dtype}, got {array.dtype}")
        if not _shape_fits(array.shape, spec, symbols):
            got = "x".join(str(size) for size in array.shape) or "a scalar"
            problems.append(f"input {spec.name!r}: expected shape {_shape_text(spec, symbols)}, got {got}")
    if not problems:
        empty = [axis for axis, (size, _) in symbols.items() if size == 0 and not _may_be_empty(axis, specs)]
        problems = [f"axis {axis!r} has size 0 (from {symbols[axis][1]!r}), expected 1 or more" for axis in empty]
        problems += limits.problems(symbols)
        problems += [problem for one in limits.indices if (problem := one.problem(np.asarray(inputs[one.input])))]
    _refuse(problems, specs)


def check_limits(shapes: Sequence[Sequence[int]], specs: Sequence[TensorSpec], limits: AxisLimits) -> None:
    """Check the limits of axes alone, by the shapes of tensors in the model's order.

    Raises
    ------
    PipelineError
        Names every axis that is too small or too large.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for shape, spec in zip(shapes, specs, strict=False):
        for size, axis in zip(shape, spec.shape, strict=False):
            if isinstance(axis, str):
                sizes.setdefault(axis, (size, spec.name))
    _refuse(limits.problems(sizes), specs)


def _refuse(problems: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    if problems:
        expected = ", ".join(str(spec) for spec in specs)
        raise PipelineError(f"inputs do not fit the model: {'; '.join(problems)}. It takes: {expected}")


def borrowed_input(tensor: SupportsDLPack, name: str, model: str, device: Device) -> Tensor:
    """Return another library's tensor without a copy.

    Raises
    ------
    PipelineError
        It is on another device, has gaps, or is not aligned.
    """
    where = f"input {name!r} of {model}"
    if tuple(map(int, tensor.__dlpack_device__())) != (int(device.dlpack_device_type()), int(device.index)):
        raise PipelineError(f"{where} is on another device than the artifact ({device}); move it there")
    try:
        borrowed: Tensor = tvm_ffi.from_dlpack(tensor, require_alignment=_ALIGNMENT, require_contiguous=True)
    except (RuntimeError, ValueError, BufferError) as e:
        raise PipelineError(
            f"{where} cannot be read where it lies: {last_line(e)}. Expected a compact tensor that starts at a "
            f"multiple of {_ALIGNMENT} bytes; give a copy of it, or use `to_device`"
        ) from e
    return borrowed


def check_outputs(outputs: Sequence[Tensor], manifest: Manifest) -> None:
    """Check that the code gives what the manifest states.

    Raises
    ------
    ArtifactError
        It gives another number of outputs, or another dtype or shape.
    """
    if len(outputs) != len(manifest.outputs):
        raise false_manifest(manifest, f"{len(outputs)} outputs instead of {len(manifest.outputs)}")
    for spec, tensor in zip(manifest.outputs, outputs, strict=True):
        sizes = zip(spec.shape, tensor.shape, strict=False)
        fits = len(spec.shape) == len(tensor.shape) and all(a == b for a, b in sizes if isinstance(a, int))
        if str(tensor.dtype) != spec.dtype or not fits:
            raise false_manifest(manifest, f"output {spec} is {tensor.dtype}{list(tensor.shape)}")


def false_manifest(manifest: Manifest, what: str) -> ArtifactError:
    """Return the error of code that does something else than its manifest states."""
    return ArtifactError(
        f"the code of {manifest.model} is not what its manifest states: {what}; compile the model again"
    )


def refused_tensors(manifest: Manifest, error: Exception, *, static: bool) -> PipelineError | None:
    """Return the error of code that was not compiled for a call's tensors; None for any other error."""
    if not any(sign in str(error) for sign in _REFUSALS):
        return None
    if static:
        return false_manifest(manifest, last_line(error))
    return PipelineError(f"the code of {manifest.model} refuses these sizes: {last_line(error)}")


def _may_be_empty(axis: str, specs: Sequence[TensorSpec]) -> bool:
    """Return whether an axis may have no places: the length of a cache may before its first token; tokens may not."""
    held = [spec.shape for spec in specs if axis in spec.shape]
    return all(may_be_empty(len(shape), shape.index(axis)) for shape in held)


def _shape_fits(shape: tuple[int, ...], spec: TensorSpec, symbols: dict[str, tuple[int, str]]) -> bool:
    if len(shape) != len(spec.shape):
        return False
    for size, axis in zip(shape, spec.shape, strict=True):
        # An axis such as "past + new" is computed inside the module, which checks it itself.
        if isinstance(axis, str) and not axis.isidentifier():
            continue
        expected = axis if isinstance(axis, int) else symbols.setdefault(axis, (size, spec.name))[0]
        if size != expected:
            return False
    return True


def _shape_text(spec: TensorSpec, symbols: Mapping[str, tuple[int, str]]) -> str:
    axes = []
    for axis in spec.shape:
        known = symbols.get(axis) if isinstance(axis, str) else None
        axes.append(f"{axis}={known[0]} (from {known[1]!r})" if known and known[1] != spec.name else str(axis))
    return ("x" if spec.is_static else ", ").join(axes) or "a scalar"
