"""Lower a module in which some PrimFuncs are TIRx kernels and the others are S-TIR, each kind by its own passes.

`relax.build(..., tir_pipeline=MIXED_PIPELINE)` then builds both into one module. TVM has a pipeline for each
("s_tir", "tirx"), takes one for a whole module, and neither passes the other's functions through unharmed.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.tirx.compilation_pipeline import PIPELINE_MAP, register_tir_pipeline

MIXED_PIPELINE = "relaxtune_mixed"
# On a PrimFunc: it is a TIRx kernel (explicit threads, memory and barriers), not a schedule of blocks.
KERNEL_ATTR = "relaxtune.tirx_kernel"

Passes = Callable[[IRModule], IRModule]


def register_mixed_pipeline() -> str:
    """Register the pipeline with TVM (once) and return its name."""
    if MIXED_PIPELINE not in PIPELINE_MAP:
        register_tir_pipeline(MIXED_PIPELINE, _mixed_pipeline)
    return MIXED_PIPELINE


def tir_pipeline_for(mod: IRModule) -> str:
    """Return the name of the TIR pipeline that a module needs: TVM's own unless it has a TIRx kernel."""
    return register_mixed_pipeline() if has_kernels(mod) else "default"


def has_kernels(mod: IRModule) -> bool:
    """Whether the module has a TIRx kernel, and so needs the mixed pipeline."""
    return any(_is_kernel(func) for func in mod.functions.values())


def _mixed_pipeline() -> tuple[tvm.transform.Pass, Passes, Passes]:
    tirx_lower, finish_host, _ = PIPELINE_MAP["tirx"]()
    blocks_lower, _, finish_device = PIPELINE_MAP["s_tir"]()

    def lower(mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        kernels = {name: func for name, func in mod.functions.items() if _is_kernel(func)}
        others = {name: func for name, func in mod.functions.items() if not _is_kernel(func)}
        lowered = IRModule({}, attrs=mod.attrs)
        for functions, passes in ((others, blocks_lower), (kernels, tirx_lower)):
            if functions:
                lowered.update(passes(IRModule(functions, attrs=mod.attrs)))
        return lowered

    each = tvm.transform.module_pass(lower, opt_level=0, name="LowerEachKind")
    return each, finish_host, finish_device


def _is_kernel(func: tvm.ir.BaseFunc) -> bool:
    return isinstance(func, tirx.PrimFunc) and bool(func.attrs) and bool(func.attrs.get(KERNEL_ATTR, False))
