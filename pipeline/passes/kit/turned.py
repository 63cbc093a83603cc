"""How a constant matrix in half precision is kept: [K, N], or turned where the template for few rows reads it."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import row_count, shape_of, static_shape
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.targets import target_features
from relaxtune.schedules.templates.gemv.few_rows import makes_few_rows

# Elements of a load of 16 bytes.
_LOADED = 8


def is_turned(data: tvm.ir.Expr, state: LoweringState) -> bool:
    """Whether a constant that `data` is multiplied by is kept turned: for few rows, if its rows of K can be loaded."""
    length = (shape_of(data) or [None])[-1]
    aligned = isinstance(length, tvm.tirx.IntImm) and int(length) % _LOADED == 0
    return aligned and makes_few_rows(row_count(data), target_features(state.target))


def stored_shape(data: tvm.ir.Expr, weight: tvm.ir.Expr, state: LoweringState, times: int = 1) -> tuple[int, ...]:
    """Return the shape in which a constant [K, N] is kept, `times` as many columns of it."""
    rows, columns = static_shape(weight) or (0, 0)
    return (times * columns, rows) if is_turned(data, state) else (rows, times * columns)


def stored_weight(matrix: np.ndarray, dtype: str, data: tvm.ir.Expr, state: LoweringState) -> tvm.ir.Expr:
    """Return the constant as which a matrix [K, N] that `data` is multiplied by is kept."""
    return relax.const(np.ascontiguousarray(matrix.T) if is_turned(data, state) else matrix, dtype)
