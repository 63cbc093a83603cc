"""Matrix multiplication by cuBLASLt: one call of the library, with an algorithm of its heuristic's list.

::

    C[m, n] = gelu?(sum_k A[m, k] * B[k, n] (+ bias[n])) (+ residual[m, n])   float16 or bfloat16; the sum: float32

Where the library's own epilogues compute the function, they do (`epilogue="library"`): a bias; a residual of the
output's dtype, as beta * C; gelu in its tanh form. It rounds only once, at the end, where the function may round after
each step. It wants the bias in the output's dtype: one in another (float32, say, where matmuls are in half precision)
is rounded to that by a small kernel before each call, which is as exact as the output is.

Any other elementwise epilogue (gelu by erf, a residual of another dtype, factors of rows) is a kernel of our own after
the call, which leaves the sums in float32 (`epilogue="kernel"`): what it costs to do without. Where a bias must be
rounded, both forms are offered.

The call is in C (`cublaslt.c`, linked into the module), which opens `libcublasLt.so.13` when it first runs: by the
loader's path, or as the environment variable `RELAXTUNE_CUBLASLT` says. The place of an algorithm in the heuristic's
list holds for one version of the library on one model of GPU, which is where a record is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from tvm import tirx
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.libraries.calls import LibraryCall, call_alone, call_before, call_on_made, no_pointer
from relaxtune.schedules.libraries.vendors import CUBLASLT
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.schedules.templates.base import Case, KernelTemplate, Parameters, refuse_target
from relaxtune.schedules.templates.emit.fast_math import find_gelu
from relaxtune.schedules.tir.blocks import plain_blocks, static_shape
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import constant_value, without_casts
from relaxtune.schedules.tir.matmul import recognise_matmul

_FUNCTION = "relaxtune_cublaslt_matmul"
_INPUTS = {"float16": 0, "bfloat16": 1}
_OUTPUTS = {**_INPUTS, "float32": 2}
# The heuristic's first places; it offers 16 at most.
_ALGORITHMS = 8
_BY_LIBRARY, _BY_KERNEL = "library", "kernel"
_ANSWERS = {
    2: "cuBLASLt offers no such algorithm for this matmul here; another version recorded it: measure the task again",
    3: "cuBLASLt failed; look for an earlier error of the device",
}


@dataclass(frozen=True)
class CublasLtParameters(Parameters):
    """The algorithm that multiplies, and who does the rest."""

    template: ClassVar[str] = "cublaslt"

    algorithm: int = 0  # Place in the list of `cublasLtMatmulAlgoGetHeuristic`, 0 its favourite.
    epilogue: str = _BY_LIBRARY  # "library": the algorithm does it; "kernel": a kernel of our own after it.


@dataclass(frozen=True)
class _Fused:
    """The library's own epilogue: positions of the parameters that it adds, None where there is none; gelu."""

    bias: int | None = None
    residual: int | None = None
    gelu: bool = False


class CublasLt(KernelTemplate[MatmulFunction, CublasLtParameters]):
    """The library as a maker of kernels; see `schedules.templates.base.KernelTemplate`."""

    parameters = CublasLtParameters

    def _recognise(self, func: tirx.PrimFunc, target: ResolvedTarget) -> MatmulFunction | Refusal:
        return refuse_target(target) or _recognise(func)

    def _propose(self, case: Case[MatmulFunction]) -> Sequence[CublasLtParameters]:
        # Who may do the rest, the more promising first.
        fused = _fused(case.func, case.found)
        by_library = not isinstance(fused, Refusal)
        by_kernel = isinstance(fused, Refusal) or _must_round(case.func, case.found, fused)
        epilogues = [*([_BY_LIBRARY] if by_library else []), *([_BY_KERNEL] if by_kernel else [])]
        return [CublasLtParameters(algorithm, one) for algorithm in range(_ALGORITHMS) for one in epilogues]

    def _make(self, case: Case[MatmulFunction], p: CublasLtParameters) -> tirx.PrimFunc | Refusal:
        func, matmul = case.func, case.found
        if p.epilogue == _BY_LIBRARY:
            fused = _fused(func, matmul)
            return fused if isinstance(fused, Refusal) else _call_fused(func, matmul, fused, p.algorithm)
        if p.epilogue != _BY_KERNEL:
            return Refusal(f"epilogue is {p.epilogue!r}, expected {_BY_LIBRARY!r} or {_BY_KERNEL!r}")
        if matmul.epilogue.value.same_as(matmul.epilogue.accumulator):
            return Refusal("there is no epilogue that a kernel could do")
        blocks = plain_blocks(func)
        if isinstance(blocks, Refusal):
            return blocks
        product = next(block.name for block in blocks if block.init is not None)

        def call(sums: tirx.Var) -> LibraryCall:
            return _call(func, matmul, (no_pointer(), no_pointer(), sums.data), "float32", False, p.algorithm)

        return call_before(func, product, call)


def _recognise(func: tirx.PrimFunc) -> MatmulFunction | Refusal:
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return matmul
    if matmul.norm is not None or matmul.partials is not None:
        return Refusal("cuBLASLt makes no statistics of rows")
    if matmul.input_dtype not in _INPUTS:
        return Refusal(f"the operands are {matmul.input_dtype}, expected {' or '.join(_INPUTS)}")
    return matmul


def _must_round(func: tirx.PrimFunc, matmul: MatmulFunction, fused: _Fused) -> bool:
    """Whether the bias has another dtype than the library wants."""
    return fused.bias is not None and str(func.params[fused.bias].ty.dtype) != matmul.output_dtype


def _fused(func: tirx.PrimFunc, matmul: MatmulFunction) -> _Fused | Refusal:
    """Return what the library's own epilogue does, if that is all that the function's does."""
    if matmul.output_dtype not in (matmul.input_dtype, "float32"):
        return Refusal(f"cuBLASLt does not make {matmul.output_dtype} of {matmul.input_dtype}")
    value = without_casts(matmul.epilogue.value)
    if isinstance(value, tirx.Mul):
        found = find_gelu(value)
        if found is None or found[0] != "tanh":
            return Refusal("the epilogue does more than add a bias and a residual, or gelu in its tanh form")
        inner = _sum_of(func, matmul, found[1])
        if isinstance(inner, Refusal) or inner.residual is not None:
            return inner if isinstance(inner, Refusal) else Refusal("gelu comes after the residual")
        return replace(inner, gelu=True)
    return _sum_of(func, matmul, value)


def _sum_of(func: tirx.PrimFunc, matmul: MatmulFunction, total: tirx.Expr) -> _Fused | Refusal:
    """Return what is added to the product."""
    positions: dict[str, int] = {}
    terms = _terms(total)
    if sum(term.same_as(matmul.epilogue.accumulator) for term in terms) != 1:
        return Refusal("the epilogue does more than add a bias and a residual, or gelu in its tanh form")
    for term in terms:
        if term.same_as(matmul.epilogue.accumulator):
            continue
        if not isinstance(term, TensorLoad):
            return Refusal("the epilogue does more than add a bias and a residual, or gelu in its tanh form")
        dtype = str(term.source.ty.dtype)
        if matmul.epilogue.is_per_column(term):
            kind, dtypes = "bias", tuple(_OUTPUTS)
        elif matmul.epilogue.is_aligned(term):
            kind, dtypes = "residual", (matmul.output_dtype,)
        else:
            return Refusal(f"{term.source.name} is neither a bias nor a residual")
        if dtype not in dtypes:
            return Refusal(f"the {kind} {term.source.name} is {dtype}, expected {' or '.join(dtypes)}")
        if kind in positions:
            return Refusal(f"the epilogue adds two {kind} terms")
        positions[kind] = next(i for i, param in enumerate(func.params) if param.same_as(term.source))
    return _Fused(positions.get("bias"), positions.get("residual"))


def _terms(value: tirx.Expr) -> list[tirx.Expr]:
    """Return what is added up, casts removed."""
    value = without_casts(value)
    if isinstance(value, tirx.Add):
        return [*_terms(value.a), *_terms(value.b)]
    return [] if constant_value(value) == 0 else [value]


def _call_fused(func: tirx.PrimFunc, matmul: MatmulFunction, fused: _Fused, algorithm: int) -> tirx.PrimFunc:
    data = [param.data for param in func.params]
    residual = no_pointer() if fused.residual is None else data[fused.residual]
    output = data[matmul.output]

    def call(bias: tirx.Expr) -> LibraryCall:
        return _call(func, matmul, (bias, residual, output), matmul.output_dtype, fused.gelu, algorithm)

    if fused.bias is None:
        return call_alone(func, call(no_pointer()))
    given = func.params[fused.bias]
    if not _must_round(func, matmul, fused):
        return call_alone(func, call(given.data))
    rounded = tirx.decl_buffer((matmul.n,), matmul.output_dtype, "rounded_bias")
    leading = [0] * (len(static_shape(given) or ()) - 1)
    return call_on_made(func, rounded, lambda n: given[(*leading, n)].astype(matmul.output_dtype), call(rounded.data))


def _call(
    func: tirx.PrimFunc,
    matmul: MatmulFunction,
    pointers: tuple[tirx.Expr, tirx.Expr, tirx.Expr],
    output_dtype: str,
    gelu: bool,
    algorithm: int,
) -> LibraryCall:
    dtypes = _INPUTS[matmul.input_dtype], _OUTPUTS[output_dtype]
    arguments = [
        func.params[matmul.a].data,
        func.params[matmul.b].data,
        *pointers,
        *(tirx.const(size, "int64") for size in (matmul.m, matmul.n, matmul.k)),
        *(tirx.const(number, "int32") for number in (int(matmul.b_transposed), *dtypes, int(gelu), algorithm)),
    ]
    return LibraryCall(CUBLASLT, _FUNCTION, arguments, _ANSWERS)
