"""Pass: mark functions by the pattern that fusion reads."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir.expr import TensorLoad

from relaxtune.pipeline.passes.kit.ir import with_functions
from relaxtune.pipeline.passes.kit.rewrite import INJECTIVE, pattern_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.tir.blocks import list_blocks, same_sizes, shape_of as sizes_of
from relaxtune.schedules.tir.expressions import find_all


def annotate_patterns(mod: tvm.ir.IRModule, state: LoweringState) -> tvm.ir.IRModule:
    """Return `mod` with TVM's patterns of fusion, and a function that pads or cuts an axis at its end as injective.

    TVM calls it elementwise, since its indices are its axes. It would become the epilogue of a matmul, whose tiles do
    not cover what is padded.
    """
    mod = relax.transform.AnnotateTIROpPattern()(mod)
    changed = {
        name: func.with_attr("op_pattern", INJECTIVE)
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and pattern_of(func) < INJECTIVE and _pads_or_cuts(func)
    }
    return with_functions(mod, changed)


def _pads_or_cuts(func: tirx.PrimFunc) -> bool:
    """Whether a block reads a tensor by an axis of its own that has another size than the tensor's."""
    for block in list_blocks(func):
        sizes = dict(zip(block.axes, block.sizes, strict=True))
        for load in find_all(block.stmt.body, TensorLoad):
            for index, size in zip(load.indices, sizes_of(load.source) or (), strict=False):
                if isinstance(index, tirx.Var) and not same_sizes([sizes.get(index, size)], [size]):
                    return True
    return False
