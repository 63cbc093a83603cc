"""Pass: lay constant matrices out at compile time the way the CPU's matmul kernels read them."""

from __future__ import annotations

import tvm
from tvm import relax

from relaxtune.pipeline.passes.kit.ir import (
    array_of,
    bindings_of,
    dtype_of,
    longest_row_axis,
    main_of,
    multiplies_by_matrix,
    static_shape,
)
from relaxtune.pipeline.passes.kit.rewrite import Rewriter, rewrite
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.cpu.packing import pack_weight, pack_words, packed_matmul, packs_words, panel_width
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
    packed: dict[tuple[tvm.ir.Expr, int], tvm.ir.Expr] = {}

    def rule(new: Rewriter, binding: relax.VarBinding) -> tvm.ir.Expr | None:
        if not _can_pack(binding.value):
            return None
        left, weight = binding.value.args
        columns, dtype = (static_shape(weight) or ())[1], dtype_of(binding.var)
        words = packs_words(dtype_of(left), array_of(weight), limits)
        width = panel_width(
            None if words or state.options.one_packing else longest_row_axis(left), columns, dtype, limits
        )
        if (weight, width) not in packed:
            pack = pack_words if words else pack_weight
            packed[weight, width] = relax.const(pack(array_of(weight), width))
        return new.kernel(packed_matmul(columns, dtype), new.of(left), packed[weight, width], name="packed_matmul")

    result = rewrite(mod, state, rule)
    state.note(f"packed {len(packed)} weights of {sum(array_of(one).nbytes for one in packed.values())} bytes")
    return result


def _can_pack(value: tvm.ir.Expr) -> bool:
    return (
        multiplies_by_matrix(value) and (dtype_of(value.args[0]), dtype_of(value.args[1]), dtype_of(value)) in _DTYPES
    )
