"""Many CUDA kernels compiled side by side: each a module with a cubin of its own.

NVRTC optimises the kernels of one source mostly one after another. TVM makes one source of all of a module's kernels,
which are many where sizes are symbolic (46 for BERT, 13 where they are known). Here each kernel is a source of its own,
and workers compile those (`pipeline.codegen.cuda_compiler`): NVRTC takes one source at a time in a process. A unit
more costs 0.08 s of processor time: 37 s for all 46, in eight units of six 34 s. How kernels are dealt out depends on
the kernels alone, so that every machine makes the same cubins.

One thread writes the sources, one after another: it is Python's work. Threads that wrote as well waited for each other
(16 of them took a third more processor time on 2 cores).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import tvm
import tvm_ffi
from tvm.ir import IRModule

from relaxtune.pipeline.codegen.cubins import OnLog
from relaxtune.pipeline.codegen.cuda_compiler import CompilerKind, CubinRequest, registered
from relaxtune.pipeline.workers.fork_server import Forks, ForkServer
from relaxtune.pipeline.workers.pool import WorkerPool
from relaxtune.pipeline.workers.replies import WorkerError
from relaxtune.pipeline.workers.worker import Worker
from relaxtune.schedules.targets.host import usable_cpus

logger = logging.getLogger(__name__)

_BUILD = "target.build.cuda"
# TVM's build ends with it: the source of all kernels, its format, what each takes. It compiles.
_CREATE = "ffi.Module.create.cuda"
# Its `written` takes what a thread writes, in the place of compiling it.
_THREAD = threading.local()
#: Modules of fewer kernels stay one unit, whose kernels NVRTC optimises side by side as far as it does.
KERNELS_MIN = 20
# What was compiled in this process: a model is compiled untuned and tuned, and most of its kernels are the same.
_CUBINS: dict[CubinRequest, bytes] = {}
_CUBINS_MAX = 1024
_WORKER = "relaxtune.pipeline.codegen.cuda_compiler"
# A worker takes 100 MB.
_WORKERS_MAX = 16
# TVM's names of the kernels of a function that has several: the first one has no number.
_NUMBERED = re.compile(r"_kernel_(\d+)$")


@dataclass(frozen=True)
class UnitSource:
    """What TVM's code generation makes of a unit, before CUDA's compiler."""

    source: bytes  # CUDA's.
    format: str  # Of the source, in TVM's words.
    functions: object  # Kernel -> `runtime.FunctionInfo`: what it takes. A map of TVM's.


def write_unit(unit: IRModule, target: tvm.target.Target) -> UnitSource:
    """Return the source of a unit; TVM's CUDA runtime is loaded (`cuda_compiler.ensure_cuda_runtime`)."""
    _create()
    _THREAD.written = written = list[UnitSource]()
    try:
        tvm_ffi.get_global_func(_BUILD)(unit, target)
    finally:
        _THREAD.written = None
    return written[0]


def compile_unit(
    written: UnitSource, request: CubinRequest, on_log: OnLog | None, worker: Worker
) -> tvm.runtime.Module:
    """Return the module of a unit, its cubin made by a worker; by this process where the worker makes none.

    Making it here says what is wrong, or works. nvcc is a process of its own; its messages are logged here.
    """
    request = replace(request, code=written.source.decode())
    here = request.toolchain.kind is not CompilerKind.NVRTC or on_log is not None
    cubin = None if here else _CUBINS.get(request) or _ask(worker, request)
    cubin = cubin or request.compile(on_log)
    if len(_CUBINS) < _CUBINS_MAX:
        _CUBINS[request] = cubin
    module: tvm.runtime.Module = _create()(cubin, "cubin", written.functions, {written.format: request.code})
    return module


@contextmanager
def units_side_by_side(request: CubinRequest, on_log: OnLog | None) -> Iterator[None]:
    """Make TVM compile the CUDA kernels of a module side by side inside the block, as `cuda_compiler` asks for each."""
    build = tvm_ffi.get_global_func(_BUILD)
    # TVM keeps who compiles from the first call on.
    _create()

    def build_units(mod: IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
        units = split_units(mod)
        if units == [mod]:
            return build(mod, target)

        def begin(unit: IRModule) -> Future[tvm.runtime.Module]:
            return pool.submit(partial(compile_unit, write_unit(unit, target), request, on_log))

        with target, _workers(len(units)) as pool:
            first, *others = [one.result() for one in [begin(unit) for unit in units]]
        for other in others:
            first.import_module(other)
        return first

    with registered(_BUILD, build_units):
        yield


@contextmanager
def _workers(units: int) -> Iterator[WorkerPool]:
    """Give the workers that compile so many units."""
    count = min(max(1, len(usable_cpus())), _WORKERS_MAX, units)
    with ExitStack() as stack:
        server = stack.enter_context(closing(ForkServer([_WORKER]))) if Forks.available() else None
        workers = [Worker(_WORKER, server=server) for _ in range(count)]
        yield stack.enter_context(closing(WorkerPool(workers, "relaxtune-cuda")))


def _ask(worker: Worker, request: CubinRequest) -> bytes | None:
    """Return the cubin that a worker makes, None where it makes none."""
    try:
        value = worker.ask(request).value
    except WorkerError as e:
        logger.info("a kernel is compiled in this process: %s", e.short)
        return None
    return value if isinstance(value, bytes) else None


@cache
def _create() -> Callable[..., tvm.runtime.Module]:
    """Return TVM's function that compiles source. From now on a thread may keep the source instead.

    Other threads may build modules of their own at that moment.
    """
    create: Callable[..., tvm.runtime.Module] = tvm_ffi.get_global_func(_CREATE)

    def create_or_keep(source: bytes, form: str, functions: object, others: object) -> tvm.runtime.Module:
        written = getattr(_THREAD, "written", None)
        if written is None:
            return create(source, form, functions, others)
        written.append(UnitSource(bytes(source), str(form), functions))
        return create(b"", "cubin", functions, {})

    tvm_ffi.register_global_func(_CREATE, create_or_keep, override=True)
    return create


def split_units(mod: IRModule) -> list[IRModule]:
    """Return each kernel of a module as a module, those that take long first; the module itself if they are not many.

    The kernels of a table have numbers: each is of more rows than the one before it, and takes longer to compile.
    """
    kernels = sorted(mod.functions_items(), key=lambda item: item[0].name_hint)
    if len(kernels) < KERNELS_MIN:
        return [mod]

    def number(item: tuple[tvm.ir.GlobalVar, tvm.ir.BaseFunc]) -> int:
        numbered = _NUMBERED.search(item[0].name_hint)
        return int(numbered[1]) if numbered else 0

    kernels.sort(key=number, reverse=True)
    return [IRModule({var: kernel}, attrs=mod.attrs) for var, kernel in kernels]
