"""Tensors of any size whose elements are all one number: what `ConstantOfShape` fills, and what is computed of such.

A tensor of symbolic shape is no constant, so that folding leaves a mask of ones in the graph, with its comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import array_of, dtype_of, is_constant, is_op

_COMPUTED: Mapping[str, Callable[..., np.generic]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "where": lambda condition, chosen, other: chosen if condition else other,
}
_MOVED = ("broadcast_to", "expand_dims", "permute_dims", "reshape", "squeeze", "strided_slice")
_FILLED = {"ones": 1, "ones_like": 1, "zeros": 0, "zeros_like": 0}


def uniform_value(expr: tvm.ir.Expr, values: Mapping[relax.Var, tvm.ir.Expr]) -> np.generic | None:
    """Return the number that every element of a tensor is, None where that is not known.

    Parameters
    ----------
    expr : Expr
        The tensor.
    values : mapping of Var to Expr
        What variables are bound to; an input is not among them.
    """
    value = values.get(expr) if isinstance(expr, relax.Var) else expr
    if value is None:
        return None
    if is_constant(value):
        array = array_of(value)
        if array.size == 0 or not (array == array.flat[0]).all():
            return None
        element: np.generic = array.flat[0]
        return element
    if not isinstance(value, relax.Call) or not dtype_of(value).startswith(("bool", "int", "uint", "float")):
        return None
    dtype = np.dtype(dtype_of(value))
    filled: np.generic | int | None
    if is_op(value, *_FILLED):
        filled = _FILLED[value.op.name.removeprefix("relax.")]
    elif is_op(value, "full", "full_like"):
        filled = uniform_value(value.args[1], values)
    elif is_op(value, *_MOVED, "astype"):
        filled = uniform_value(value.args[0], values)
    elif is_op(value, *_COMPUTED):
        operands = [uniform_value(arg, values) for arg in value.args]
        if any(operand is None for operand in operands):
            return None
        with np.errstate(all="ignore"):
            filled = _COMPUTED[value.op.name.removeprefix("relax.")](*operands)
    else:
        return None
    if filled is None:
        return None
    with np.errstate(all="ignore"):
        rounded: np.generic = dtype.type(filled)
    return rounded
