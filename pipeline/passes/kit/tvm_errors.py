"""Lets through TVM what is no failure of a pass: an interrupt, an exit, and that the memory is full.

A pass written in Python is called by TVM, which hands on its errors by their names. It does not know those of Ctrl-C,
of SIGTERM, of a handler that calls `sys.exit` and of NumPy's lack of memory, and made a RuntimeError of each. Of a lack
of memory of its own it makes an InternalError. The compile went on without the pass.
"""

from __future__ import annotations

import numpy as np  # noqa: F401  its MemoryError is one of those below
import tvm
import tvm_ffi


class _Exit(SystemExit):
    """A `sys.exit` that TVM hands on as its text."""

    def __init__(self, text: str) -> None:
        super().__init__(int(text) if text.lstrip("-").isdecimal() else text or None)


class _Internal(tvm.error.InternalError):  # type: ignore[misc]
    """What TVM calls an error of its own: a lack of memory is one too."""

    def __new__(cls, text: str) -> BaseException:  # type: ignore[misc]
        """Return the error that it is."""
        return MemoryError(text) if text == "std::bad_alloc" else tvm.error.InternalError(text)


# Each name has the last class that is registered with it.
for _name, _kinds in (
    ("KeyboardInterrupt", (KeyboardInterrupt,)),
    ("SystemExit", (SystemExit, _Exit)),
    ("MemoryError", (*MemoryError.__subclasses__(), MemoryError)),
    ("InternalError", (_Internal,)),
):
    for _kind in _kinds:
        tvm_ffi.register_error(_name, _kind)
