"""Pass: take norms of rows into the matmuls around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.arrays import CHUNK, map_chunks
from relaxtune.pipeline.passes.attention.kernel import template_refusal
from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import (
    HALVES,
    array_of,
    called_function,
    constant_of,
    constants_in,
    dtype_of,
    is_constant,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.norms.find_norm_kernels import NormKernel, find_norm
from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.targets import target_features
from relaxtune.schedules.templates.gemv.plan import makes_few_rows
from relaxtune.schedules.tir.blocks import is_buffer
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.expressions import UnsupportedExpressionError, substitute
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.normed_matmul import (
    OperandNorm,
    adds_only,
    find_bias,
    keep_partial_sums,
    normalise_operand,
    normalise_residual,
)

# Columns of a group of partial sums: few where there are few rows, whose tiles are narrow; more where rows are long.
# The template for few rows takes any number of groups, and makes narrow ones alone.
_GROUPS = (16, 32, 64)
_GROUPS_MAX = 64
_FEW_ROWS = 256
_FEW_ROWS_GROUP, _GROUP = 16, 32
# Rows that no wide group divides have narrow ones, however many rows there are: at most as many as 1024 columns have of
# wide ones.
_NARROW_GROUPS_MAX = 32
# A symbolic number of rows is taken for one that is neither few nor many.
_SYMBOLIC_ROWS = 2 * _FEW_ROWS
# With more, what a norm costs the matmuls around it is no less than the norm: BERT-base in half precision took, on an
# H200, 0.94, 0.93 and 1.03 times as long with norms fused as without, with 128, 1024 and 4096 rows.
_ROWS_MAX = 2048


@dataclass(frozen=True)
class _Extra:
    """Further outputs of a kernel, by the binding of its product: partial sums, or statistics."""

    kernel: relax.Var
    is_statistics: bool


Argument: TypeAlias = tvm.ir.Expr | _Extra


@dataclass(frozen=True)
class _Function:
    """A fused matmul, and a name for it."""

    name: str
    func: tirx.PrimFunc
    matmul: MatmulFunction


@dataclass(frozen=True)
class _Call:
    """A call of a fused matmul; `changed` when it is not the graph's own any more."""

    var: relax.Var
    function: _Function
    args: tuple[Argument, ...]
    changed: bool = False

    def places_of(self, var: relax.Var) -> list[int]:
        return [place for place, arg in enumerate(self.args) if isinstance(arg, relax.Var) and arg.same_as(var)]

    def with_argument(self, place: int, value: Argument) -> _Call:
        return replace(self, args=(*self.args[:place], value, *self.args[place + 1 :]))

    def of(self, function: _Function, *more: Argument) -> _Call:
        """Return a call of another function, which has more inputs."""
        return replace(self, function=function, args=(*self.args, *more), changed=True)


@dataclass(frozen=True)
class _Norm:
    """A norm, with the rows that it reads and, in float64, gamma and beta."""

    var: relax.Var
    kernel: NormKernel
    data: relax.Var
    gamma: np.ndarray
    beta: np.ndarray


def fuse_norms(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` without the norms that the matmuls around them can do, where a template makes those (from sm_80 on).

    ::

        y = a @ P + ...                    y, partials = a @ P + ..., sums of y's rows
        x = norm(y)                   ->
        z = f(x @ W)                       z, statistics = f(scale * (y @ (gamma * W) - mean * sums) + beta @ W)
        u = g(b @ V + x)                   u = g(b @ V + (y - mean) * scale * gamma + beta)

    A norm goes where all that reads it are matmuls of it by a constant matrix that nothing else reads, and matmuls that
    add it, after one of the former; and where the matmul before it writes half precision, of at most `_ROWS_MAX` rows
    (`LoweringOptions.rows_max`). The weights are multiplied by gamma here and rounded again, to the graph's precision;
    what the norm rounded is not rounded any more. The algebra and its numerics: `schedules.tir.row_norm`.
    """
    if not state.launches_cost:
        return mod
    graph = Graph(mod)
    fuser = _Fuser(graph, state)
    norms = [norm for binding in graph.bindings if (norm := fuser.norm_of(binding)) and fuser.fuse(norm)]
    if not norms:
        return mod
    for norm in norms:
        reader = fuser.readers_of(norm)[0].var.name
        state.sources[reader] = state.nodes_of([norm.var.name, reader])
    state.note(f"{len(norms)} norms in the matmuls around them")
    changed = {var: call for var, call in fuser.calls.items() if call.changed}
    extras: dict[_Extra, relax.Var] = {}

    def emit(new: Rewriter, _binding: relax.VarBinding, call: _Call) -> tvm.ir.Expr:
        func, matmul = call.function.func, call.function.matmul
        args = [extras[arg] if isinstance(arg, _Extra) else new.of(arg) for arg in call.args]
        callee = new.function(func, f"{call.function.name}_norms")
        types = _output_types(func, args)
        made = relax.call_tir(callee, args, types if len(types) > 1 else types[0])
        if len(types) == 1:
            return made
        whole = new.extra(f"{call.var.name}__with_sums", made, [call.var])
        new.state.sources[call.var.name] = ()
        outputs = {_Extra(call.var, False): matmul.partials, _Extra(call.var, True): matmul.norm}
        for extra, output in outputs.items():
            if output is not None and output.output is not None:
                label = f"{call.var.name}__{'statistics' if extra.is_statistics else 'partial_sums'}"
                extras[extra] = new.extra(label, relax.TupleGetItem(whole, output.output - len(args)))
        return relax.TupleGetItem(whole, matmul.output - len(args))

    # The norms themselves have no reader any more.
    return replace_found(mod, state, changed, emit)


class _Fuser:
    """Changes the calls of fused matmuls, norm by norm."""

    def __init__(self, graph: Graph, state: LoweringState) -> None:
        self._graph = graph
        self._state = state
        self._features = target_features(state.target)
        self._uses: dict[tvm.ir.Expr, int] = {}
        # By function and change, so that equal layers share functions.
        self._made: dict[tuple[tirx.PrimFunc, object], _Function | None] = {}
        self._norms: dict[tvm.ir.GlobalVar, NormKernel | None] = {}
        self.calls: dict[relax.Var, _Call] = {}
        functions: dict[tvm.ir.GlobalVar, _Function | None] = {}
        for binding in graph.bindings:
            for constant in constants_in(binding.value):
                self._uses[constant] = self._uses.get(constant, 0) + 1
            callee = called_function(binding.value)
            if callee is None or not isinstance(graph.mod[callee], tirx.PrimFunc):
                continue
            if callee not in functions:
                functions[callee] = _described(str(callee.name_hint), graph.mod[callee])
                self._norms[callee] = find_norm(graph.mod[callee]) if functions[callee] is None else None
            function = functions[callee]
            if function is not None:
                self.calls[binding.var] = _Call(binding.var, function, tuple(binding.value.args[1].fields))

    def norm_of(self, binding: relax.Binding) -> _Norm | None:
        """Return the norm that a binding calls, of the half-precision rows that a matmul writes."""
        kernel = self._norms.get(called_function(binding.value))
        if kernel is None:
            return None
        args = binding.value.args[1].fields
        data = args[kernel.data]
        if not isinstance(data, relax.Var) or data not in self.calls or dtype_of(data) not in HALVES:
            return None
        if not all(is_constant(args[place]) for _, place in kernel.steps):
            return None
        width = int(data.ty.shape.values[-1])
        gamma, beta = np.ones(width), np.zeros(width)
        for multiplies, place in kernel.steps:
            operand = array_of(args[place]).astype("float64")
            gamma, beta = (gamma * operand, beta * operand) if multiplies else (gamma, beta + operand)
        return _Norm(binding.var, kernel, data, gamma, beta)

    def readers_of(self, norm: _Norm) -> list[_Call]:
        """Return the matmuls that read a norm, in their order; none where something else reads it."""
        readers = self._graph.readers(norm.var)
        if not all(reader in self.calls for reader in readers):
            return []
        return [self.calls[reader] for reader in sorted(readers, key=self._graph.order.__getitem__)]

    def fuse(self, norm: _Norm) -> bool:
        """Change the matmuls around a norm; return whether they could be, else none is changed."""
        readers = self.readers_of(norm)
        multiplies = [call.places_of(norm.var) == [call.function.matmul.a] for call in readers]
        if not readers or not multiplies[0]:
            return False
        producer = self._summing(self.calls[norm.data])
        if producer is None:
            return False
        made = [producer]
        for number, call in enumerate(readers):
            keeps = number == 0 and not all(multiplies)
            changed = (
                self._multiplying(call, norm, producer, keeps=keeps)
                if multiplies[number]
                else self._adding(call, norm, readers[0].var)
            )
            if changed is None:
                return False
            made.append(changed)
        self.calls |= {call.var: call for call in made}
        return True

    def _summing(self, call: _Call) -> _Call | None:
        """Return a call that writes partial sums too."""
        matmul = call.function.matmul
        few = matmul.b_transposed and makes_few_rows(matmul.m, self._features)
        rows_max = self._state.options.rows_max.get("fuse_norms", _ROWS_MAX)
        group = _group(matmul, rows_max, math.inf if few else _GROUPS_MAX)
        if matmul.norm is not None or matmul.partials is not None or group is None:
            return None
        function = self._make(call, group, lambda func: keep_partial_sums(func, matmul, group))
        return None if function is None else call.of(function)

    def _multiplying(self, call: _Call, norm: _Norm, producer: _Call, *, keeps: bool) -> _Call | None:
        """Return a call that multiplies the rows that a norm reads, None where it cannot."""
        matmul, sums = call.function.matmul, producer.function.matmul.partials
        weight = call.args[matmul.b]
        if matmul.norm is not None or sums is None or not is_constant(weight) or self._uses[weight] > 1:
            return None
        folded = _fold(norm, array_of(weight), matmul.b_transposed)
        if folded is None:
            return None
        scaled, sums_of_columns, shift = folded
        bias = find_bias(call.function.func, matmul)
        if bias is not None and is_constant(call.args[bias]):
            call = call.with_argument(bias, _plus(call.args[bias], shift))
            shifts: list[Argument] = []
        else:
            shifts = [_constant(shift)] if shift.any() else []
        groups = norm.gamma.size // sums.group
        wanted = OperandNorm(norm.kernel.centred, norm.kernel.epsilon, groups, bool(shifts), keeps)
        function = self._make(call, wanted, lambda func: normalise_operand(func, matmul, wanted))
        if function is None:
            return None
        column_sums = [_constant(sums_of_columns)] if norm.kernel.centred else []
        call = call.with_argument(matmul.b, constant_of(scaled))
        call = call.with_argument(matmul.a, norm.data)
        return call.of(function, _Extra(producer.var, False), *column_sums, *shifts)

    def _adding(self, call: _Call, norm: _Norm, multiplier: relax.Var) -> _Call | None:
        """Return a call that adds what a norm would have written, None where it cannot."""
        matmul, places = call.function.matmul, call.places_of(norm.var)
        if len(places) != 1 or places[0] in (matmul.a, matmul.b) or matmul.norm is not None:
            return None
        place, buffer = places[0], call.function.func.params[places[0]]
        loads = [load for load in matmul.epilogue.loads() if load.source.same_as(buffer)]
        if not loads or not all(matmul.epilogue.is_aligned(load) for load in loads):
            return None
        bias = find_bias(call.function.func, matmul) if adds_only(call.function.func, matmul, place) else None
        if bias is not None and is_constant(call.args[bias]):
            call = call.with_argument(bias, _plus(call.args[bias], norm.beta))
            beta: list[Argument] = []
        else:
            beta = [_constant(norm.beta)]
        change = ("adds", place, bool(beta))
        function = self._make(call, change, lambda func: normalise_residual(func, matmul, place, shifted=bool(beta)))
        if function is None:
            return None
        call = call.with_argument(place, norm.data)
        return call.of(function, _Extra(multiplier, True), _constant(norm.gamma), *beta)

    def _make(self, call: _Call, change: object, make: Callable[[tirx.PrimFunc], tirx.PrimFunc]) -> _Function | None:
        """Return a function changed in some way, None where no template makes it."""
        key = (call.function.func, change)
        if key not in self._made:
            try:
                func = make(call.function.func)
            except UnsupportedExpressionError:
                self._made[key] = None
            else:
                made = _described(call.function.name, func)
                refused = made is None or template_refusal(func, self._state.target) is not None
                self._made[key] = None if refused else made
        return self._made[key]


def _fold(norm: _Norm, weight: np.ndarray, transposed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return a weight [K, N], or [N, K], times gamma, the sums of its columns, and beta times the weight without gamma.

    None where the weight cannot hold it.
    """
    scaled = np.empty(weight.shape, weight.dtype)

    def fold_rows(begin: int, end: int) -> tuple[np.ndarray, np.ndarray] | None:
        wide = weight[begin:end].astype("float64")
        with np.errstate(over="ignore"):
            scaled[begin:end] = wide * (norm.gamma if transposed else norm.gamma[begin:end, None])
        rounded = scaled[begin:end].astype("float64")
        if not np.isfinite(rounded).all():
            return None
        if transposed:
            return rounded.sum(axis=1), wide @ norm.beta
        return rounded.sum(axis=0), norm.beta[begin:end] @ wide

    # In float64, which would be gigabytes for all of a large weight.
    parts = map_chunks(fold_rows, weight.shape[0], max(1, CHUNK // weight.shape[1]))
    made = [part for part in parts if part is not None]
    if len(made) < len(parts):
        return None
    sums, shifts = ([part[index] for part in made] for index in (0, 1))
    if transposed:
        return scaled, np.concatenate(sums), np.concatenate(shifts)
    return scaled, np.sum(sums, axis=0), np.sum(shifts, axis=0)


def _plus(constant: tvm.ir.Expr, vector: np.ndarray) -> tvm.ir.Expr:
    array = array_of(constant).astype("float64")
    return _constant(array + vector.reshape(array.shape))


def _output_types(func: tirx.PrimFunc, args: list[tvm.ir.Expr]) -> list[relax.TensorType]:
    """Return the types of a function's outputs in a call, whose arguments say what its symbolic sizes are."""
    sizes: dict[tirx.Var, tirx.Expr] = {}
    for param, arg in zip(func.params, args, strict=False):
        pairs = zip(param.ty.shape, arg.ty.shape.values, strict=True)
        sizes |= {size: value for size, value in pairs if isinstance(size, tirx.Var)}
    return [
        relax.TensorType([substitute(size, sizes) for size in param.ty.shape], str(param.ty.dtype))
        for param in func.params[len(args) :]
    ]


def _constant(array: np.ndarray) -> tvm.ir.Expr:
    return relax.const(array.astype("float32"), "float32")


def _described(name: str, func: tirx.PrimFunc) -> _Function | None:
    matmul = recognise_matmul(func, _SYMBOLIC_ROWS) if all(map(is_buffer, func.params)) else Refusal("it takes scalars")
    if isinstance(matmul, Refusal) or str(matmul.epilogue.accumulator.ty.dtype) != "float32":
        return None
    return _Function(name, func, matmul)


def _group(matmul: MatmulFunction, rows_max: int, groups_max: float) -> int | None:
    """Return the columns of a group of partial sums that suit a matmul's result, None where none do."""
    if matmul.m > rows_max:
        return None
    narrow = matmul.columns % _GROUP != 0 and matmul.columns <= _NARROW_GROUPS_MAX * _FEW_ROWS_GROUP
    least = _FEW_ROWS_GROUP if narrow or matmul.m <= _FEW_ROWS else _GROUP
    fitting = [size for size in _GROUPS if size >= least and matmul.columns % size == 0]
    return next((size for size in fitting if matmul.columns // size <= groups_max), fitting[-1] if fitting else None)
