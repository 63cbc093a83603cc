"""How many CPU threads a compiled module computes with.

Code for a CPU brings its own launcher of parallel loops (`pipeline.codegen.library_objects`): one pool of threads for
the whole process. Code of earlier versions, and code that TVM compiles and runs in one process, uses TVM's: a pool for
each calling thread. Left alone, such a pool takes half of the logical CPUs (TVM assumes two hardware threads a core, so
a virtual machine with two single-thread cores gets one worker) and pins the calling thread to as many CPUs: whatever
that thread starts afterwards, ONNX Runtime's workers for example, inherits the pin and shares one core. Hence it is set
by hand, before the first kernel runs in a thread.
"""

from __future__ import annotations

import logging
import os
import threading

import tvm_ffi

from relaxtune.pipeline.tvm_runtime.library import runtime_function
from relaxtune.schedules.targets.host import physical_cores, usable_cpus

logger = logging.getLogger(__name__)

# ThreadGroup::kSpecifyThreadShareAllCore: workers and caller may run on all the CPUs given, none is pinned to one.
_SHARE_ALL_CPUS = -3
_SETTER = "relaxtune_cpu_threads"

_configured = threading.local()


def default_threads() -> int:
    """Return the threads used by default: `$TVM_NUM_THREADS`, else one for each physical core this process may use."""
    wanted = os.environ.get("TVM_NUM_THREADS", "").strip()
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else physical_cores()


def set_threads(code: tvm_ffi.Module, count: int) -> bool:
    """Set the threads that compiled code runs its loops on; return False where it uses TVM's pools."""
    if not code.implements_function(_SETTER, query_imports=True):
        return False
    code.get_function(_SETTER, query_imports=True)(count)
    return True


def configure_threads(count: int | None = None) -> int:
    """Set the calling thread's TVM pool to `count` threads (default: `default_threads`); return what it really has.

    Fewer than asked for are given when code of this thread used TVM's pool before, since a pool never grows.
    """
    wanted = count if count is not None else default_threads()
    known = getattr(_configured, "threads", None)
    if known is not None and known[0] == wanted:
        return int(known[1])
    cpus = [str(cpu) for cpu in usable_cpus()]
    runtime_function("runtime.config_threadpool")(_SHARE_ALL_CPUS, wanted, cpus)
    got = int(runtime_function("runtime.NumThreads")())
    if got < wanted:
        logger.warning("TVM's thread pool has %d threads where %d were asked for; it was started before", got, wanted)
    _configured.threads = (wanted, got)
    return got
