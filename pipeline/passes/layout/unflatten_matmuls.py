"""Pass: matmuls over flattened rows keep their axes, so that the reshapes around them vanish."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi import structural_equal

from relaxtune.pipeline.passes.kit.ir import (
    bindings_of,
    emit_extra,
    emit_named,
    is_constant,
    is_op,
    main_of,
    rewrite_main,
    shape_of,
)
from relaxtune.pipeline.passes.kit.state import LoweringState

_ELEMENTWISE = (
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"),
    *("negative", "abs", "exp", "log", "sqrt", "rsqrt", "square", "tanh", "sigmoid", "erf", "astype", "clip"),
    *("nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.relu", "nn.leakyrelu", "nn.softplus"),
)


def unflatten_matmuls(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with matmuls by constants, and what is elementwise behind them, in the axes before a flattening.

    ::

        a = reshape(x, [B * S, K]); y = reshape(a @ W + b, [B, S, N])   ->   y = x @ W + b

    Gemm (torch's addmm, GPT-2's conv1d) takes two axes only, so exporters flatten before it and restore the axes behind
    it. The reshapes are free, but what they stand between is not fused: a residual sum behind one is a kernel of its
    own. Which axes to keep is taken from the reshape before the matmul, or else from the one behind it.
    """
    rewriter = _Unflatten(state, _restored_axes(main_of(mod)))
    result = rewrite_main(mod, rewriter)
    if not rewriter.count:
        return mod
    state.note(f"{rewriter.count} matmuls keep their axes")
    return result


def _restored_axes(main: relax.Function) -> dict[relax.Var, list[tvm.tirx.Expr]]:
    """Return matmuls over flattened rows -> the axes that a reshape behind them makes of the rows."""
    restored: dict[relax.Var, list[tvm.tirx.Expr]] = {}
    found: dict[relax.Var, list[tvm.tirx.Expr]] = {}
    for binding in reversed(list(bindings_of(main))):
        value = binding.value
        if is_op(value, "reshape") and isinstance(value.args[0], relax.Var):
            before, after = shape_of(value.args[0]), shape_of(value)
            if before and after and len(before) == 2 < len(after) and structural_equal(before[-1], after[-1]):
                restored[value.args[0]] = after[:-1]
        elif is_op(value, *_ELEMENTWISE) and binding.var in restored:
            restored |= {arg: restored[binding.var] for arg in value.args if isinstance(arg, relax.Var)}
        elif is_op(value, "matmul") and binding.var in restored:
            found[binding.var] = restored[binding.var]
    return found


@mutator
class _Unflatten(PyExprMutator):  # type: ignore[misc]
    def __init__(self, state: LoweringState, restored: dict[relax.Var, list[tvm.tirx.Expr]]) -> None:
        super().__init__()
        self._state = state
        self._restored = restored
        # A flattened variable of the new function -> the tensor it is a reshape of.
        self._wide: dict[relax.Var, tvm.ir.Expr] = {}
        self.count = 0

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        var, value = binding.var, binding.value
        if is_op(value, "reshape"):
            self._reshape(var, value)
            return
        wide = self._widened(var, value) if isinstance(value, relax.Call) else None
        if wide is None:
            super().visit_var_binding_(binding)
            return
        name = f"{var.name}__wide"
        self._state.sources[name] = self._state.nodes_of([var.name])
        bound = emit_extra(self, name, wide)
        self._wide[emit_named(self, var, relax.op.reshape(bound, var.ty.shape))] = bound

    def _reshape(self, var: relax.Var, value: relax.Call) -> None:
        data = self.visit_expr(value.args[0])
        source = self._wide.get(data, data) if isinstance(data, relax.Var) else data
        before, after = shape_of(source), shape_of(value)
        if _equal(before, after) and isinstance(var, relax.DataflowVar):
            self.set_var_remap(var, source)
            return
        new = emit_named(self, var, relax.op.reshape(source, self.visit_expr(value.args[1])))
        if before is None or after is None or not isinstance(source, relax.Var):
            return
        if len(before) > 2 and len(after) == 2 and structural_equal(before[-1], after[-1]):
            self._wide[new] = source

    def _widened(self, var: relax.Var, value: relax.Call) -> tvm.ir.Expr | None:
        """Return a matmul or an elementwise operation in the axes before the flattening of its operands."""
        if is_op(value, "matmul"):
            data = self.visit_expr(value.args[0])
            flat = shape_of(data)
            if flat is None or not is_constant(value.args[1]) or len(shape_of(value.args[1]) or ()) != 2:
                return None
            if data not in self._wide and var in self._restored:
                rows = [*self._restored[var], flat[-1]]
                self._wide[data] = self.builder_.emit(relax.op.reshape(data, rows))
            if data not in self._wide:
                return None
            self.count += 1
            return relax.op.matmul(self._wide[data], value.args[1], value.attrs.out_dtype)
        if not is_op(value, *_ELEMENTWISE):
            return None
        args = [self._operand(arg, var) for arg in value.args]
        wides = [arg for arg in args if isinstance(arg, relax.Var)]
        if any(arg is None for arg in args) or not wides:
            return None
        if not all(_equal(shape_of(arg), shape_of(wides[0])) for arg in wides):
            return None
        return relax.Call(value.op, args, value.attrs, value.ty_args)

    def _operand(self, arg: tvm.ir.Expr, var: relax.Var) -> tvm.ir.Expr | None:
        """Return an operand in its wide form: a number or row is its own, None when there is none."""
        if is_constant(arg):
            return arg if len(shape_of(arg) or ()) < 2 else None
        if not isinstance(arg, relax.Var):
            return arg if not isinstance(arg.ty, relax.TensorType) else None
        new = self.visit_expr(arg)
        return self._wide.get(new) if _equal(shape_of(arg), shape_of(var)) else None


def _equal(left: list[tvm.tirx.Expr] | None, right: list[tvm.tirx.Expr] | None) -> bool:
    if left is None or right is None or len(left) != len(right):
        return False
    return all(structural_equal(a, b) for a, b in zip(left, right, strict=True))
