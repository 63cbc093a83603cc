"""Launch kernels one after another: what a module without a CUDA graph has to do.

Kernels with dependent launch (PTX's griddepcontrol) start while the one before them ends. Before they wait for it, they
read what no kernel of the graph writes, and attention writes results that no other kernel uses
(`pipeline.passes.weights.mark_constants`). That is true of one launch of a CUDA graph; of launches one by one, the
kernels of a run could overlap with those of the run before, and share the allocator's memory.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from relaxtune.schedules.marks import DEPENDENT_LAUNCH, LAUNCH_ATTR


def without_dependent_launch(mod: tvm.ir.IRModule) -> tvm.ir.IRModule:
    """Return the module with kernels that start when the one before has ended; what they compute stays."""
    result = tvm.ir.IRModule(dict(mod.functions_items()), attrs=mod.attrs, global_infos=mod.global_infos)
    for variable, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and function.attrs and LAUNCH_ATTR in function.attrs:
            kept = [str(tag) for tag in function.attrs[LAUNCH_ATTR] if str(tag) != DEPENDENT_LAUNCH]
            bare = function.without_attr(LAUNCH_ATTR)
            result[variable] = bare.with_attr(LAUNCH_ATTR, kept) if kept else bare
    return result
