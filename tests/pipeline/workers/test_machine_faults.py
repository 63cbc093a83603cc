"""Errors of the machine are told from errors of a kernel by their texts."""

from __future__ import annotations

import signal

import pytest

from relaxtune.pipeline.workers.machine_faults import how_it_failed, is_of_memory, is_of_the_machine

MEMORY = [
    "Traceback (most recent call last):\n  File ...\nMemoryError",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 16.0 EiB for an array with shape (...)",
    "tvm.error.InternalError: std::bad_alloc",
    "the process died of signal SIGABRT; it wrote last:\nLLVM ERROR: out of memory\nAllocation failed",
    "nvrtc did not compile the kernels for sm_90a:\nNVRTC_ERROR_OUT_OF_MEMORY",
    "CUDA: Check failed: e == cudaSuccess: cudaErrorMemoryAllocation",
    "CUDAError: cuModuleLoadData(...) failed with error: CUDA_ERROR_OUT_OF_MEMORY",
    "cc1plus: out of memory allocating 65536 bytes",
    "ld ended with status 1: ld: final link failed: memory exhausted",
    "OSError: [Errno 12] Cannot allocate memory",
]
OTHERS = [
    "OSError: [Errno 28] No space left on device: 'candidate.o'",
    "OSError: [Errno 24] Too many open files",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "RuntimeError: can't start new thread",
    "c++: fatal error: Killed signal terminated program cc1plus",
    "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
    how_it_failed("ld", -signal.SIGKILL, ""),
    how_it_failed("nvcc", -signal.SIGTERM, "half a line"),
]
KERNELS = [
    "ptxas error   : Entry function 'main_kernel' uses too much shared data (0x40000 bytes, 0x38c00 max)",
    "CUDAError: cuLaunchKernel failed with error: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA: an illegal memory access was encountered",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "tvm.error.ScheduleError: the memory scope of the block is not shared",
    "the process died of signal SIGSEGV",
    how_it_failed("ld", 1, "undefined reference to `erff'"),
    how_it_failed("nvcc", -signal.SIGSEGV, ""),
]


@pytest.mark.parametrize("error", MEMORY)
def test_full_memory_is_known_in_each_tool_s_words(error: str) -> None:
    assert is_of_memory(error)
    assert is_of_the_machine(error)


@pytest.mark.parametrize("error", OTHERS)
def test_other_faults_of_the_machine_are_known(error: str) -> None:
    assert is_of_the_machine(error)
    assert not is_of_memory(error)


@pytest.mark.parametrize("error", KERNELS)
def test_a_fault_of_a_kernel_is_none_of_the_machine(error: str) -> None:
    assert not is_of_the_machine(error)
