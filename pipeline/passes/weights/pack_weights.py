"""Pass: lay constant matrices out at compile time the way the CPU's matmul kernels read them."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    dtype_of,
    emit_named,
    main_of,
    multiplies_by_matrix,
    rewrite_main,
    shape_of,
    static_shape,
)
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.cpu.packing import pack_weight, packed_matmul, panel_width
from relaxtune.schedules.targets import CpuLimits, target_limits

# (Of x, of the weight, of the sums.) The other types have no kernels of their own on a CPU, and gain nothing.
_DTYPES = {
    ("float32", "float32", "float32"),
    *((x, weight, "int32") for x in ("int8", "uint8") for weight in ("int8", "int16")),
}


def pack_weights(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with `matmul(x, W)` of a constant [K, N] matrix as a kernel that reads W in packed panels.

    W is of float32, or of integers under precision int8.

    The panels are constants like any weight, so the packing costs nothing at run time, and the tuner's task is the
    kernel that reads them. A weight that several matmuls of the same width read is packed once. On a CPU only: a GPU's
    kernels read the matrix as it is.
    """
    limits = target_limits(state.target) if state.target.kind.name == "llvm" else None
    main = main_of(mod)
    if not isinstance(limits, CpuLimits) or not any(_can_pack(binding.value) for binding in bindings_of(main)):
        return mod
    packer = _Pack(mod, limits)
    result = rewrite_main(mod, packer)
    state.note(f"packed {packer.count} weights of {packer.bytes} bytes")
    return result


def _can_pack(value: tvm.ir.Expr) -> bool:
    return (
        multiplies_by_matrix(value) and (dtype_of(value.args[0]), dtype_of(value.args[1]), dtype_of(value)) in _DTYPES
    )


@mutator
class _Pack(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.ir.IRModule, limits: CpuLimits) -> None:
        super().__init__(mod)
        self._limits = limits
        self._packed: dict[tuple[tvm.ir.Expr, int], tvm.ir.Expr] = {}
        self.bytes = 0

    @property
    def count(self) -> int:
        """Weights packed so far."""
        return len(self._packed)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if not _can_pack(binding.value):
            super().visit_var_binding_(binding)
            return
        left, weight = binding.value.args
        columns = (static_shape(weight) or ())[1]
        dtype = dtype_of(binding.var)
        width = panel_width(_longest_row_axis(left), columns, dtype, self._limits)
        key = (weight, width)
        if key not in self._packed:
            packed = pack_weight(array_of(weight), width)
            self._packed[key] = relax.const(packed)
            self.bytes += packed.nbytes
        operands = (self.visit_expr(left), self._packed[key])
        emit_named(
            self,
            binding.var,
            self.builder_.call_te(packed_matmul(columns, dtype), *operands, primfunc_name_hint="packed_matmul"),
        )


def _longest_row_axis(left: tvm.ir.Expr) -> int | None:
    """Return the longest of the axes before the last, None when one is symbolic."""
    rows = (shape_of(left) or [])[:-1]
    known = [int(axis) for axis in rows if isinstance(axis, tvm.tirx.IntImm)]
    return max(known) if len(known) == len(rows) else None
