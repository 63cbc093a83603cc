"""Lower a module in which some PrimFuncs are TIRx kernels and the others are S-TIR, each kind by its own passes.

`relax.build(..., tir_pipeline=MIXED_PIPELINE)` then builds both into one module. TVM has a pipeline for each
("s_tir", "tirx"), takes one for a whole module, and neither passes the other's functions through unharmed.

A kind of its own are schedules that copy asynchronously (`schedules.search.tensor_tile`): copies become `cp.async`, and
dynamic shared memory is reused by the pass that knows it (MergeSharedMemoryAllocations) alone. The one before it
(StorageRewrite) would put float32 into a buffer of halves, whose address then has the wrong type.

Another kind are functions that were written loop by loop (`schedules.cpu.any_size`). Their buffers have the size that
they need; TVM would still compute it from every access, for seconds.

Functions that divide by symbolic sizes are lowered as any other, and their divisions truncated on the host.

Passes and code generators let go of Python's lock. Kernels that are lowered in two threads take 0.67 of the time that
one thread needs, and 1.25 of its processor time (39 matmuls of BERT-base for Hopper with symbolic rows, 2 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, count, islice
from typing import TypeVar

import tvm
from tvm import tirx
from tvm.backend.cuda.transforms import LowerIket
from tvm.ir import IRModule
from tvm.ir.transform import PassContext
from tvm.s_tir import SBlockRealize
from tvm.s_tir.transform import UnifyThreadBinding
from tvm.target import Target
from tvm.tirx import PrimFunc
from tvm.tirx.compilation_pipeline import PIPELINE_MAP, register_tir_pipeline
from tvm_ffi import StructuralKey

from relaxtune.schedules.divisions_without_signs import divides_by_sizes, truncate_divisions
from relaxtune.schedules.marks import ASYNC_COPIES, is_kernel, is_scheduled
from relaxtune.schedules.targets.host import usable_cpus
from relaxtune.schedules.templates.launch_table import is_table, join_table, split_table, with_kernel_names

MIXED_PIPELINE = "relaxtune_mixed"
_ASYNC_CONFIG = {"tirx.use_async_copy": True, "tirx.disable_storage_rewrite": True}

Passes = Callable[[IRModule], IRModule]
Item = TypeVar("Item")
Result = TypeVar("Result")
MadePasses = Callable[[], tvm.transform.Pass]


def register_mixed_pipeline() -> str:
    """Register the pipeline with TVM (once) and return its name."""
    if MIXED_PIPELINE not in PIPELINE_MAP:
        register_tir_pipeline(MIXED_PIPELINE, _mixed_pipeline)
    return MIXED_PIPELINE


def tir_pipeline_for(mod: IRModule) -> str:
    """Return the name of the TIR pipeline that a module needs: TVM's own unless it has one of the other kinds."""
    kinds = (_copies_asynchronously, _has_no_blocks, divides_by_sizes)
    mixed = has_kernels(mod) or any(is_kind(func) for func in mod.functions.values() for is_kind in kinds)
    return register_mixed_pipeline() if mixed else "default"


def has_kernels(mod: IRModule) -> bool:
    """Whether the module has a TIRx kernel, and so needs the mixed pipeline."""
    return any(is_kernel(func) for func in mod.functions.values())


def _mixed_pipeline() -> tuple[tvm.transform.Pass, MadePasses, MadePasses]:
    tirx_lower, finish_host, _ = PIPELINE_MAP["tirx"]()
    blocks_lower, _, finish_device = PIPELINE_MAP["s_tir"]()

    def lower_asynchronous(mod: IRModule) -> IRModule:
        with context_like(PassContext.current(), _ASYNC_CONFIG):
            return blocks_lower(mod)

    def lower_without_blocks(mod: IRModule) -> IRModule:
        with context_like(PassContext.current(), disabled=("s_tir.CompactBufferAllocation",)):
            return blocks_lower(mod)

    def lower(mod: IRModule, _context: PassContext) -> IRModule:
        functions = dict(mod.functions.items())
        kernels = {name: func for name, func in functions.items() if is_kernel(func)}
        asynchronous = {name: func for name, func in functions.items() if _copies_asynchronously(func)}
        written = {name: func for name, func in functions.items() if name not in kernels and _has_no_blocks(func)}
        kinds = (kernels, asynchronous, written)
        others = {name: func for name, func in functions.items() if not any(name in kind for kind in kinds)}
        tables = {name: func for name, func in kernels.items() if is_table(func)}
        kernels = {name: func for name, func in kernels.items() if name not in tables}
        lowered = IRModule({}, attrs=mod.attrs)
        # The only function of a kind is not the module's only one, which TVM makes its entry.
        entry = () if len(functions) == 1 else ("tirx.AnnotateEntryFunc",)
        with context_like(PassContext.current(), disabled=entry):
            for kind, passes in (
                (others, blocks_lower),
                (asynchronous, lower_asynchronous),
                (written, lower_without_blocks),
                (kernels, tirx_lower),
                (tables, _lower_tables),
            ):
                if kind:
                    lowered.update(passes(IRModule(kind, attrs=mod.attrs)))
        return lowered

    each = tvm.transform.module_pass(lower, opt_level=0, name="LowerEachKind")

    # These passes take one function at a time.
    def finish_each(mod: IRModule, _context: PassContext) -> IRModule:
        finished = IRModule({}, attrs=mod.attrs)
        functions = [IRModule({var: func}, attrs=mod.attrs) for var, func in mod.functions_items()]
        for one in map_side_by_side(finish_device(), functions):
            finished.update(one)
        return finished

    finish = tvm.transform.module_pass(finish_each, opt_level=0, name="FinishEachKernel")
    truncate = tvm.transform.module_pass(
        lambda mod, _context: truncate_divisions(mod), opt_level=0, name="TruncateDivisions"
    )
    return each, lambda: tvm.transform.Sequential([truncate, finish_host()]), lambda: finish


def _lower_tables(mod: IRModule) -> IRModule:
    """Return the functions of several kernels lowered as TVM's "tirx" pipeline does it, but each kernel apart."""
    context = PassContext.current()
    settings = f"{sorted(context.config.items(), key=str)} {sorted(map(str, context.disabled_pass))}"
    tables = {name: split_table(func) for name, func in mod.functions.items()}
    # A module has one function: in modules of several, passes rename the variables that two of them share.
    parts = [
        (name.name_hint, StructuralKey(IRModule({name: one})), settings, one is table.choice)
        for name, table in tables.items()
        for one in (table.choice, *table.kernels)
    ]
    lowered = iter(map_side_by_side(lambda part: _lowered_part(*part), parts))
    joined = {}
    for name, table in tables.items():
        function = name.name_hint
        (choice,) = next(lowered).functions.values()
        # The names that TVM gives the kernels of a function.
        names = chain([f"{function}_kernel"], (f"{function}_kernel_{number}" for number in count(1)))
        hosts = []
        for one in islice(lowered, len(table.kernels)):
            functions = {var.name_hint: func for var, func in one.functions.items()}
            host = functions.pop(function)
            renamed = {known: next(names) for known in functions}
            for known, device in functions.items():
                joined[renamed[known]] = device.with_attr("global_symbol", renamed[known])
            hosts.append(with_kernel_names(host, renamed))
        joined[function] = join_table(choice, hosts)
    return _kernel_passes()[1](IRModule(joined, attrs=mod.attrs))


# A model is compiled untuned and tuned: most of its kernels are the same.
@lru_cache(maxsize=512)
def _lowered_part(_name: str, part: StructuralKey, _settings: str, chooses: bool) -> IRModule:
    # The host's few comparisons. To simplify 45 lines, one in another, took a second.
    slow = ("tirx.StmtSimplify",) if chooses else ()
    with context_like(PassContext.current(), disabled=slow):
        lowered: IRModule = _kernel_passes()[0](part.key)
    return lowered


def _kernel_passes() -> tuple[tvm.transform.Pass, tvm.transform.Pass]:
    """Return the passes of TVM's "tirx" pipeline, up to the one that splits host and device, and the others.

    `AnnotateEntryFunc` is left out: a kernel that is lowered apart would be taken for a module's only function.
    """
    config = PassContext.current().config
    passes = [
        tirx.transform.LowerTIRx(),
        UnifyThreadBinding(),
        tirx.transform.StmtSimplify(),
        tirx.transform.LowerTIRxOpaque(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(not bool(config.get("tir.disable_vectorize", False))),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        *([] if config.get("tir.disable_cse_tir", False) else [tirx.transform.CommonSubexprElim()]),
        tirx.transform.FP8ComputeLegalize(),
        tirx.transform.VerifyMemory(),
        tirx.transform.SplitHostDevice(),
        LowerIket(),
    ]
    pack = [tirx.transform.MakePackedAPI(), tirx.transform.FP8StorageLegalize(), tirx.transform.BF16StorageLegalize()]
    return tvm.transform.Sequential(passes), tvm.transform.Sequential(pack)


def _copies_asynchronously(func: tvm.ir.BaseFunc) -> bool:
    root = getattr(getattr(func, "body", None), "block", None)
    return root is not None and ASYNC_COPIES in root.annotations


def _has_no_blocks(func: tvm.ir.BaseFunc) -> bool:
    """Whether a function is written out in loops. A function with blocks has one around its body."""
    return isinstance(func, PrimFunc) and is_scheduled(func) and not isinstance(func.body, SBlockRealize)


def map_side_by_side(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of all calls, in the order of the items; those first in line begin first.

    Each call has the caller's pass context and target.
    """
    threads = min(len(usable_cpus()), len(items))
    if threads < 2:
        return [call(one) for one in items]
    context, target = PassContext.current(), Target.current(allow_none=True)

    def within(item: Item) -> Result:
        # Both are of the thread.
        with context_like(context):
            if target is None:
                return call(item)
            with target:
                return call(item)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(within, items))


def context_like(
    context: PassContext, config: Mapping[str, object] | None = None, disabled: Sequence[str] = ()
) -> PassContext:
    """Return a pass context with the settings of another, with further ones, and without some passes."""
    return PassContext(
        context.opt_level,
        required_pass=context.required_pass,
        disabled_pass=[*context.disabled_pass, *disabled],
        instruments=context.instruments,
        config={**dict(context.config), **(config or {})},
    )
