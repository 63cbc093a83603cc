"""The identity of a kernel: a hash of the code that an artifact holds, as a short text.

A record keeps the hash of the kernel that was measured, and an artifact those of the kernels it holds. A decision makes
a kernel through templates, schedule rules and default schedules; when one of them changes, the same decision may make
another kernel. Its hash then differs from the record's, and the record is measured again. Fallbacks go the same way.

The hash is taken after `finish_kernels`. Later changes of a module without a CUDA graph (how kernels are
launched, `pipeline.codegen.cuda_graph`) take no part.
"""

from __future__ import annotations

import hashlib

import tvm
import tvm_ffi
from tvm import tirx

from relaxtune.pipeline.codegen.finish import finish_kernels
from relaxtune.schedules.marks import INCIDENTAL_ATTRS, SCHEDULED_ATTR

# No code depends on them. The function of a tuning task does not have them all.
_NOT_THE_KERNEL = (*INCIDENTAL_ATTRS, SCHEDULED_ATTR)
# A hash of finished code: this letter, no hexadecimal digit, and 60 bits. Earlier hashes are 64 bits and no letter.
_CODE = "k"
_BITS = 60
#: Target kind -> version of what happens to kernels from `finish_kernels` on, which no hash of TIR sees: raise it with
#: every change there that changes code. `tests/pipeline/codegen/test_code_generation.py` fails where that is due.
CODE_GENERATION = {"llvm": 2, "cuda": 1}
_FIRST = 1


def kernel_hash(finished: tirx.PrimFunc, kind: str) -> str:
    """Return the hash of a kernel that `finish_kernels` made ready for a kind of targets, as 16 characters.

    The function's name takes no part. It holds for one version of TVM, as workload hashes do.
    """
    number, version = _structure(finished), CODE_GENERATION.get(kind, _FIRST)
    if version != _FIRST:
        number = int(hashlib.sha256(f"{number} {version}".encode()).hexdigest(), 16)
    return f"{_CODE}{number % 2**_BITS:015x}"


def made_hash(scheduled: tirx.PrimFunc, target: tvm.target.Target) -> str:
    """Return the hash of the kernel that a scheduled function becomes.

    Raises `LoweringError`: see `finish_kernels`.
    """
    return kernel_hash(_finish(scheduled, target), target.kind.name)


def is_kernel(recorded: str, scheduled: tirx.PrimFunc, target: tvm.target.Target) -> bool:
    """Return whether a scheduled function becomes the kernel whose hash a record keeps.

    Earlier records keep the hash of the scheduled function; those of fallbacks, of the finished one. They hold as long
    as code generation is what it was then.

    Raises `LoweringError`: see `finish_kernels`.
    """
    finished = _finish(scheduled, target)
    if recorded.startswith(_CODE):
        return recorded == kernel_hash(finished, target.kind.name)
    before = {f"{_structure(func) % 2**64:016x}" for func in (scheduled, finished)}
    return recorded in before and CODE_GENERATION.get(target.kind.name, _FIRST) == _FIRST


def _finish(scheduled: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    return finish_kernels(tvm.IRModule({"main": scheduled}), target)["main"]


def _structure(func: tirx.PrimFunc) -> int:
    for name in _NOT_THE_KERNEL:
        if func.attrs is not None and name in func.attrs:
            func = func.without_attr(name)
    return int(tvm_ffi.structural_hash(func, map_free_vars=True))
