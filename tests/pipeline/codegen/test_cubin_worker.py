"""Cubins made by workers: the same as here, and made here where a worker is lost or the source is bad."""

from __future__ import annotations

import os
import signal

import pytest
import tvm

from relaxtune.pipeline.codegen import cuda_compiler, cuda_units
from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest, find_toolchain
from relaxtune.pipeline.codegen.finish import device_toolchain
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.workers.worker import Worker
from tests.pipeline.codegen.test_cuda_units import TARGET, scaled

SOURCE = 'extern "C" __global__ void one(float* x) { *x += 1.0f; }'


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[CubinRequest]:
    """What this process compiles. Two kernels are many."""
    found: list[CubinRequest] = []
    compile_here = CubinRequest.compile
    monkeypatch.setattr(CubinRequest, "compile", lambda one, log=None: found.append(one) or compile_here(one, log))
    monkeypatch.setattr(cuda_units, "KERNELS_MIN", 2)
    monkeypatch.setattr(cuda_units, "_CUBINS", {})
    return found


def count_units() -> int:
    with device_toolchain(TARGET), TARGET:
        (first,) = tvm.compile(scaled(3), TARGET).mod.imports
    return 1 + len(first.imports)


def test_workers_make_the_cubins_that_this_process_makes(
    here: list[CubinRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = cuda_units._ask
    answers: list[tuple[CubinRequest, bytes | None]] = []

    def ask_and_keep(worker: Worker, request: CubinRequest) -> bytes | None:
        answers.append((request, ask(worker, request)))
        return answers[-1][1]

    monkeypatch.setattr(cuda_units, "_ask", ask_and_keep)
    assert count_units() == len(answers) == 3
    assert not here
    assert all(cubin == request.compile() for request, cubin in answers)


def test_a_kernel_that_no_worker_compiles_is_compiled_here(
    here: list[CubinRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_units, "_ask", lambda _worker, _request: None)
    assert count_units() == len(here) == 3


def test_a_lost_worker_costs_no_kernel(here: list[CubinRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    ask = cuda_units._ask
    lost: list[CubinRequest] = []

    def kill_and_ask(worker: Worker, request: CubinRequest) -> bytes | None:
        if not lost and worker.pid:
            lost.append(request)
            os.kill(worker.pid, signal.SIGKILL)
        return ask(worker, request)

    monkeypatch.setattr(cuda_units, "_ask", kill_and_ask)
    assert count_units() == 3
    assert lost


def test_the_error_of_the_compiler_is_the_compilations(
    here: list[CubinRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_request: CubinRequest, _log: object = None) -> bytes:
        raise LoweringError("nvrtc did not compile the kernels")

    monkeypatch.setattr(CubinRequest, "compile", refuse)
    monkeypatch.setattr(cuda_units, "_ask", lambda _worker, _request: None)
    with device_toolchain(TARGET), TARGET, pytest.raises(RuntimeError, match="did not compile the kernels"):
        tvm.compile(scaled(3), TARGET)


def test_a_worker_compiles_requests_alone() -> None:
    compile_request = cuda_compiler.start()
    request = CubinRequest(SOURCE, "sm_90a", find_toolchain(), False, False)
    assert compile_request(request) == request.compile()
    with pytest.raises(TypeError, match="expected a CubinRequest, got str"):
        compile_request(SOURCE)
