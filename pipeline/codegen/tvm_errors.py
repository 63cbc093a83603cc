"""The exceptions that TVM raises where it cannot schedule, build or replay something."""

from __future__ import annotations

import tvm

# TVM's own errors share no base class; those raised through its C++ side arrive as Python's built-in ones. Its
# TypeErrors and AttributeErrors are left out: here they are slips of code of ours, which nobody must take for a kernel
# that cannot be made.
TVM_ERRORS = (tvm.error.InternalError, tvm.s_tir.ScheduleError, RuntimeError, ValueError, LookupError)
