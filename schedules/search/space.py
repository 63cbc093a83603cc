"""Our MetaSchedule search spaces: what a tuning run may try for a kernel."""

from __future__ import annotations

import logging

import tvm
from tvm.ir import IRModule
from tvm.s_tir import Schedule, meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.target import Target
from tvm.tirx import PrimFunc

from relaxtune.schedules.errors import Refusal, TargetError
from relaxtune.schedules.fallback import schedule_by_rules
from relaxtune.schedules.functions.attention import spec_of
from relaxtune.schedules.marks import AT_SIZES_ATTR
from relaxtune.schedules.search.register_tile import contraction_designs
from relaxtune.schedules.search.tensor_tile import takes_tensor_tiles, tensor_tile_designs
from relaxtune.schedules.search.thread_tile import thread_tile_designs
from relaxtune.schedules.targets import CpuLimits, CudaLimits, target_limits
from relaxtune.schedules.tir.matmul import recognise_matmul

# Schedule rules for CUDA without tensor cores: tiling through shared memory, cross-thread reductions, thread binding.
#
# A function with a single matmul gets a space of its own (`schedules.search.tensor_tile`, else `thread_tile`).
#
# TVM's tensor-core rules are left out: nearly all of their candidates fail to build (the buffer's element type is not
# the one the intrinsic expects).

_LOG = logging.getLogger("relaxtune.metaschedule")
UNROLL_STEPS = (0, 16, 64, 512, 1024)
MAX_BLOCKS = 256


def cuda_rules(limits: CudaLimits) -> list[ms.ScheduleRule]:
    """Return the rules in the order in which they are applied to each block."""
    rule = ms.schedule_rule
    extents = _powers_of_two(limits.warp_size, limits.max_threads_per_block)
    return [
        rule.ApplyCustomRule(),
        rule.MultiLevelTiling(
            structure="SSSRRSRS",
            tile_binds=["blockIdx.x", "vthread.x", "threadIdx.x"],
            max_innermost_factor=64,
            # In elements: up to the 16 bytes of one load, in float32.
            vector_load_lens=[1, 2, 3, 4],
            reuse_read=rule.ReuseType(req="must", levels=[4], scope="shared"),
            reuse_write=rule.ReuseType(req="must", levels=[3], scope="local"),
        ),
        rule.InlineConstantScalars(),
        rule.AutoInline(
            into_producer=True,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=False,
            require_injective=False,
            require_ordered=False,
            disallow_op=None,
        ),
        rule.CrossThreadReduction(thread_extents=[4, 8, 16, *_powers_of_two(limits.warp_size, 512)]),
        rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=-1, max_vectorize_extent=-1, unroll_max_steps=list(UNROLL_STEPS), unroll_explicit=True
        ),
        rule.AutoBind(
            max_threadblocks=MAX_BLOCKS, thread_extents=extents, max_threads_per_block=limits.max_threads_per_block
        ),
    ]


def _powers_of_two(low: int, high: int) -> list[int]:
    return [1 << bit for bit in range(low.bit_length() - 1, high.bit_length())]


# Schedule rules for LLVM functions that are no contractions: inlining, rfactor, tiling, threads and vectors.
#
# The order and the parameters follow the shape of TVM's own list; what differs comes from the target's limits: vector
# loops are no longer than one vector register times four, and jobs are counted from the cores the process may use.

JOBS_PER_CORE = 8
CPU_UNROLL_STEPS = (0, 16, 64, 256)


def llvm_rules(limits: CpuLimits) -> list[ms.ScheduleRule]:
    """Return the rules in the order in which they are applied to each block."""
    lanes = limits.vector_bytes // 4
    rule = ms.schedule_rule
    return [
        rule.ApplyCustomRule(),
        rule.InlineConstantScalars(),
        rule.AutoInline(
            into_producer=False,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=True,
            require_injective=True,
            require_ordered=True,
            # Names of this TVM's operators; TVM's own list still says `tir.exp`, which no operator is called any more.
            disallow_op=["tirx.exp", "tirx.erf", "tirx.tanh"],
        ),
        rule.AddRFactor(max_jobs_per_core=JOBS_PER_CORE, max_innermost_factor=4 * lanes),
        rule.MultiLevelTiling(
            structure="SSRSRS",
            tile_binds=None,
            max_innermost_factor=4 * lanes,
            vector_load_lens=None,
            reuse_read=None,
            reuse_write=rule.ReuseType(req="may", levels=[1, 2], scope="global"),
        ),
        rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=JOBS_PER_CORE,
            max_vectorize_extent=4 * lanes,
            unroll_max_steps=list(CPU_UNROLL_STEPS),
            unroll_explicit=True,
        ),
        rule.RandomComputeLocation(),
    ]


def make_space(target: Target, mod: IRModule | None = None) -> ms.SpaceGenerator:
    """Return the space generator for a target, and for a module with one function `main` where it is known.

    The schedule of the fallback is a design of the space. On LLVM, contractions get the register-tile designs, on CUDA
    the tensor-tile or thread-tile designs; everything else gets schedule rules applied in post-order. TVM's own
    post-processors and mutators are kept, except that what is made of tensor-tile designs is not lowered once more to
    see whether it keeps to the limits of a block: it does, and TVM's check knows the limit of static shared memory
    only, which they do not use.

    Raises `TargetError`: the target is neither `llvm` nor `cuda`.
    """
    kind = str(target.kind.name)
    if kind not in ("llvm", "cuda"):
        raise TargetError(f"no search space for target kind {kind!r}; expected llvm or cuda.")

    def designs(sch: Schedule) -> list[Schedule]:
        return list_designs(sch.mod, target)

    postprocs = list(ms.postproc.Postproc.create(kind))
    if mod is not None and takes_tensor_tiles(mod["main"], target):
        postprocs = [one for one in postprocs if not isinstance(one, ms.postproc.VerifyGPUCode)]
    return ms.space_generator.ScheduleFn(
        designs, sch_rules=[], postprocs=postprocs, mutator_probs=ms.mutator.Mutator.create(kind)
    )


def list_designs(mod: IRModule, target: Target) -> list[Schedule]:
    """Return the designs of a module with one function `main`, the fallback's first; none for one not searched."""
    limits = target_limits(target)
    func = mod["main"]
    if find_refusal(func) is not None:
        return []
    _, fallback = schedule_by_rules("main", func, target)
    if isinstance(limits, CpuLimits):
        designs = contraction_designs(func, limits)
        rules = llvm_rules(limits)
    else:
        designs = tensor_tile_designs(func, target) or thread_tile_designs(func, limits)
        rules = cuda_rules(limits)
    if not designs:
        space = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=[], mutator_probs={})
        designs = list(QuietTuneContext(mod, target, space).generate_design_space())
    return [fallback, *designs]


def find_refusal(func: PrimFunc) -> Refusal | None:
    """Return why a function is not searched but left to its template, None for one that has a space.

    The passes make such functions only where a template takes them, and its kernels use tensor cores, which no schedule
    of several reductions does. Of attention's schedules hardly one keeps to the limits of a block; on statistics of
    rows TVM 0.27's rules fail ("Index 6 out of bounds 6"); of matmuls with partial sums, the search found no schedule
    that keeps to the limits.
    """
    if func.attrs and AT_SIZES_ATTR in func.attrs:
        return Refusal("its kernel is to take other sizes too: a template makes it")
    if spec_of(func) is not None:
        return Refusal("attention is left to its template: hardly a schedule of its two matmuls keeps to all limits")
    matmul = recognise_matmul(func)
    if isinstance(matmul, Refusal):
        return None
    if matmul.norm is not None:
        return Refusal("a matmul that makes statistics of its rows is left to its template: no rule schedules both")
    if matmul.partials is not None:
        return Refusal("a matmul that sums up its result's rows is left to its template: no rule schedules both")
    return None


class QuietTuneContext(ms.TuneContext):  # type: ignore[misc]  # TVM's classes carry no types
    """A TuneContext whose construction does not import all of TVM's tensor intrinsics.

    This import takes 15 seconds of CPU time in every process; a space generator that needs some brings its own.
    Messages of MetaSchedule go to the logger `relaxtune.metaschedule`. A context takes the space over, since that keeps
    state. No strategy is needed where only the designs are wanted. Seeds are from 1 on, or -1 for a random one.
    """

    def __init__(
        self,
        mod: tvm.ir.IRModule,
        target: tvm.target.Target,
        space: ms.SpaceGenerator,
        strategy: ms.SearchStrategy | None = None,
        *,
        name: str = "main",
        seed: int = -1,
        threads: int = 1,
    ) -> None:
        log = get_logging_func(_LOG)
        self.__init_handle_by_constructor__(
            _ffi_api.TuneContext, mod, target, space, strategy, name, threads, seed, log
        )
        _ffi_api.TuneContextInitialize(self)
