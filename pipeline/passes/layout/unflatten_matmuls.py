"""Pass: matmuls over flattened rows keep their axes, so that the reshapes around them vanish."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.graph import Graph
from relaxtune.pipeline.passes.kit.ir import ELEMENTWISE, equal_axes, is_constant, is_op, same_shape, shape_of
from relaxtune.pipeline.passes.kit.rewrite import DONE, Done, Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState


def unflatten_matmuls(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls by constants, and what is elementwise behind them, in the axes before a flattening.

    ::

        a = reshape(x, [B * S, K]); y = reshape(a @ W + b, [B, S, N])   ->   y = x @ W + b

    Gemm (torch's addmm, GPT-2's conv1d) takes two axes only, so exporters flatten before it and restore the axes behind
    it. The reshapes are free, but what they stand between is not fused: a residual sum behind one is a kernel of its
    own. The reshape before the matmul names the axes to keep, or else the one behind it.

    Where one operand of an elementwise operation is such a matmul, and a reshape behind restores its axes, the other
    operands are reshaped: what a mixture's experts give is summed over rows, then added to what one for all rows gives.
    """
    graph = Graph(mod)
    rule = _Unflatten(_restored_axes(graph))
    result = rewrite(mod, state, rule)
    if not rule.count:
        return mod
    state.note(f"{rule.count} matmuls keep their axes")
    return result


def _restored_axes(graph: Graph) -> dict[relax.Var, list[tvm.tirx.Expr]]:
    """Return what is of flattened rows -> the axes that a reshape behind makes of the rows."""
    restored: dict[relax.Var, list[tvm.tirx.Expr]] = {}
    for binding in reversed(graph.bindings):
        value = binding.value
        if is_op(value, "reshape") and isinstance(value.args[0], relax.Var):
            before, after = shape_of(value.args[0]), shape_of(value)
            if before and after and len(before) == 2 < len(after) and structural_equal(before[-1], after[-1]):
                restored[value.args[0]] = after[:-1]
        elif is_op(value, *ELEMENTWISE) and binding.var in restored:
            alike = [arg for arg in value.args if isinstance(arg, relax.Var) and same_shape(arg, binding.var)]
            restored |= dict.fromkeys(alike, restored[binding.var])
    return restored


class _Unflatten:
    def __init__(self, restored: dict[relax.Var, list[tvm.tirx.Expr]]) -> None:
        self._restored = restored
        # A flattened variable of the new function -> the tensor it is a reshape of.
        self._wide: dict[relax.Var, tvm.ir.Expr] = {}
        self.count = 0

    def __call__(self, new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | Done | None:
        var, value = binding.var, binding.value
        if is_op(value, "reshape"):
            return self._reshape(new, var, value)
        wide = self._widened(new, var, value) if isinstance(value, relax.Call) else None
        if wide is None:
            return None
        bound = new.extra(f"{var.name}__wide", wide, [var])
        self._wide[new.name(var, relax.op.reshape(bound, var.ty.shape))] = bound
        return DONE

    def _reshape(self, new: Rewriter, var: relax.Var, value: relax.Call) -> tvm.ir.Expr | Done:
        data = new.of(value.args[0])
        source = self._wide.get(data, data) if isinstance(data, relax.Var) else data
        before, after = shape_of(source), shape_of(value)
        if equal_axes(before, after) and isinstance(var, relax.DataflowVar):
            return source
        flat = new.name(var, relax.op.reshape(source, new.of(value.args[1])))
        if before is None or after is None or not isinstance(source, relax.Var):
            return DONE
        if len(before) > 2 and len(after) == 2 and structural_equal(before[-1], after[-1]):
            self._wide[flat] = source
        return DONE

    def _widened(self, new: Rewriter, var: relax.Var, value: relax.Call) -> tvm.ir.Expr | None:
        """Return a matmul or an elementwise operation in the axes before the flattening of its operands."""
        if is_op(value, "matmul"):
            data = new.of(value.args[0])
            flat = shape_of(data)
            if flat is None or not is_constant(value.args[1]) or len(shape_of(value.args[1]) or ()) != 2:
                return None
            if data not in self._wide and var in self._restored:
                self._wide[data] = new.emit(relax.op.reshape(data, [*self._restored[var], flat[-1]]))
            if data not in self._wide:
                return None
            self.count += 1
            return relax.op.matmul(self._wide[data], value.args[1], value.attrs.out_dtype)
        if not is_op(value, *ELEMENTWISE):
            return None
        args = [self._operand(new, arg, var) for arg in value.args]
        wides = [arg for arg in args if isinstance(arg, relax.Var)]
        if not wides or not all(equal_axes(_rows(arg), _rows(wides[0])) for arg in wides):
            return None
        if equal_axes(self._restored.get(var), _rows(wides[0])):
            given = zip(value.args, args, strict=True)
            args = [self._reshaped(new, arg, var) if wide is None else wide for arg, wide in given]
        return None if any(arg is None for arg in args) else relax.Call(value.op, args, value.attrs, value.ty_args)

    def _operand(self, new: Rewriter, arg: tvm.ir.Expr, var: relax.Var) -> tvm.ir.Expr | None:
        """Return an operand in its wide form: a number or row is its own, None when there is none."""
        if is_constant(arg):
            return arg if len(shape_of(arg) or ()) < 2 else None
        if not isinstance(arg, relax.Var):
            return arg if not isinstance(arg.ty, relax.TensorType) else None
        return self._wide.get(new.of(arg)) if equal_axes(_rows(arg), _rows(var)) else None

    def _reshaped(self, new: Rewriter, arg: tvm.ir.Expr, var: relax.Var) -> tvm.ir.Expr | None:
        """Return an operand over flattened rows in the axes that are restored behind; None for any other."""
        shape = shape_of(arg)
        if shape is None or len(shape) != 2 or not equal_axes(_rows(arg), _rows(var)):
            return None
        return new.emit(relax.op.reshape(new.of(arg), [*self._restored[var], shape[-1]]))


def _rows(tensor: tvm.ir.Expr) -> list[tvm.tirx.Expr] | None:
    """Return the axes of a tensor before its last."""
    shape = shape_of(tensor)
    return None if shape is None else shape[:-1]
