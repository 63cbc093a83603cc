"""Many CUDA kernels compiled side by side: as units of a few kernels, each a module with a cubin of its own.

NVRTC optimises the kernels of one source mostly one after another. TVM makes one source of all of a module's kernels,
which are many where sizes are symbolic (46 for two layers of BERT, 13 where they are known). Here they are dealt out to
units, and threads compile those: NVRTC and TVM's code generation let go of Python's lock. A unit more costs 0.13 s, for
the headers that each reads. How kernels are dealt out depends on the kernels alone, so that every machine makes the
same cubins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
import tvm_ffi
from tvm.ir import IRModule

from relaxtune.schedules.side_by_side import map_side_by_side

_BUILD = "target.build.cuda"
# Modules of fewer kernels stay one unit, whose kernels NVRTC optimises side by side as far as it does.
_UNIT_KERNELS, _KERNELS_MIN = 6, 20


@contextmanager
def units_side_by_side() -> Iterator[None]:
    """Make TVM compile the CUDA kernels of a module in units inside the block."""
    build = tvm_ffi.get_global_func(_BUILD)

    def build_units(mod: IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
        units = split_units(mod)
        if len(units) == 1:
            return build(mod, target)
        with target:
            first, *others = map_side_by_side(lambda unit: build(unit, target), units)
        for other in others:
            first.import_module(other)
        return first

    tvm_ffi.register_global_func(_BUILD, build_units, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(_BUILD, build, override=True)


def split_units(mod: IRModule) -> list[IRModule]:
    """Return the kernels of a module in units of a few, the module itself where they are not many.

    The kernels of a table follow one another, the small ones first; dealt out in turn, units take about as long.
    """
    kernels = sorted(mod.functions_items(), key=lambda item: item[0].name_hint)
    if len(kernels) < _KERNELS_MIN:
        return [mod]
    count = -(-len(kernels) // _UNIT_KERNELS)
    return [IRModule(dict(kernels[number::count]), attrs=mod.attrs) for number in range(count)]
