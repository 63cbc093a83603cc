"""Tensor intrinsics for matmuls of 16 x 16 x 16 on tensor cores, by name, for schedules that name them.

TVM's own (`tvm.s_tir.tensor_intrin.cuda`) know no bfloat16 and take eleven seconds to import. These are written in the
same terms, fragments in the scopes `wmma.*`, for which TVM writes calls of CUDA's `mma.h`. The pipeline's code
generation puts `ldmatrix` and `mma.sync` behind the calls: m16n8k16 for halves, m16n8k8 in tf32 for float32.

TVM takes no fragment of an operand in float32: these have the scope of sums, and what their stride is wrapped in says
which operand it is.

Operands are in dynamic shared memory; their rows must begin at multiples of 16 bytes. The right one is stored [k, n],
or, for the kinds that end in `_turned`, [n, k].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import PrimFunc
from tvm.tirx.script import builder as T

TILE = 16
HALVES = ("float16", "bfloat16")
INPUTS = (*HALVES, "float32")
SHARED = "shared.dyn"
# Scope and dtype of sums.
_SUMS = ("wmma.accumulator", "float32")

# By the kind of the intrinsic that loads an operand: scope and layout of its fragments, and the wrapper (see above).
_OPERANDS = {
    "load_a": ("wmma.matrix_a", "row_major", "relaxtune_left"),
    "load_b": ("wmma.matrix_b", "row_major", "relaxtune_right"),
    "load_b_turned": ("wmma.matrix_b", "col_major", "relaxtune_right_turned"),
}


def fragment_scope(kind: str, dtype: str) -> str:
    """Return the scope of what an intrinsic of a kind `load_...` loads."""
    return _OPERANDS[kind][0] if dtype in HALVES else "wmma.accumulator"


def intrinsic_name(kind: str, dtype: str) -> str:
    """Return the name of an intrinsic.

    The kinds are `load_a`, `load_b`, `load_b_turned`, `multiply`, `multiply_turned`, `fill` and `store`.
    """
    return f"relaxtune_mma_{kind}_{dtype}"


@cache
def register_intrinsics() -> None:
    """Register the intrinsics in this process; schedules that use them cannot be replayed before."""

    def register(
        kind: str, dtype: str, block: str, tiles: Sequence[tuple[str, str]], value: Callable[..., tirx.Expr],
        call: Callable[..., tirx.Expr],
    ) -> None:  # fmt: skip
        described = _function(tiles, lambda buffers: _store_each(buffers, block, value), strided=False)
        called = _function(tiles, lambda buffers: T.evaluate(call(*buffers)), strided=True)
        TensorIntrin.register(intrinsic_name(kind, dtype), described, called)

    def element(source: tirx.Buffer, _target: tirx.Buffer, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        return source[i, j]

    for dtype in INPUTS:
        left, right = ((fragment_scope(kind, dtype), dtype) for kind in ("load_a", "load_b"))
        for kind in _OPERANDS:
            tiles = ((SHARED, dtype), (fragment_scope(kind, dtype), dtype))
            register(kind, dtype, "copy", tiles, element, partial(_load_call, kind))
        for turned, kind in ((False, "multiply"), (True, "multiply_turned")):
            register(kind, dtype, "", (left, right, _SUMS), partial(_product, turned), _multiply_call)
    zero = T.float32(0)
    register("fill", "float32", "init", (_SUMS,), lambda *_: zero, _fill_call)
    register("store", "float32", "copy", (_SUMS, (SHARED, "float32")), element, _store_call)


def _function(
    tiles: Sequence[tuple[str, str]], emit: Callable[[list[tirx.Buffer]], None], *, strided: bool
) -> PrimFunc:
    """Return a function of tiles of some scopes and dtypes, which reads all and writes the last one."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        buffers = [
            T.match_buffer(
                T.arg(f"tile_{number}", T.handle()), (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=scope,
                strides=[T.int32(), T.int32()] if strided else None,
            )
            for number, (scope, dtype) in enumerate(tiles)
        ]  # fmt: skip
        *read, written = (buffer[0:TILE, 0:TILE] for buffer in buffers)
        with T.sblock("root"):
            T.reads(*([written, *read] if len(tiles) == 3 else read))
            T.writes(written)
            emit(buffers)
    return builder.get()


def _store_each(buffers: list[tirx.Buffer], block: str, value: Callable[..., tirx.Expr]) -> None:
    """Store each element of the last buffer; of three, it is a sum over a third axis."""
    axes = "SSR" if len(buffers) == 3 else "SS"
    with T.grid(*(TILE for _ in axes)) as loops, T.sblock(block):
        places = T.axis.remap(axes, list(loops))
        T.buffer_store(buffers[-1], value(*buffers, *places), places[:2])


def _product(
    turned: bool, a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer, i: tirx.Var, j: tirx.Var, k: tirx.Var
) -> tirx.Expr:
    left, right = a[i, k], b[j, k] if turned else b[k, j]
    product = left * right if str(a.dtype) == "float32" else T.Cast("float32", left) * T.Cast("float32", right)
    return c[i, j] + product


def _fragment(buffer: tirx.Buffer) -> tirx.Expr:
    stride = buffer.strides[0]
    return buffer.elem_offset // stride // TILE * (stride // TILE) + buffer.elem_offset % stride // TILE


def _load_call(kind: str, source: tirx.Buffer, target: tirx.Buffer) -> tirx.Expr:
    _, layout, wrapper = _OPERANDS[kind]
    stride, pointer = source.strides[0], source.access_ptr("r", ptr_type=source.dtype)
    wrapped = stride if str(source.dtype) in HALVES else T.call_extern("int32", wrapper, stride)
    shape = (TILE, TILE, TILE)
    return T.tvm_load_matrix_sync(target.data, *shape, _fragment(target), pointer, wrapped, layout, dtype="void")


def _store_call(source: tirx.Buffer, target: tirx.Buffer) -> tirx.Expr:
    stride, pointer = target.strides[0], target.access_ptr("w", ptr_type=target.dtype)
    shape = (TILE, TILE, TILE)
    return T.tvm_store_matrix_sync(source.data, *shape, _fragment(source), pointer, stride, "row_major", dtype="void")


def _fill_call(c: tirx.Buffer) -> tirx.Expr:
    return T.tvm_fill_fragment(c.data, TILE, TILE, TILE, _fragment(c), T.float32(0), dtype="void")


def _multiply_call(a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer) -> tirx.Expr:
    fragments = [part for buffer in (c, a, b, c) for part in (buffer.data, _fragment(buffer))]
    return T.tvm_mma_sync(*fragments, dtype="void")
