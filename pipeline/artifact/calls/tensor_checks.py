"""Whether tensors are what a model takes and gives: names, dtypes, shapes with their symbolic axes, memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tvm_ffi
from tvm_ffi import Device, Tensor

from relaxtune.models.dims import may_be_empty
from relaxtune.models.spec import TensorSpec, numpy_dtype
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


def warn_without_limits(manifest: Manifest, directory: Path) -> None:
    """Warn of an artifact with symbolic axes that does not know their limits."""
    if manifest.limits is None and not all(spec.is_static for spec in manifest.inputs):
        _LOG.warning(
            "%s was compiled by a version that did not keep the limits of its axes: sizes beyond a table of the "
            "model are not refused; compile it again", directory,
        )  # fmt: skip


def _beyond_limits(manifest: Manifest, sizes: Mapping[str, tuple[int, str]]) -> list[str]:
    """Return what is wrong with axis -> (size, the input it is from), by the limits of an artifact's axes."""
    problems = [
        f"axis {axis!r} has size {size} (from {name!r}), expected {least} or more, the room that poolings and "
        "convolutions need; give larger inputs"
        for axis, (size, name) in sizes.items()
        if size < (least := manifest.minima.get(axis, 0))
    ]
    numbers = {axis: size for axis, (size, _) in sizes.items()}
    for relation in manifest.limits or ():
        if problem := relation.problem(numbers):
            words = re.split(r"[(), ]+", f"{relation.axis} {relation.size}")
            parts = (f"{axis}={size} from {name!r}" for axis, (size, name) in sizes.items() if axis in words)
            problems.append(f"{problem} ({', '.join(parts)})")
    return problems + [
        f"axis {axis!r} has size {size} (from {name!r}), the profile it was compiled with has {most} at most"
        for axis, (size, name) in sizes.items()
        if size > (most := manifest.maxima.get(axis, size))
    ]


def check_inputs(inputs: Mapping[str, object], specs: Sequence[TensorSpec], manifest: Manifest | None = None) -> None:
    """Check arrays against a signature; a symbolic axis takes one size over all the inputs.

    With a manifest, axes are within its limits, and integers that are looked up in a table are inside of it.

    Raises `PipelineError`: names every input that does not fit, with expected against got.
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
        # The length of a cache may have no places before its first token; tokens may not.
        held = {axis: [spec.shape for spec in specs if axis in spec.shape] for axis in symbols}
        empty = [
            axis
            for axis, (size, _) in symbols.items()
            if size == 0 and not all(may_be_empty(len(shape), shape.index(axis)) for shape in held[axis])
        ]
        problems = [f"axis {axis!r} has size 0 (from {symbols[axis][1]!r}), expected 1 or more" for axis in empty]
        if manifest is not None:
            problems += _beyond_limits(manifest, symbols)
            indices = ((one, np.asarray(inputs[one.input])) for one in manifest.indices)
            problems += [problem for one, array in indices if (problem := one.problem(array))]
    _refuse(problems, specs)


def check_limits(shapes: Sequence[Sequence[int]], manifest: Manifest) -> None:
    """Check the limits of axes alone, by the shapes of tensors in the model's order.

    Raises `PipelineError`: names every axis that is too small or too large.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for shape, spec in zip(shapes, manifest.inputs, strict=False):
        for size, axis in zip(shape, spec.shape, strict=False):
            if isinstance(axis, str):
                sizes.setdefault(axis, (size, spec.name))
    _refuse(_beyond_limits(manifest, sizes), manifest.inputs)


def _refuse(problems: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    if problems:
        expected = ", ".join(str(spec) for spec in specs)
        raise PipelineError(f"inputs do not fit the model: {'; '.join(problems)}. It takes: {expected}")


def borrowed_input(tensor: SupportsDLPack, name: str, model: str, device: Device) -> Tensor:
    """Return another library's tensor without a copy.

    Raises `PipelineError`: it is on another device, has gaps, or is not aligned.
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

    Raises `ArtifactError`: it gives another number of outputs, or another dtype or shape.
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
    said = last_line(error)
    if "match_cast" in said:
        found = re.search(r"\((\d+) vs\. (\d+)\)", said)
        said = "sizes inside of the graph do not fit together" + (
            f": an axis has size {found[1]}, expected {found[2]}" if found else ""
        )
    return PipelineError(f"the code of {manifest.model} refuses these sizes: {said}")


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
