"""From the accumulators of wgmma to the output: evaluate an epilogue on registers and write whole rows.

A warp owns 16 rows. In each 8 columns, lane l holds of rows `l / 4` and `l / 4 + 8` the columns `2 * (l % 4)` and the
next (PTX ISA 9.0, register fragments of wgmma's D). It evaluates the epilogue for such pairs, puts them into a patch of
shared memory of its own, 16 rows of up to 64 columns, and writes the patch out 16 bytes a lane, whole rows together.

Loads of external buffers at the output's own position, and of one element a column, are made by pairs. Rows and columns
outside the output are clamped for loads, and not written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.ir.expr import TensorLoad
from tvm.tirx.script import builder as T

from schedules.templates.epilogue import Epilogue, MatmulFunction, substitute

_VECTOR_BYTES = 16

# Abramowitz and Stegun 7.1.26: |error| <= 1.5e-7 in exact arithmetic, below 1e-6 with these float32 functions; CUDA's
# erff is exact to 2 units in the last place and takes twice the instructions.
_ERF = "relaxtune_erf"
_ERF_SOURCE = """
__forceinline__ __device__ float relaxtune_erf(float x) {
  float a = fabsf(x);
  float t = __fdividef(1.0f, fmaf(0.3275911f, a, 1.0f));
  float p = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
  return copysignf(fmaf(-p * t, __expf(-a * a), 1.0f), x);
}
"""


class OutputTile:
    """Emits one warp's part of an output tile into the current IRBuilder.

    Parameters
    ----------
    matmul : MatmulFunction
        The function, whose epilogue is over the parameters of `source`.
    source, params : sequence of Var
        Parameters of the original function and, in the same order, those of the kernel under construction.
    patch : Var
        Shared memory `[warps, 16, at least width]` of the output's dtype.
    width : int
        Columns of a patch in use.
    warp, lane : Expr
        Which patch, and which thread of the warp.
    """

    def __init__(
        self,
        matmul: MatmulFunction,
        source: Sequence[tirx.Var],
        params: Sequence[tirx.Var],
        patch: tirx.Var,
        width: int,
        warp: tirx.Expr,
        lane: tirx.Expr,
    ) -> None:
        self._matmul = matmul
        self._epilogue: Epilogue = matmul.epilogue
        self._params = params
        self._renamed = dict(zip(source, params, strict=True))
        self._patch = patch
        self._width = width
        self._warp = warp
        self._lane = lane
        self._loads = self._epilogue.loads()
        self._output = _matrix(params[matmul.output], matmul.m, matmul.n)

    def emit(
        self,
        accumulators: tirx.Var,
        first: int,
        row: tirx.Expr,
        column: tirx.Expr,
        *,
        ragged: tuple[bool, bool],
        columns: int,
    ) -> None:
        """Emit 16 rows from `row` on, `columns` columns from `column` on.

        Parameters
        ----------
        accumulators : Var
            Registers; `first` is the position of this warp's first.
        ragged : pair of bool
            Whether rows, columns may lie outside the output.
        """
        for start in range(0, columns, self._width):
            width = min(self._width, columns - start)
            for eight in range(start // 8, (start + width) // 8):
                for half in range(2):
                    self._pair(accumulators, first + eight * 4 + half * 2, row, column, eight, half, start, ragged)
            T.evaluate(T.cuda.warp_sync())
            self._write(row, column + start, width, ragged)
            T.evaluate(T.cuda.warp_sync())

    def _pair(
        self,
        accumulators: tirx.Var,
        register: int,
        row: tirx.Expr,
        column: tirx.Expr,
        eight: int,
        half: int,
        start: int,
        ragged: tuple[bool, bool],
    ) -> None:
        line = self._lane // 4 + half * 8
        at_row, at_column = row + line, column + eight * 8 + self._lane % 4 * 2
        if ragged[0]:
            at_row = tirx.min(at_row, self._matmul.m - 1)
        if ragged[1]:
            at_column = tirx.min(at_column, self._matmul.n - 2)
        loaded = [self._load_pair(load, at_row, at_column) for load in self._loads]
        pair = T.alloc_local([2], self._matmul.output_dtype)
        for index in range(2):
            value = self._value(accumulators[register + index], loaded, index, at_row, at_column + index)
            T.buffer_store(pair, value, [index])
        with T.vectorized(2) as lane:
            inside = eight * 8 - start + self._lane % 4 * 2
            T.buffer_store(self._patch, pair[lane], [self._warp, line, inside + lane])

    def _load_pair(self, load: TensorLoad, row: tirx.Expr, column: tirx.Expr) -> tirx.Var | None:
        """Emit the load of two neighbouring elements into registers; None where the load is made in place."""
        buffer = self._renamed[load.source]
        if self._epilogue.is_aligned(load):
            matrix = _matrix(buffer, self._matmul.m, self._matmul.n)
            indices: list[tirx.Expr] = [row, column]
        elif self._epilogue.is_per_column(load):
            matrix = _matrix(buffer, 1, self._matmul.n)
            indices = [tirx.IntImm("int32", 0), column]
        else:
            return None
        pair = T.alloc_local([2], str(buffer.ty.dtype))
        with T.vectorized(2) as lane:
            T.buffer_store(pair, matrix[indices[0], indices[1] + lane], [lane])
        return pair

    def _value(
        self,
        accumulator: tirx.Expr,
        loaded: Sequence[tirx.Var | None],
        index: int,
        row: tirx.Expr,
        column: tirx.Expr,
    ) -> tirx.Expr:
        epilogue = self._epilogue
        axes = dict(zip(epilogue.axes, _unflatten(row, column, epilogue), strict=True))

        def replace_load(load: TensorLoad) -> tirx.Expr:
            for known, pair in zip(self._loads, loaded, strict=True):
                if pair is not None and tvm_ffi.structural_equal(known, load):
                    return pair[index]
            buffer = self._renamed[load.source]
            return buffer[tuple(substitute(one, axes) for one in load.indices)]

        value = tvm_ffi.structural_map(epilogue.value, (TensorLoad, replace_load))
        value = tvm_ffi.structural_map(value, (Call, _fast_call))
        return substitute(value, {**axes, epilogue.accumulator: accumulator})

    def _write(self, row: tirx.Expr, column: tirx.Expr, width: int, ragged: tuple[bool, bool]) -> None:
        lanes = _VECTOR_BYTES // _bytes(self._matmul.output_dtype)
        across = width // lanes
        for step in range(math.ceil(16 * across / 32)):
            position = self._lane + step * 32
            line, inside = position // across, position % across
            guards = []
            if 16 * across % 32:
                guards.append(position < 16 * across)
            if ragged[0]:
                guards.append(row + line < self._matmul.m)
            if ragged[1]:
                guards.append(column + inside * lanes < self._matmul.n)
            if guards:
                with T.If(tirx.all(*guards)), T.Then():
                    self._write_vector(row + line, column, line, inside, lanes)
            else:
                self._write_vector(row + line, column, line, inside, lanes)

    def _write_vector(self, row: tirx.Expr, column: tirx.Expr, line: tirx.Expr, inside: tirx.Expr, lanes: int) -> None:
        with T.vectorized(lanes) as lane:
            value = self._patch[self._warp, line, inside * lanes + lane]
            T.buffer_store(self._output, value, [row, column + inside * lanes + lane])


def _matrix(buffer: tirx.Var, rows: int, columns: int) -> tirx.Var:
    """Return a two-dimensional view of a parameter."""
    return T.decl_buffer((rows, columns), str(buffer.ty.dtype), data=buffer.data)


def _unflatten(row: tirx.Expr, column: tirx.Expr, epilogue: Epilogue) -> list[tirx.Expr]:
    """Return the output's position along each of its axes, in the axes' dtypes."""
    indices: list[tirx.Expr] = [column]
    rest = row
    for size in reversed(epilogue.shape[:-1]):
        indices.insert(0, rest % size)
        rest = rest // size
    return [tirx.Cast(str(axis.ty.dtype), index) for index, axis in zip(indices, epilogue.axes, strict=True)]


def _fast_call(call: Call) -> tirx.Expr:
    """Return a float32 call's faster form: erf by a polynomial."""
    if getattr(call.op, "name", "") != "tirx.erf" or str(call.ty.dtype) != "float32":
        return call
    return T.cuda.func_call(_ERF, call.args[0], source_code=_ERF_SOURCE, return_type="float32")


def _bytes(dtype: str) -> int:
    return int(tvm.DataType(dtype).bits) // 8
