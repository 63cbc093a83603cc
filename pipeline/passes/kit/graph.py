"""`Graph`: what binds, and what reads, each variable of `main`."""

from __future__ import annotations

from functools import cached_property

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import bindings_of, is_op, main_of, users_of
from relaxtune.pipeline.passes.kit.known_values import KnownValues
from relaxtune.pipeline.passes.kit.sizes import Symbols


class Graph:
    """The bindings of `main`, in execution order."""

    def __init__(self, mod: tvm.ir.IRModule) -> None:
        self.mod = mod
        self.main = main_of(mod)
        self.bindings = tuple(bindings_of(self.main))
        self.values = {b.var: b.value for b in self.bindings if isinstance(b, relax.VarBinding)}

    @cached_property
    def order(self) -> dict[relax.Var, int]:
        """Variable -> place of its binding."""
        return {binding.var: place for place, binding in enumerate(self.bindings)}

    @cached_property
    def symbols(self) -> Symbols:
        """The symbolic axes of the inputs."""
        return Symbols(relax.analysis.defined_symbolic_vars(self.main))

    @cached_property
    def known(self) -> KnownValues:
        """Facts about tensors that hold at all sizes."""
        return KnownValues(self.values)

    @cached_property
    def users(self) -> dict[relax.Var, list[relax.Var]]:
        """Variable -> variables whose bindings read it; a result of `main` reads itself, see `users_of`."""
        return users_of(self.main)

    def value(self, expr: tvm.ir.Expr | None) -> tvm.ir.Expr | None:
        """Return what a variable is bound to; None for anything else, inputs included."""
        return self.values.get(expr) if isinstance(expr, relax.Var) else None

    def readers(self, var: relax.Var) -> list[relax.Var]:
        """Return the variables whose bindings read `var`, itself where it is a result."""
        return self.users.get(var, [])

    def only_reader(self, var: relax.Var) -> relax.Var | None:
        """Return the variable whose binding alone reads `var`, once; None where there are more, or it is a result."""
        readers = self.readers(var)
        return readers[0] if len(readers) == 1 and readers[0] != var else None

    def behind(self, expr: tvm.ir.Expr, *names: str) -> list[relax.Var]:
        """Return the variables from `expr` back through calls of the named operators, by their first operands."""
        path: list[relax.Var] = []
        while isinstance(expr, relax.Var):
            path.append(expr)
            value = self.value(expr)
            if not is_op(value, *names):
                break
            expr = value.args[0]
        return path

    def unwrapped(self, index: tvm.ir.Expr) -> tuple[tvm.ir.Expr, tvm.ir.Expr] | None:
        """Return x and the size of `where(x < 0, x + size, x)`: an index that may count from the end."""
        value = self.value(index)
        if not is_op(value, "where"):
            return None
        test, total, plain = self.value(value.args[0]), self.value(value.args[1]), value.args[2]
        if not is_op(test, "less") or not is_op(total, "add") or test.args[0] != plain or total.args[0] != plain:
            return None
        return (plain, total.args[1]) if self.known.of(test.args[1]) == 0 else None
