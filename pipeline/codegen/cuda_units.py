"""Many CUDA kernels compiled side by side: each a module with a cubin of its own.

NVRTC optimises the kernels of one source mostly one after another. TVM makes one source of all of a module's kernels,
which are many where sizes are symbolic (46 for BERT, 13 where they are known). Here each kernel is a source of its own,
and threads compile those: NVRTC and TVM's code generation let go of Python's lock. On many cores the longest kernel
then sets the time: NVRTC takes 2.5 s for BERT's, and took 5.8 s for the longest unit of six (2 cores). A unit more
costs 0.08 s of processor time: 37 s for all 46, in eight units of six 34 s. How kernels are dealt out depends on the
kernels alone, so that every machine makes the same cubins.

TVM writes source in Python, which does one thing at a time, and compiles it without. So one thread writes the sources,
one after another (1.4 s for BERT's), and others compile them. Threads that wrote as well waited for each other: 16 of
them took a third more processor time and changed places 33,000 times (2 cores).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm.ir import IRModule

from relaxtune.pipeline.codegen.cuda_compiler import registered
from relaxtune.schedules.begun import Begun, begun_work

#: Begins to compile a unit, for a target.
BeginUnit: TypeAlias = Callable[[Begun, IRModule, tvm.target.Target], Future[tvm.runtime.Module]]

_BUILD = "target.build.cuda"
# TVM's build ends with it: the source of all kernels, its format, what each takes. It compiles.
_CREATE = "ffi.Module.create.cuda"
# Its `written` takes what a thread writes, in the place of compiling it.
_THREAD = threading.local()
#: Modules of fewer kernels stay one unit, whose kernels NVRTC optimises side by side as far as it does.
KERNELS_MIN = 20
# TVM's names of the kernels of a function that has several: the first one has no number.
_NUMBERED = re.compile(r"_kernel_(\d+)$")


@contextmanager
def units_side_by_side() -> Iterator[BeginUnit]:
    """Make TVM compile the CUDA kernels of a module side by side inside the block; give what begins a unit."""
    build, create = tvm_ffi.get_global_func(_BUILD), _create()

    def write(unit: IRModule, target: tvm.target.Target) -> tuple[object, ...]:
        """Return what a module is made of, its source first."""
        _THREAD.written = written = list[tuple[object, ...]]()
        try:
            build(unit, target)
        finally:
            _THREAD.written = None
        return written[0]

    def begin_unit(begun: Begun, unit: IRModule, target: tvm.target.Target) -> Future[tvm.runtime.Module]:
        (kernel,) = unit.functions.values()
        return begun.begin("build", kernel, lambda: begun.pool.submit(create, *write(unit, target)))

    def build_units(mod: IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
        units = split_units(mod)
        if len(units) == 1:
            return build(mod, target)
        with target, begun_work() as begun:
            first, *others = [one.result() for one in [begin_unit(begun, unit, target) for unit in units]]
        for other in others:
            first.import_module(other)
        return first

    with registered(_BUILD, build_units):
        yield begin_unit


@cache
def _create() -> Callable[..., tvm.runtime.Module]:
    """Return TVM's function that compiles source. From now on a thread may keep the source instead.

    Other threads may build modules of their own at that moment.
    """
    create: Callable[..., tvm.runtime.Module] = tvm_ffi.get_global_func(_CREATE)

    def create_or_keep(*parts: object) -> tvm.runtime.Module:
        written = getattr(_THREAD, "written", None)
        if written is None:
            return create(*parts)
        written.append(parts)
        _, _, functions, _ = parts
        return create(b"", "cubin", functions, {})

    tvm_ffi.register_global_func(_CREATE, create_or_keep, override=True)
    return create


def split_units(mod: IRModule, *, apart: bool = False) -> list[IRModule]:
    """Return each kernel of a module as a module, those that take long first; the module itself if they are not many.

    The kernels of a table have numbers: each is of more rows than the one before it, and takes longer to compile.
    `apart` tells that the module is part of one with many.
    """
    kernels = sorted(mod.functions_items(), key=lambda item: item[0].name_hint)
    if len(kernels) < KERNELS_MIN and not apart:
        return [mod]
    kernels.sort(key=lambda item: _number(item[0].name_hint), reverse=True)
    return [IRModule({var: kernel}, attrs=mod.attrs) for var, kernel in kernels]


def _number(name: str) -> int:
    numbered = _NUMBERED.search(name)
    return int(numbered[1]) if numbered else 0
