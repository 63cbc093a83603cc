"""Pass: convolutions, and what lies between them, with channels last on a CPU.

A value of (N, C, ...) whose maker has a form for channels last gets that form, and a transpose of it under the old
name. A reader with such a form reads the first, and any other reads the transpose, which goes where nothing does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.s_tir import Schedule

from relaxtune.pipeline.passes.kit.ir import (
    ELEMENTWISE,
    array_of,
    bindings_of,
    called_function,
    dtype_of,
    is_constant,
    is_op,
    main_of,
    shape_of,
    static_shape,
    transposed_axes,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.cpu.any_size.windows import (
    Geometry,
    convolution,
    depthwise_convolution,
    filters_width,
    largest,
    mean,
    pack_filters,
)
from relaxtune.schedules.targets import CpuLimits, target_limits
from relaxtune.schedules.tir.scheduled_blocks import is_canonical, list_blocks

# TVM's OpPatternKind: elementwise functions of its result join it.
_FUSES_AFTER = 4
_CONVOLUTIONS = ("nn.conv1d", "nn.conv2d", "nn.conv3d")
_TRANSPOSED = ("nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
_POOLS = {f"nn.{kind}_pool{axes}d": kind for kind in ("max", "avg") for axes in (1, 2, 3)}
_REDUCTIONS = ("mean", "sum", "max", "min")
_ELEMENTWISE = (*ELEMENTWISE, "where", "less", "greater", "less_equal", "greater_equal", "floor", "ceil", "round")


def channels_last(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with float32 convolutions of constant weights, poolings and what is between with channels last.

    ::

        x (N, C, H, W) -> conv2d -> relu -> conv2d by 1 -> ...
        x -> transpose (N, H, W, C) -> windows with packed weights -> relu -> windows -> ... -> transpose

    On a CPU, a vector of channels is filled whatever the stride, the padding and the width are. Transposed ones whose
    windows do not overlap are products of each position. The kernels are those of `schedules.cpu.any_size.windows`.
    """
    limits = target_limits(state.target) if state.target.kind.name == "llvm" else None
    if not isinstance(limits, CpuLimits) or not any(map(_is_worth, map(_value, bindings_of(main_of(mod))))):
        return mod
    layouts = _Layouts(mod, limits)
    result = rewrite(mod, state, layouts.rule)
    state.note(f"{layouts.convolutions} convolutions have their channels last")
    return result


def _value(binding: relax.Binding) -> tvm.ir.Expr:
    return binding.value


def _is_worth(value: tvm.ir.Expr) -> bool:
    """Whether a value is a convolution that gets another form."""
    if not is_op(value, *_CONVOLUTIONS, *_TRANSPOSED) or not is_constant(value.args[1]):
        return False
    attrs, axes = value.attrs, value.args[0].ty.ndim - 2
    if dtype_of(value) != "float32" or str(attrs.data_layout)[:2] != "NC" or static_shape(value.args[1]) is None:
        return False
    if not isinstance(_sizes(value.args[0])[1], int):
        return False
    if is_op(value, *_CONVOLUTIONS):
        return str(attrs.kernel_layout)[:2] == "OI"
    plain = [int(step) for step in attrs.strides] == list(static_shape(value.args[1]) or ())[2:]
    numbers = (*attrs.padding, *attrs.output_padding, *(step - 1 for step in attrs.dilation), attrs.groups - 1)
    return plain and axes > 0 and not any(map(int, numbers))


def _sizes(expr: tvm.ir.Expr) -> Sequence[object]:
    return [int(size) if isinstance(size, tirx.IntImm) else size for size in shape_of(expr) or ()]


def _last(rank: int) -> list[int]:
    """Return the axes of (N, ..., C) by those of (N, C, ...)."""
    return [0, *range(2, rank), 1]


def _first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _moved(axis: int, rank: int) -> int:
    """Return where an axis of (N, C, ...) is in (N, ..., C)."""
    return _last(rank).index(axis % rank)


class _Layouts:
    """Writes values with channels last; `last` has them by the variables of the old function."""

    def __init__(self, mod: tvm.ir.IRModule, limits: CpuLimits) -> None:
        self._mod = mod
        self._limits = limits
        self._last: dict[relax.Var, tvm.ir.Expr] = {}
        self._tuples: dict[relax.Var, relax.Var] = {}
        self.convolutions = 0
        self._binding: relax.VarBinding
        self._new: Rewriter

    def rule(self, new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        """Return the transpose of a value that has a form with channels last; None for any other value."""
        value, var = binding.value, binding.var
        self._new, self._binding = new, binding
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._tuples:
            made: tvm.ir.Expr | None = relax.TupleGetItem(self._tuples[value.tuple_value], value.index)
        else:
            made = self._form(value)
        if made is None or isinstance(var.ty, relax.TupleType):
            return self._read_transposed(value) if made is None else None
        last = made if isinstance(made, relax.Var) else new.extra(f"{var.name}__last", made, [var])
        self._last[var] = last
        return relax.op.permute_dims(last, _first(var.ty.ndim))

    def _step(self, what: str, value: tvm.ir.Expr) -> relax.Var:
        return self._new.extra(f"{self._binding.var.name}__{what}", value, [self._binding.var])

    def _form(self, value: tvm.ir.Expr) -> tvm.ir.Expr | None:
        """Return a value with channels last."""
        if _is_worth(value):
            made = self._convolved(value) if is_op(value, *_CONVOLUTIONS) else self._spread(value)
            self.convolutions += made is not None
            return made
        if not any(one in self._last for one in relax.analysis.free_vars(value)):
            return None
        function = called_function(value)
        if function is not None:
            return self._of_function(value, function)
        if is_op(value, *_ELEMENTWISE):
            return self._elementwise(value)
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
            return None
        form = _FORMS.get(value.op.name.removeprefix("relax."))
        return None if form is None else form(self, value)

    def of(self, expr: tvm.ir.Expr) -> tvm.ir.Expr:
        """Return a tensor with channels last."""
        if expr not in self._last:
            given = self._new.of(expr)
            axes = _last(expr.ty.ndim)
            name = expr.name if isinstance(expr, relax.Var) else "constant"
            moved = self._new.extra(f"{name}__last", relax.op.permute_dims(given, axes))
            # Nothing outside a branch may read what it makes.
            if not isinstance(expr, relax.Var) or not self._new.builder_.current_block_is_dataflow():
                return moved
            self._last[expr] = moved
        return self._last[expr]

    def _geometry(self, attrs: tvm.ir.Attrs, kernel: Sequence[int]) -> Geometry:
        pads, axes = [int(pad) for pad in attrs.padding], len(kernel)
        strides, steps = (tuple(int(step) for step in given) for given in (attrs.strides, attrs.dilation))
        return Geometry(tuple(kernel), strides, steps, tuple(pads[:axes]), tuple(pads[axes:]))

    def _convolved(self, value: relax.Call) -> tvm.ir.Expr | None:
        weight, groups = array_of(value.args[1]), int(value.attrs.groups)
        filters, channels, *kernel = weight.shape
        geometry, data = self._geometry(value.attrs, kernel), value.args[0]
        if groups == filters == _sizes(data)[1] and channels == 1 and groups > 1:
            weights = relax.const(np.ascontiguousarray(weight.reshape(filters, -1).T))
            return self._windows(depthwise_convolution(geometry), self.of(data), weights, name="depthwise")
        rows = static_shape(self._binding.var)
        known = None if rows is None else rows[-1]
        if rows is not None and geometry.is_pointwise:
            known = math.prod(rows) // filters
        width = filters_width(known, filters, groups, "float32", self._limits)
        if groups > 1 and width == 1:
            return None
        packed = relax.const(pack_filters(weight, width))
        return self._windows(convolution(geometry, filters, groups), self.of(data), packed, name="convolution")

    def _windows(self, compute: Callable[..., te.Tensor], *operands: tvm.ir.Expr, name: str) -> relax.Call:
        return self._new.kernel(compute, *operands, name=name, op_pattern=_FUSES_AFTER)

    def _spread(self, value: relax.Call) -> tvm.ir.Expr:
        """Return a transposed convolution of windows that do not overlap: a matmul, its columns spread over windows."""
        weight = array_of(value.args[1])
        channels, filters, *kernel = weight.shape
        columns = np.moveaxis(weight, 1, -1).reshape(channels, -1).T
        data, ones = self.of(value.args[0]), (1,) * len(kernel)
        geometry = Geometry(ones, ones, ones, (0,) * len(kernel), (0,) * len(kernel))
        width = filters_width(None, len(columns), 1, "float32", self._limits)
        packed = relax.const(pack_filters(columns.reshape(-1, channels, *ones), width))
        compute = convolution(geometry, len(columns), 1)
        product = self._step("product", self._windows(compute, data, packed, name="convolution"))
        batch, *sizes = (shape_of(data) or [])[:-1]
        apart = self._step("apart", relax.op.reshape(product, (batch, *sizes, *kernel, filters)))
        axes = len(kernel)
        pairs = [(axis, axes + axis) for axis in range(1, axes + 1)]
        moved = self._step("moved", relax.op.permute_dims(apart, [0, *itertools.chain(*pairs), 2 * axes + 1]))
        spread = [size * step for size, step in zip(sizes, kernel, strict=True)]
        return relax.op.reshape(moved, (batch, *spread, filters))

    def _elementwise(self, value: relax.Call) -> tvm.ir.Expr | None:
        rank = self._binding.var.ty.ndim
        operands: list[tvm.ir.Expr] = []
        for arg in value.args:
            ndim = arg.ty.ndim if isinstance(arg.ty, relax.TensorType) else 0
            if ndim == 0:
                operands.append(self._new.of(arg))
            elif is_constant(arg):
                array = array_of(arg)
                array = array.reshape((1,) * (rank - array.ndim) + array.shape)
                operands.append(relax.const(np.ascontiguousarray(array.transpose(_last(rank))), str(array.dtype)))
            elif ndim == rank:
                operands.append(self.of(arg))
            else:
                return None
        return relax.Call(value.op, operands, value.attrs, value.ty_args)

    def _of_function(self, value: relax.Call, function: tvm.ir.GlobalVar) -> tvm.ir.Expr | None:
        """Return a call of a function of one tensor and one block, which walks channels last."""
        rank, operands = self._binding.var.ty.ndim, value.args[1].fields
        if len(value.args) > 2 or len(operands) != 1 or operands[0].ty.ndim != rank:
            return None
        sch = Schedule(self._mod[function])
        blocks = list_blocks(sch)
        if len(blocks) != 1 or blocks[0].kinds != "S" * rank or not is_canonical(sch, blocks[0]):
            return None

        moved = tirx.IndexMap.from_func(lambda *axes: [axes[axis] for axis in _last(rank)], ndim=rank)
        block = blocks[0].rv
        sch.transform_layout(block, ("read", 0), moved)
        sch.transform_layout(block, ("write", 0), moved)
        sch.transform_block_layout(block, moved)
        shape = shape_of(self._binding.var) or []
        result = relax.TensorType([shape[axis] for axis in _last(rank)], dtype_of(self._binding.var))
        made = self._new.function(sch.mod["main"].without_attr("global_symbol"), function.name_hint)
        return relax.call_tir(made, [self.of(operands[0])], result)

    def _pooled(self, value: relax.Call) -> tvm.ir.Expr | None:
        kind, attrs = _POOLS[value.op.name.removeprefix("relax.")], value.attrs
        geometry = self._geometry(attrs, [int(size) for size in attrs.pool_size])
        if bool(attrs.ceil_mode) or str(attrs.layout)[:2] != "NC" or dtype_of(value) != "float32":
            return None
        if not isinstance(_sizes(value)[1], int) or (kind == "avg" and set(geometry.steps) != {1}):
            return None
        pool = largest(geometry) if kind == "max" else mean(geometry, bool(attrs.count_include_pad))
        return self._windows(pool, self.of(value.args[0]), name=f"{kind}_pool")

    def _reduced(self, value: relax.Call) -> tvm.ir.Expr | None:
        rank = value.args[0].ty.ndim
        if value.attrs.axis is None or not bool(value.attrs.keepdims):
            return None
        axes = [_moved(int(axis), rank) for axis in value.attrs.axis]
        make: Callable[..., tvm.ir.Expr] = getattr(relax.op, value.op.name.removeprefix("relax."))
        return make(self.of(value.args[0]), axes, True)

    def _joined(self, value: relax.Call) -> tvm.ir.Expr:
        fields = [self.of(one) for one in value.args[0].fields]
        return relax.op.concat(fields, _moved(int(value.attrs.axis), self._binding.var.ty.ndim))

    def _cut(self, value: relax.Call) -> tvm.ir.Expr | None:
        cuts = value.attrs.indices_or_sections
        cuts = int(cuts) if isinstance(cuts, tirx.IntImm) else [int(cut) for cut in cuts]
        parts = relax.op.split(self.of(value.args[0]), cuts, _moved(int(value.attrs.axis), value.args[0].ty.ndim))
        self._tuples[self._binding.var] = self._step("parts", parts)
        return None

    def _sliced(self, value: relax.Call) -> tvm.ir.Expr:
        data, axes, *rest = value.args
        moved = relax.Tuple([tirx.IntImm("int64", _moved(int(axis), data.ty.ndim)) for axis in axes.fields])
        return relax.Call(value.op, [self.of(data), moved, *rest], value.attrs)

    def _taken(self, value: relax.Call) -> tvm.ir.Expr | None:
        data, indices = value.args
        if value.attrs.axis is None or not isinstance(indices.ty, relax.TensorType) or indices.ty.ndim != 1:
            return None
        return relax.op.take(self.of(data), self._new.of(indices), _moved(int(value.attrs.axis), data.ty.ndim))

    def _reshaped(self, value: relax.Call) -> tvm.ir.Expr | None:
        """Return a reshape that merges or splits axes of positions, or adds or drops those of one."""
        before, after = shape_of(value.args[0]), shape_of(self._binding.var)
        if before is None or after is None or len(before) < 3 or len(after) < 3:
            return None
        if not all(tvm_ffi.structural_equal(before[axis], after[axis]) for axis in (0, 1)):
            return None
        return relax.op.reshape(self.of(value.args[0]), [after[axis] for axis in _last(len(after))])

    def _read_transposed(self, value: tvm.ir.Expr) -> tvm.ir.Expr | None:
        """Return a transpose of a value with channels last as one transpose, or as the value; None for another."""
        if not is_op(value, "permute_dims") or value.args[0] not in self._last:
            return None
        first = _first(value.args[0].ty.ndim)
        axes = [first[axis] for axis in transposed_axes(value)]
        data = self._last[value.args[0]]
        return data if axes == sorted(axes) else relax.op.permute_dims(data, axes)


_FORMS: Mapping[str, Callable[[_Layouts, relax.Call], tvm.ir.Expr | None]] = {
    **dict.fromkeys(_POOLS, _Layouts._pooled),
    **dict.fromkeys(_REDUCTIONS, _Layouts._reduced),
    "concat": _Layouts._joined,
    "split": _Layouts._cut,
    "strided_slice": _Layouts._sliced,
    "take": _Layouts._taken,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _Layouts._reshaped),
}
