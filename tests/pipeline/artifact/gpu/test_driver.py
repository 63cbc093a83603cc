"""What CUDA's driver is asked, by a library in its place that answers like it and notes what it was asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm

from relaxtune.pipeline.artifact.gpu import driver as driver_module
from relaxtune.pipeline.artifact.gpu.driver import Gpu, driver
from relaxtune.pipeline.errors import PipelineError

HIGH = 0x7F12_3456_789A_BC00
SOURCE = """
#include <stdint.h>
#include <stdio.h>
static uint64_t asked[8]; static int failure;
uint64_t noted(int number) { return asked[number]; }
void fail(int status) { failure = status; }
int cuInit(unsigned flags) { return failure; }
int cuDeviceGet(int* device, int number) { *device = 40 + number; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(0x7f0000000000 + device); return 0; }
int cuCtxSetCurrent(void* context) { asked[0] = (uint64_t)context; return 0; }
int cuCtxSynchronize(void) { asked[1]++; return failure; }
int cuStreamGetId(void* stream, unsigned long long* found) { *found = (uint64_t)stream + 1; return failure; }
int cuStreamIsCapturing(void* stream, int* status) { *status = stream == (void*)11; return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void* stream) {
  asked[2] = to; asked[3] = from; asked[4] = size; asked[5] = (uint64_t)stream; return failure;
}
int cuGraphLaunch(void* graph, void* stream) { asked[6] = (uint64_t)graph; asked[7] = (uint64_t)stream; return 0; }
int cuStreamBeginCapture_v2(void* stream, int mode) { return 0; }
int cuStreamEndCapture(void* stream, void** graph) { return 0; }
int cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) { return 0; }
int cuGraphDestroy(void* graph) { return 0; }
int cuGraphExecDestroy(void* graph) { return 0; }
int cudaPeekAtLastError(void) { return failure; }
int cudaGetLastError(void) { int last = failure; failure = 0; return last; }
int cuGetErrorString(int status, const char** text) {
  *text = status == 2 ? "out of memory" : status == 700 ? "an illegal memory access" : 0;
  return *text == 0;
}
"""

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libfake.so", folder / "driver.c"], check=True)
    return folder / "libfake.so"


@pytest.fixture
def gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    for name in ("DRIVER", "CUDART"):
        monkeypatch.setattr(driver_module, name, str(library))
    driver.cache_clear()
    driver_module._runtime.cache_clear()
    driver().noted.restype = driver_module.ctypes.c_uint64
    driver().fail(0)
    yield Gpu(tvm.cuda(2))
    driver().fail(0)
    driver.cache_clear()
    driver_module._runtime.cache_clear()


def test_addresses_and_handles_reach_the_driver_whole(gpu: Gpu) -> None:
    gpu.make_current()
    gpu.copy(HIGH, HIGH + 8, 2**33, HIGH + 16)
    gpu.launch(driver_module.ctypes.c_void_p(HIGH + 24), 0)
    assert [driver().noted(number) for number in (0, *range(2, 8))] == [
        *(0x7F0000000000 + 42, HIGH + 8, HIGH, 2**33, HIGH + 16, HIGH + 24, 0)
    ]
    gpu.copy(1, 2, 0, 3)  # nothing: the driver is not asked
    assert driver().noted(2) == HIGH + 8


def test_streams_have_an_identity_and_the_default_one_is_not_asked_for_its_own(gpu: Gpu) -> None:
    assert gpu.identity(HIGH) == HIGH + 1
    driver().fail(400)
    assert gpu.identity(0) == -1
    with pytest.raises(PipelineError, match=r"answer to cuStreamGetId is: an error it has no text for \(400\)"):
        gpu.identity(7)
    assert [gpu.is_capturing(stream) for stream in (11, 7)] == [True, False]


def test_a_wait_is_for_the_whole_gpu_and_a_driver_that_has_ended_has_no_work(gpu: Gpu) -> None:
    before = driver().noted(1)
    gpu.wait()
    driver().fail(4)
    gpu.wait()
    assert driver().noted(1) == before + 2
    driver().fail(700)
    with pytest.raises(PipelineError, match=r"answer to cuCtxSynchronize is: an illegal memory access \(700\)$"):
        gpu.wait()
    driver().fail(2)
    with pytest.raises(PipelineError, match=r"is: out of memory \(2\); `nvidia-smi` says which processes"):
        gpu.wait()


@pytest.mark.parametrize(("left", "no_memory_only", "stays"), [(900, True, 900), (900, False, 0), (2, True, 0)])
def test_runtimes_last_error_is_cleared(gpu: Gpu, left: int, no_memory_only: bool, stays: int) -> None:
    driver().fail(left)
    gpu.forget_error(no_memory_only=no_memory_only)
    assert driver().cudaPeekAtLastError() == stays
