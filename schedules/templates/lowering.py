"""Lower a module in which some PrimFuncs are TIRx kernels and the others are S-TIR, each kind by its own passes.

`relax.build(..., tir_pipeline=MIXED_PIPELINE)` then builds both into one module. TVM has a pipeline for each
("s_tir", "tirx"), takes one for a whole module, and neither passes the other's functions through unharmed.

A kind of its own are schedules that copy asynchronously (`schedules.search.tensor_tile`): copies become `cp.async`, and
dynamic shared memory is reused by the pass that knows it (MergeSharedMemoryAllocations) alone. The one before it
(StorageRewrite) would put float32 into a buffer of halves, whose address then has the wrong type.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import IRModule
from tvm.tirx.compilation_pipeline import PIPELINE_MAP, register_tir_pipeline

from relaxtune.schedules.marks import ASYNC_COPIES, KERNEL_ATTR

MIXED_PIPELINE = "relaxtune_mixed"
_ASYNC_CONFIG = {"tirx.use_async_copy": True, "tirx.disable_storage_rewrite": True}

Passes = Callable[[IRModule], IRModule]


def register_mixed_pipeline() -> str:
    """Register the pipeline with TVM (once) and return its name."""
    if MIXED_PIPELINE not in PIPELINE_MAP:
        register_tir_pipeline(MIXED_PIPELINE, _mixed_pipeline)
    return MIXED_PIPELINE


def tir_pipeline_for(mod: IRModule) -> str:
    """Return the name of the TIR pipeline that a module needs: TVM's own unless it has one of the other kinds."""
    mixed = has_kernels(mod) or any(_copies_asynchronously(func) for func in mod.functions.values())
    return register_mixed_pipeline() if mixed else "default"


def has_kernels(mod: IRModule) -> bool:
    """Whether the module has a TIRx kernel, and so needs the mixed pipeline."""
    return any(_is_kernel(func) for func in mod.functions.values())


def _mixed_pipeline() -> tuple[tvm.transform.Pass, Passes, Passes]:
    tirx_lower, finish_host, _ = PIPELINE_MAP["tirx"]()
    blocks_lower, _, finish_device = PIPELINE_MAP["s_tir"]()

    def lower_asynchronous(mod: IRModule) -> IRModule:
        context = tvm.transform.PassContext.current()
        config = {**dict(context.config), **_ASYNC_CONFIG}
        with tvm.transform.PassContext(context.opt_level, instruments=context.instruments, config=config):
            return blocks_lower(mod)

    def lower(mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        functions = dict(mod.functions.items())
        kernels = {name: func for name, func in functions.items() if _is_kernel(func)}
        asynchronous = {name: func for name, func in functions.items() if _copies_asynchronously(func)}
        others = {name: func for name, func in functions.items() if name not in kernels and name not in asynchronous}
        lowered = IRModule({}, attrs=mod.attrs)
        for kind, passes in ((others, blocks_lower), (asynchronous, lower_asynchronous), (kernels, tirx_lower)):
            if kind:
                lowered.update(passes(IRModule(kind, attrs=mod.attrs)))
        return lowered

    each = tvm.transform.module_pass(lower, opt_level=0, name="LowerEachKind")
    return each, finish_host, finish_device


def _is_kernel(func: tvm.ir.BaseFunc) -> bool:
    return isinstance(func, tirx.PrimFunc) and bool(func.attrs) and bool(func.attrs.get(KERNEL_ATTR, False))


def _copies_asynchronously(func: tvm.ir.BaseFunc) -> bool:
    root = getattr(getattr(func, "body", None), "block", None)
    return root is not None and ASYNC_COPIES in root.annotations
