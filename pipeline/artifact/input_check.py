"""Whether arrays are what a model takes: names, dtypes, shapes with their symbolic axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from relaxtune.models import TensorSpec
from relaxtune.models.dims import may_be_empty
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.errors import PipelineError


def check_inputs(
    inputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec], maxima: Mapping[str, int] | None = None
) -> None:
    """Check arrays against a signature; a symbolic axis takes one size over all the inputs, up to its maximum.

    Raises
    ------
    PipelineError
        Names every input that does not fit, with expected against got.
    """
    names = {spec.name for spec in specs}
    problems = [f"unexpected input {name!r}" for name in inputs if name not in names]
    symbols: dict[str, tuple[int, str]] = {}
    for spec in specs:
        array = inputs.get(spec.name)
        if array is None:
            problems.append(f"missing input {spec}")
            continue
        if array.dtype != numpy_dtype(spec.dtype):
            problems.append(f"input {spec.name!r}: expected dtype {spec.dtype}, got {array.dtype}")
        if not _shape_fits(array.shape, spec, symbols):
            got = "x".join(str(size) for size in array.shape) or "a scalar"
            problems.append(f"input {spec.name!r}: expected shape {_shape_text(spec, symbols)}, got {got}")
    if not problems:
        empty = [axis for axis, (size, _) in symbols.items() if size == 0 and not _may_be_empty(axis, specs)]
        problems = [f"axis {axis!r} has size 0 (from {symbols[axis][1]!r}), expected 1 or more" for axis in empty]
        problems += [
            f"axis {axis!r} has size {size} (from {name!r}), the profile it was compiled with has {most} at most"
            for axis, (size, name) in symbols.items()
            if size > (most := (maxima or {}).get(axis, size))
        ]
    if problems:
        expected = ", ".join(str(spec) for spec in specs)
        raise PipelineError(f"inputs do not fit the model: {'; '.join(problems)}. It takes: {expected}")


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
