"""Matrix multiplication by cuBLASLt: one call of the library, with an algorithm of its heuristic's list.

::

    C[m, n] = sum_k A[m, k] * B[k, n] (+ bias[n]) (+ residual[m, n])        float16 or bfloat16; the sum: float32

What the library computes itself is all that is taken: a bias, a residual of the output's dtype, nothing else. It has
no gelu by erf, and it rounds only once, after the last addition, where the function may round after each.

The call is in C (`cublaslt.c`, linked into the module), which opens `libcublasLt.so.13` when it first runs: by the
loader's path, or as the environment variable `RELAXTUNE_CUBLASLT` says. The place of an algorithm in the heuristic's
list holds for one version of the library on one model of GPU, which is where a record is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from schedules.fallback import SCHEDULED_ATTR
from schedules.targets import ResolvedTarget
from schedules.templates.base import Parameters, Refusal, TemplateError
from schedules.templates.blocks import constant_value
from schedules.templates.epilogue import MatmulFunction, recognise_matmul

LIBRARY = "libcublasLt.so.13"
# Where the library is, for a process whose loader does not find it.
PATH_VARIABLE = "RELAXTUNE_CUBLASLT"
# On a PrimFunc: names of the C sources, in this folder, that a module with it must be linked with.
SOURCES_ATTR = "relaxtune.library_sources"

_SOURCE = Path(__file__).with_name("cublaslt.c")
_FUNCTION = "relaxtune_cublaslt_matmul"
_INPUTS = {"float16": 0, "bfloat16": 1}
_OUTPUTS = {**_INPUTS, "float32": 2}
# The heuristic's first places; it offers 16 at most.
_ALGORITHMS = 8
# Attributes of the function that are about its blocks, which the call has not.
_BLOCKS_ATTR = "s_tir"
_ANSWERS = {
    1: f"cuBLASLt is not there: expected {LIBRARY} on the loader's path or at ${PATH_VARIABLE}; install nvidia-cublas, "
    "or compile without --routes library",
    2: "cuBLASLt offers no such algorithm for this matmul here; another version recorded it: measure the task again",
    3: "cuBLASLt failed; look for an earlier error of the device",
}


@dataclass(frozen=True)
class CublasLtParameters(Parameters):
    """Which algorithm multiplies.

    Attributes
    ----------
    algorithm
        Place in the list of `cublasLtMatmulAlgoGetHeuristic`, 0 its favourite.
    """

    template: ClassVar[str] = "cublaslt"

    algorithm: int = 0


@dataclass(frozen=True)
class _Added:
    """Positions of the parameters that the library adds, None where there is none."""

    bias: int | None = None
    residual: int | None = None


class CublasLt:
    """The library as a maker of kernels; see `schedules.templates.base.Template`."""

    name = CublasLtParameters.template

    def candidates(self, func: tirx.PrimFunc, target: ResolvedTarget) -> Sequence[CublasLtParameters] | Refusal:
        """Return the heuristic's first places, or why the library does not compute the function."""
        found = _recognise(func, target)
        if isinstance(found, Refusal):
            return found
        return [CublasLtParameters(algorithm) for algorithm in range(_ALGORITHMS)]

    def apply(self, func: tirx.PrimFunc, target: ResolvedTarget, parameters: Parameters) -> tirx.PrimFunc | Refusal:
        """Return the PrimFunc as a call of the library."""
        if not isinstance(parameters, CublasLtParameters):
            raise TemplateError(f"library {self.name} got {parameters!r}; expected CublasLtParameters.")
        found = _recognise(func, target)
        if isinstance(found, Refusal):
            return found
        return _call(func, *found, parameters.algorithm)

    def parse(self, decision: str) -> CublasLtParameters:
        """Return the parameters of a decision; TemplateError when it is not one of this library's."""
        return CublasLtParameters.from_json(decision)


def library_sources(names: Sequence[str]) -> list[Path]:
    """Return the C sources that `SOURCES_ATTR` names."""
    return [_SOURCE.with_name(str(name)) for name in names]


def _recognise(func: tirx.PrimFunc, target: ResolvedTarget) -> tuple[MatmulFunction, _Added] | Refusal:
    if target.kind != "cuda":
        return Refusal(f"the target is {target.kind}, expected cuda")
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return matmul
    if matmul.norm is not None or matmul.partials is not None:
        return Refusal("cuBLASLt makes no statistics of rows")
    if matmul.input_dtype not in _INPUTS or matmul.output_dtype not in (matmul.input_dtype, "float32"):
        return Refusal(f"cuBLASLt does not make {matmul.output_dtype} of {matmul.input_dtype}")
    added = _added(func, matmul)
    return added if isinstance(added, Refusal) else (matmul, added)


def _added(func: tirx.PrimFunc, matmul: MatmulFunction) -> _Added | Refusal:
    """Return what the epilogue adds to the sum, if it does nothing else."""
    positions: dict[str, int] = {}
    for term in _terms(matmul.epilogue.value):
        if term.same_as(matmul.epilogue.accumulator):
            continue
        if not isinstance(term, TensorLoad):
            return Refusal("the epilogue does more than add a bias and a residual")
        if str(term.source.ty.dtype) != matmul.output_dtype:
            return Refusal(f"{term.source.name} is {term.source.ty.dtype}, the output {matmul.output_dtype}")
        if matmul.epilogue.is_per_column(term):
            kind = "bias"
        elif matmul.epilogue.is_aligned(term):
            kind = "residual"
        else:
            return Refusal(f"{term.source.name} is neither a bias nor a residual")
        if kind in positions:
            return Refusal(f"the epilogue adds two {kind} terms")
        positions[kind] = next(i for i, param in enumerate(func.params) if param.same_as(term.source))
    return _Added(**positions)


def _terms(value: tirx.Expr) -> list[tirx.Expr]:
    """Return what is added up, casts removed."""
    if isinstance(value, tirx.Cast):
        return _terms(value.value)
    if isinstance(value, tirx.Add):
        return [*_terms(value.a), *_terms(value.b)]
    return [] if constant_value(value) == 0 else [value]


def _call(func: tirx.PrimFunc, matmul: MatmulFunction, added: _Added, algorithm: int) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        params = [
            T.arg(param.name, T.Buffer([int(size) for size in param.ty.shape], str(param.ty.dtype)))
            for param in func.params
        ]

        def data(position: int | None) -> tirx.Expr:
            return tirx.reinterpret("handle", tirx.const(0, "uint64")) if position is None else params[position].data

        answer = T.Bind(
            T.call_extern(
                "int32",
                _FUNCTION,
                *(data(position) for position in (matmul.a, matmul.b, added.bias, added.residual, matmul.output)),
                *(tirx.const(size, "int64") for size in (matmul.m, matmul.n, matmul.k)),
                int(matmul.b_transposed),
                _INPUTS[matmul.input_dtype],
                _OUTPUTS[matmul.output_dtype],
                algorithm,
            )
        )
        for value, message in _ANSWERS.items():
            with T.Assert(answer != value, message):
                pass
    made = builder.get()
    for key, value in func.attrs.items() if func.attrs else ():
        if key != _BLOCKS_ATTR:
            made = made.with_attr(key, value)
    return made.with_attr(SCHEDULED_ATTR, True).with_attr(SOURCES_ATTR, [_SOURCE.name])
