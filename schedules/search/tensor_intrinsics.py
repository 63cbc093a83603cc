"""Tensor intrinsics for matmuls of 16 x 16 x 16 on tensor cores, by name, for schedules that name them.

TVM's own (`tvm.s_tir.tensor_intrin.cuda`) know no bfloat16 and take eleven seconds to import. These are written in the
same terms, fragments in the scopes `wmma.*`, for which TVM writes calls of CUDA's `mma.h`. The pipeline's code
generation puts `ldmatrix` and `mma.sync` behind the calls: m16n8k16 for halves, m16n8k8 in tf32 for float32.

TVM takes no fragment of an operand in float32: these have the scope of sums, and what their stride is wrapped in says
which operand it is.

Operands are in dynamic shared memory; their rows must begin at multiples of 16 bytes. The right one is stored [k, n],
or, for the kinds that end in `_turned`, [n, k].
"""

# The annotations of the functions below are TVMScript, which must see values and not their text.

from collections.abc import Callable
from functools import cache, partial

import tvm
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

TILE = 16
HALVES = ("float16", "bfloat16")
INPUTS = (*HALVES, "float32")
SHARED = "shared.dyn"


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
    for dtype in INPUTS:
        for kind in _OPERANDS:
            call = partial(_load_call, kind)
            TensorIntrin.register(intrinsic_name(kind, dtype), *_copy(dtype, SHARED, fragment_scope(kind, dtype), call))
        TensorIntrin.register(intrinsic_name("multiply", dtype), *_multiply(dtype, turned=False))
        TensorIntrin.register(intrinsic_name("multiply_turned", dtype), *_multiply(dtype, turned=True))
    TensorIntrin.register(intrinsic_name("fill", "float32"), *_fill())
    TensorIntrin.register(
        intrinsic_name("store", "float32"), *_copy("float32", "wmma.accumulator", SHARED, _store_call)
    )


def _fragment(buffer: tvm.tirx.Buffer, stride: tvm.ir.Expr) -> tvm.ir.Expr:
    per_row = stride // TILE
    return buffer.elem_offset // stride // TILE * per_row + buffer.elem_offset % stride // TILE


def _load_call(
    kind: str, source: tvm.tirx.Buffer, target: tvm.tirx.Buffer, source_stride: tvm.ir.Expr, target_stride: tvm.ir.Expr
) -> tvm.ir.Expr:
    _, layout, wrapper = _OPERANDS[kind]
    return T.tvm_load_matrix_sync(
        target.data,
        TILE,
        TILE,
        TILE,
        _fragment(target, target_stride),
        source.access_ptr("r", ptr_type=source.dtype),
        source_stride if str(source.dtype) in HALVES else T.call_extern("int32", wrapper, source_stride),
        layout,
        dtype="void",
    )


def _store_call(
    source: tvm.tirx.Buffer, target: tvm.tirx.Buffer, source_stride: tvm.ir.Expr, target_stride: tvm.ir.Expr
) -> tvm.ir.Expr:
    return T.tvm_store_matrix_sync(
        source.data,
        TILE,
        TILE,
        TILE,
        _fragment(source, source_stride),
        target.access_ptr("w", ptr_type=target.dtype),
        target_stride,
        "row_major",
        dtype="void",
    )


def _copy(dtype: str, source: str, target: str, call: Callable[..., tvm.ir.Expr]) -> tuple[PrimFunc, PrimFunc]:
    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def described(a: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=source)
        C = T.match_buffer(c, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=target)
        with T.sblock("root"):
            T.reads(A[0:TILE, 0:TILE])
            T.writes(C[0:TILE, 0:TILE])
            for i, j in T.grid(TILE, TILE):
                with T.sblock("copy"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj]

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def called(a: T.handle, c: T.handle) -> None:
        a1 = T.int32()
        a0 = T.int32()
        c1 = T.int32()
        c0 = T.int32()
        A = T.match_buffer(a, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=source, strides=[a1, a0])
        C = T.match_buffer(c, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=target, strides=[c1, c0])
        with T.sblock("root"):
            T.reads(A[0:TILE, 0:TILE])
            T.writes(C[0:TILE, 0:TILE])
            T.evaluate(call(A, C, a1, c1))

    return described, called


def _fill() -> tuple[PrimFunc, PrimFunc]:
    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def described(c: T.handle) -> None:
        C = T.match_buffer(c, (TILE, TILE), "float32", align=64, offset_factor=TILE, scope="wmma.accumulator")
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:TILE, 0:TILE])
            for i, j in T.grid(TILE, TILE):
                with T.sblock("init"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = T.float32(0)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def called(c: T.handle) -> None:
        c1 = T.int32()
        c0 = T.int32()
        C = T.match_buffer(
            c, (TILE, TILE), "float32", align=64, offset_factor=TILE, scope="wmma.accumulator", strides=[c1, c0]
        )
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:TILE, 0:TILE])
            T.evaluate(T.tvm_fill_fragment(C.data, TILE, TILE, TILE, _fragment(C, c1), T.float32(0), dtype="void"))

    return described, called


def _multiply(dtype: str, *, turned: bool) -> tuple[PrimFunc, PrimFunc]:
    left, right = fragment_scope("load_a", dtype), fragment_scope("load_b", dtype)

    def product(
        a: tvm.tirx.Buffer, b: tvm.tirx.Buffer, i: tvm.tirx.Var, j: tvm.tirx.Var, k: tvm.tirx.Var
    ) -> tvm.ir.Expr:
        left, right = a[i, k], b[j, k] if turned else b[k, j]
        return left * right if dtype == "float32" else T.Cast("float32", left) * T.Cast("float32", right)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def described(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=left)
        B = T.match_buffer(b, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=right)
        C = T.match_buffer(c, (TILE, TILE), "float32", align=64, offset_factor=TILE, scope="wmma.accumulator")
        with T.sblock("root"):
            T.reads(C[0:TILE, 0:TILE], A[0:TILE, 0:TILE], B[0:TILE, 0:TILE])
            T.writes(C[0:TILE, 0:TILE])
            for i, j, k in T.grid(TILE, TILE, TILE):
                with T.sblock(""):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    C[vi, vj] = C[vi, vj] + product(A, B, vi, vj, vk)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def called(a: T.handle, b: T.handle, c: T.handle) -> None:
        a1 = T.int32()
        a0 = T.int32()
        b1 = T.int32()
        b0 = T.int32()
        c1 = T.int32()
        c0 = T.int32()
        A = T.match_buffer(a, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=left, strides=[a1, a0])
        B = T.match_buffer(b, (TILE, TILE), dtype, align=64, offset_factor=TILE, scope=right, strides=[b1, b0])
        C = T.match_buffer(
            c, (TILE, TILE), "float32", align=64, offset_factor=TILE, scope="wmma.accumulator", strides=[c1, c0]
        )
        with T.sblock("root"):
            T.reads(C[0:TILE, 0:TILE], A[0:TILE, 0:TILE], B[0:TILE, 0:TILE])
            T.writes(C[0:TILE, 0:TILE])
            T.evaluate(
                T.tvm_mma_sync(
                    C.data,
                    _fragment(C, c1),
                    A.data,
                    _fragment(A, a1),
                    B.data,
                    _fragment(B, b1),
                    C.data,
                    _fragment(C, c1),
                    dtype="void",
                )
            )

    return described, called
