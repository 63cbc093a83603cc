"""Divide by symbolic sizes without looking at signs.

A quotient is rounded down. The processor rounds towards zero, so TVM adds comparisons wherever it cannot prove both
operands non-negative, and at code generation it no longer knows that a size is. LLVM takes a minute over the indices
of a reshape with a few of these. Here the sizes of tensors are known, and so are all that is computed of them.
"""

from __future__ import annotations

from typing import TypeGuard

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Range
from tvm.sym import Analyzer, ConstIntBound
from tvm.tirx import PrimFunc

from relaxtune.schedules.tir.expressions import call_name, find_all, used_vars

_TRUNCATED = {tirx.FloorDiv: tirx.Div, tirx.FloorMod: tirx.Mod}
# Of `tvm_struct_get`: an element of a tensor's shape.
_SHAPE_ELEMENT = 17


def divides_by_sizes(func: tvm.ir.BaseFunc) -> TypeGuard[PrimFunc]:
    """Whether a function divides integers by an expression that is no number."""
    return isinstance(func, PrimFunc) and any(
        not isinstance(division.b, tirx.IntImm) for kind in _TRUNCATED for division in find_all(func.body, kind)
    )


def truncate_divisions(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return a lowered module with divisions by symbolic sizes truncated, where neither operand is ever negative."""
    mod = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    for var, func in mod.functions_items():
        if divides_by_sizes(func):
            mod[var] = _truncated(func)
    return mod


def _truncated(func: PrimFunc) -> PrimFunc:
    analyzer = _with_ranges(func)

    def truncate(division: tirx.FloorDiv | tirx.FloorMod) -> tirx.Expr:
        operands = division.a, division.b
        if isinstance(division.b, tirx.IntImm) or any(analyzer.const_int_bound(one).min_value < 0 for one in operands):
            return division
        return _TRUNCATED[type(division)](*operands)

    return func.with_body(tvm_ffi.structural_map(func.body, (tuple(_TRUNCATED), truncate)))


def _with_ranges(func: PrimFunc) -> Analyzer:
    """Return an analyzer that knows the sizes of the tensors, the loops, and what variables are bound to."""
    analyzer = Analyzer()
    for check in find_all(func.body, tirx.AssertStmt):
        if isinstance(check.condition, tirx.EQ) and any(map(_is_size, (check.condition.a, check.condition.b))):
            for var in used_vars(check.condition):
                _update(analyzer, var, ConstIntBound(0, ConstIntBound.POS_INF))

    def define(node: tirx.Bind | tirx.For) -> None:
        if isinstance(node, tirx.For):
            analyzer.bind(node.loop_var, Range.from_min_extent(node.min, node.extent))
        elif _is_size(node.value):
            _update(analyzer, node.var, ConstIntBound(0, ConstIntBound.POS_INF))
        elif not isinstance(node.value, Call):
            _update(analyzer, node.var, analyzer.const_int_bound(node.value))

    tvm_ffi.structural_walk(func.body, ((tirx.Bind, tirx.For), define), order="pre")
    return analyzer


def _is_size(expr: tirx.Expr) -> bool:
    return isinstance(expr, Call) and call_name(expr) == "tirx.tvm_struct_get" and expr.args[2] == _SHAPE_ELEMENT


def _update(analyzer: Analyzer, var: tirx.Var, bound: ConstIntBound) -> None:
    if isinstance(var.ty, tvm.ir.PrimType) and str(var.ty.dtype) in ("int32", "int64"):
        analyzer.update(var, bound, True)
