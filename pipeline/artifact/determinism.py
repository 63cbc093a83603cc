"""The promise of an artifact about equal bits: the same inputs give the same outputs, run after run, on one machine.

The promise rests on three things. The first two are looked up in the scheduled kernels:

- no atomic operation: their order is the hardware's, and floating point sums depend on it;
- no code from elsewhere: a vendor's library may choose its kernel or its order by what it finds at run time;
- every sum has a fixed order: loops over a reduction are serial, vectorised, or cut in parts by the schedule, whose
  sums are added in the order of the parts (shuffles and shared memory on a GPU, never whoever comes first). TVM's
  schedule primitives refuse to run a loop in parallel that several iterations of one sum are in.

On a CPU the number of threads does not matter either: a parallel loop hands whole iterations to threads, and what one
iteration computes does not depend on which thread has it. It does not hold from machine to machine: another processor
gets other code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, StringImm

from relaxtune.pipeline.artifact.entries import DeterminismEntry
from relaxtune.pipeline.artifact.kernel_choice import KernelChoice
from relaxtune.schedules.targets import ResolvedTarget
from relaxtune.tuning_db.records import Route

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


def describe_determinism(
    kernels: Mapping[str, tirx.PrimFunc], choices: Sequence[KernelChoice], target: ResolvedTarget
) -> DeterminismEntry:
    """Return the promise that can be made for scheduled kernels, by their names."""
    atomic = sorted(name for name, func in kernels.items() if uses_atomics(func))
    library = sorted(choice.function for choice in choices if choice.route is Route.LIBRARY)
    reasons = []
    if atomic:
        reasons.append(f"no promise: atomic operations in {', '.join(atomic)}")
    if library:
        reasons.append(
            f"no promise: a library's kernels in {', '.join(library)}, which give the same bits only with the same "
            "library version, GPU and stream, by their vendor's word"
        )
    if reasons:
        return DeterminismEntry(False, None if target.kind == "cuda" else False, tuple(reasons))
    held = [f"no atomic operation in {len(kernels)} kernels", "no kernel of a library", "a fixed order of every sum"]
    if target.kind == "cuda":
        return DeterminismEntry(True, None, tuple(held))
    held.append("parallel loops hand whole iterations to threads, so their number does not matter")
    return DeterminismEntry(True, True, tuple(held))
