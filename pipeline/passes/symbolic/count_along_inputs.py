"""Pass: positions are counted along an axis of an input, beside sizes that are tensors."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, dtype_of, is_op, main_of, shape_of
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, replace_found
from relaxtune.pipeline.passes.kit.sizes import size_of
from relaxtune.pipeline.passes.kit.state import LoweringState

#: Of a function that does not read what it is given.
COUNT_ATTR = "relaxtune.count"


def count_along_inputs(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `arange(0, n, 1)` as a function that is given an input with the axis n, and does not read it.

    Positions of a decode step are `past + arange(0, n, 1)`. No input of their kernel would have the axis n, and beside
    such an axis a size that is a tensor, `past`, is a kernel of its own (`keep_sizes_apart`). Where there is none,
    `arange` stays.
    """
    along: dict[tirx.Var, tuple[relax.Var, int]] = {}
    for param in reversed(main_of(mod).params):
        along |= {
            axis: (param, place) for place, axis in enumerate(shape_of(param) or ()) if isinstance(axis, tirx.Var)
        }
    found: dict[relax.Var, tuple[relax.Var, int]] = {}
    sizes = False
    for binding in bindings_of(main_of(mod)):
        value = binding.value
        if is_op(value, "shape_to_tensor"):
            sizes = True
        elif is_op(value, "arange"):
            start, stop, step = value.args
            if isinstance(stop, tirx.Var) and stop in along and (size_of(start), size_of(step)) == (0, 1):
                found[binding.var] = along[stop]
    return replace_found(mod, state, found, _counted) if sizes and found else mod


def _counted(new: Rewriter, binding: relax.VarBinding, where: tuple[relax.Var, int]) -> tvm.ir.Expr:
    param, place = where
    dtype = dtype_of(binding.var)

    def count(x: te.Tensor) -> te.Tensor:
        return te.compute((x.shape[place],), lambda i: i.astype(dtype), name="arange")

    return new.kernel(count, param, name="arange", **{COUNT_ATTR: 1})
