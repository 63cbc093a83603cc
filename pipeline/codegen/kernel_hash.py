"""What a scheduled kernel is, as a short text: equal texts are equal kernels.

A record keeps that of the kernel that was measured, and an artifact those of the kernels it holds. So a record whose
decision makes another kernel by now, since a template or a schedule rule changed, is told from one that still holds.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from relaxtune.schedules.marks import SCHEDULED_ATTR

# What says how a function is called and how far it has come, not what it computes and how.
_NOT_THE_KERNEL = ("global_symbol", SCHEDULED_ATTR)
_BITS = 64


def kernel_hash(scheduled: tirx.PrimFunc) -> str:
    """Return the structural hash of a scheduled PrimFunc as 16 hexadecimal digits; its name takes no part.

    It holds for one version of TVM, as workload hashes do. Code generation is a function of the kernel, the target and
    the versions of the environment.
    """
    for name in _NOT_THE_KERNEL:
        if scheduled.attrs is not None and name in scheduled.attrs:
            scheduled = scheduled.without_attr(name)
    return f"{tvm_ffi.structural_hash(scheduled, map_free_vars=True) % 2**_BITS:016x}"
