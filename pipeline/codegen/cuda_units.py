"""Many CUDA kernels compiled side by side: each a module with a cubin of its own.

NVRTC optimises the kernels of one source mostly one after another. TVM makes one source of all of a module's kernels,
which are many where sizes are symbolic (46 for BERT, 13 where they are known). Here each kernel is a source of its own,
and threads compile those: NVRTC and TVM's code generation let go of Python's lock. On many cores the longest kernel
then sets the time: NVRTC takes 2.5 s for BERT's, and took 5.8 s for the longest unit of six (2 cores). A unit more
costs 0.08 s of processor time: 37 s for all 46, in eight units of six 34 s. How kernels are dealt out depends on the
kernels alone, so that every machine makes the same cubins.

TVM writes source in Python, with a call of its own code every few microseconds, each of which lets go of the lock. So
one thread at a time writes source, while the others are in NVRTC: 16 threads that wrote side by side took a third more
processor time and changed places 33,000 times (2 cores, the sources of BERT's 44 units: 1.9 s, one by one 1.4 s).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
import tvm_ffi
from tvm.ir import IRModule

from relaxtune.pipeline.codegen.cuda_compiler import COMPILE_CALLBACK, registered
from relaxtune.schedules.side_by_side import map_side_by_side

_BUILD = "target.build.cuda"
# Modules of fewer kernels stay one unit, whose kernels NVRTC optimises side by side as far as it does.
_KERNELS_MIN = 20
# TVM's names of the kernels of a function that has several: the first one has no number.
_NUMBERED = re.compile(r"_kernel_(\d+)$")


@contextmanager
def units_side_by_side() -> Iterator[None]:
    """Make TVM compile the CUDA kernels of a module side by side inside the block."""
    build, compile_source = tvm_ffi.get_global_func(_BUILD), tvm_ffi.get_global_func(COMPILE_CALLBACK)
    writing = threading.Lock()

    def build_unit(unit: IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
        with writing:
            return build(unit, target)

    def compile_unit(code: str) -> bytes:
        # The build that calls this has written its source: it is another's turn.
        writing.release()
        try:
            cubin: bytes = compile_source(code)
            return cubin
        finally:
            writing.acquire()

    def build_units(mod: IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
        with target:
            first, *others = map_side_by_side(lambda unit: build_unit(unit, target), split_units(mod))
        for other in others:
            first.import_module(other)
        return first

    with registered(_BUILD, build_units), registered(COMPILE_CALLBACK, compile_unit):
        yield


def split_units(mod: IRModule) -> list[IRModule]:
    """Return each kernel of a module as a module, those that take long first; the module itself if they are not many.

    The kernels of a table have numbers: each is of more rows than the one before it, and takes longer to compile.
    """
    kernels = sorted(mod.functions_items(), key=lambda item: item[0].name_hint)
    if len(kernels) < _KERNELS_MIN:
        return [mod]
    kernels.sort(key=lambda item: _number(item[0].name_hint), reverse=True)
    return [IRModule({var: kernel}, attrs=mod.attrs) for var, kernel in kernels]


def _number(name: str) -> int:
    numbered = _NUMBERED.search(name)
    return int(numbered[1]) if numbered else 0
