"""Errors that are faults of the machine: a full disk, no memory, too many files or processes, a killed tool.

They tell nothing about the kernel at hand. Errors come as texts: from a child, from a compiler, through TVM.
"""

from __future__ import annotations

import errno
import os
import re
import signal

# Texts of operating-system errors: disk full, I/O error, process or file limit reached.
_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
# Of Python and NumPy, of C++, of LLVM, GCC, NVRTC and CUDA's driver, of CUDA's runtime, of ld, and of the system.
_MEMORY = (
    r"\b_?(Array)?MemoryError\b",
    r"std::bad_alloc",
    r"(?i:out[ _]of[ _]memory)",
    r"cudaErrorMemoryAllocation",
    r"(?i:memory exhausted)",
    re.escape(os.strerror(errno.ENOMEM)),
)
# Messages of GCC's driver and nvcc about a part of theirs.
_KILLED_PART = (r"Killed signal terminated", r"died due to signal (9|15)\b")
#: Signals that end a process from outside.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KILLED = "was killed from outside by"

_NO_MEMORY = re.compile("|".join(_MEMORY))
_OTHER = re.compile(
    "|".join([*(re.escape(os.strerror(code)) for code in _SYSTEM), "can't start new thread", *_KILLED_PART, _KILLED])
)


def is_of_memory(error: str) -> bool:
    """Return whether an error text tells that memory is full, the host's or a device's."""
    return _NO_MEMORY.search(error) is not None


def is_of_the_machine(error: str) -> bool:
    """Return whether an error text tells of a fault of the machine."""
    return is_of_memory(error) or _OTHER.search(error) is not None


def how_it_failed(name: str, returncode: int, said: str) -> str:
    """Return how a compiler or linker failed: what it said, or which signal from outside ended it."""
    if -returncode in OUTSIDE:
        return f"{name} {_KILLED} {signal.Signals(-returncode).name}: {said.strip() or 'it said nothing'}"
    return f"{name} ended with status {returncode}: {said.strip()}"
