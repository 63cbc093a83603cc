"""Threads of this process that compute while none should: pools that spin after a call.

Workers of TVM's thread pool spin after a call, for as long as 300,000 pauses take: 60 ms on an Intel Xeon with AMX. An
arm of another process, such as ONNX Runtime's, waits until they sleep; beside them it took up to three times as long.
Then it runs untimed for as long as it takes until its own threads are awake, each on a core.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

# Seconds between two looks for such threads, and of all looks.
_LOOK_S = 0.002
SPIN_S = 0.5


def wait_until_idle() -> float:
    """Wait until no other thread of this process computes, half a second at most; return the seconds.

    Where the system does not tell of threads (it is not Linux), nothing is waited for.
    """
    waited_s = 0.0
    while waited_s < SPIN_S and _others_compute():
        time.sleep(_LOOK_S)
        waited_s += _LOOK_S
    return waited_s


def _others_compute() -> bool:
    """Return whether another thread has a processor, or waits for one."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("[0-9]*"):
        # The state follows the name, which may hold any character but is in parentheses.
        with suppress(FileNotFoundError, ProcessLookupError):
            if task.name != own and (task / "stat").read_text(errors="replace").rpartition(") ")[2][0] == "R":
                return True
    return False
