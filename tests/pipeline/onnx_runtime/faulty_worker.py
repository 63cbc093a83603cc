"""ONNX Runtime's process with a planted fault: where it is to load a graph with optimisations, or to run one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from relaxtune.pipeline.onnx_runtime import worker
from relaxtune.pipeline.onnx_runtime.requests import Level, Open, Run

FAULT = "RELAXTUNE_TEST_FAULT"


def start() -> Callable[[object], object]:
    """Return what answers, by the fault that the environment names: WHEN-HOW."""
    when, how = os.environ[FAULT].split("-")
    answer = worker.start()
    optimised: set[int] = set()

    def faulty(request: object) -> object:
        if isinstance(request, Open) and request.settings.level is not Level.NONE:
            optimised.add(request.session)
        meant = {
            "load": isinstance(request, Open) and (request.session in optimised),
            "run": isinstance(request, Run) and (request.session in optimised),
            "always": isinstance(request, Open),
        }
        if meant[when]:
            if how == "crash":
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGSEGV)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return answer(request)

    return faulty
