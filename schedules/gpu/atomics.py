"""Atomic operations in scheduled functions."""

from __future__ import annotations

import re

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, StringImm

# TVM's atomics, CUDA's functions, and the PTX instructions `atom` and `red` (not `reduce` or `redux`).
_ATOMIC = re.compile(r"atomic|\batom\.|\bred\.(async|shared|global|gpu|relaxed|release|sys)|cp\.reduce")


def uses_atomics(func: tirx.PrimFunc) -> bool:
    """Whether a scheduled function has an atomic operation: an intrinsic, or an inlined instruction."""
    # As one text: the parts of a PTX instruction are strings beside its name.
    calls: set[str] = set()

    def note(call: Call) -> None:
        parts = [str(argument.value) for argument in call.args if isinstance(argument, StringImm)]
        calls.add(".".join([str(getattr(call.op, "name", "")), *parts]))

    tvm_ffi.structural_walk(func.body, (Call, note))
    return any(_ATOMIC.search(text) for text in calls)
