from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tvm.backend.cuda.codegen.header import header_generator

from relaxtune.pipeline.codegen import cubins, cuda_source
from relaxtune.pipeline.codegen.cubins import (
    FAST_MATH,
    CompileOptions,
    compile_with_nvcc,
    compile_with_nvrtc,
    uses_fast_math,
)
from relaxtune.pipeline.codegen.cuda_compiler import TOOLKIT, CubinRequest, find_toolchain
from relaxtune.pipeline.codegen.cuda_source import DeviceSource, prepare_source
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.workers.machine_faults import is_of_memory
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.codegen.cubins import machine_code

KERNEL = """
extern "C" __global__ void kernel(half* __restrict__ out, float* __restrict__ a, int64_t n) {
  if (threadIdx.x < n) out[threadIdx.x] = __float2half(a[threadIdx.x] / a[threadIdx.x + 1] - INFINITY);
}
"""
# Every name that TVM's prologue takes from type_traits, on types of each kind.
TRAITS = """
enum Kind { one };
template <class T> __device__ int flags() {
  return std::is_integral<T>::value + 2 * std::is_signed<T>::value + 4 * std::is_unsigned<T>::value
    + 8 * std::is_floating_point<T>::value + 16 * std::is_same_v<T, int> + 32 * std::is_same<T, const T>::value
    + 64 * int(sizeof(typename std::conditional<std::is_integral<T>::value, char, T*>::type));
}
template <class T> __device__ typename std::enable_if<std::is_integral<T>::value, int>::type pick(T) { return 1; }
template <class T> __device__ typename std::enable_if<!std::is_integral<T>::value, int>::type pick(T) { return 2; }
extern "C" __global__ void kernel(int* out) {
  out[0] = flags<int>(); out[1] = flags<const int>(); out[2] = flags<bool>(); out[3] = flags<char>();
  out[4] = flags<volatile unsigned long long>(); out[5] = flags<float>(); out[6] = flags<const double>();
  out[7] = flags<int*>(); out[8] = flags<Kind>(); out[9] = flags<__int128_t>(); out[10] = flags<unsigned char>();
  out[11] = flags<float4>(); out[12] = pick(1) + 4 * pick(1.0f); out[13] = flags<wchar_t>(); out[14] = flags<void>();
}
""".replace("flags<void>()", "flags<signed char>()")


def header(*tags: str) -> str:
    return str(header_generator(list(tags)))


def options(*, fast_math: bool = False) -> CompileOptions:
    root = find_toolchain().root / "include"
    return CompileOptions(tuple(folder for folder in (root, root / "cccl") if folder.is_dir()), fast_math)


@pytest.mark.parametrize("code", [header("fp16") + KERNEL, header() + TRAITS], ids=["half", "traits"])
def test_light_headers_give_the_machine_code_of_the_real_ones(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare_source(code).headers
    light = machine_code(compile_with_nvrtc(code, "sm_90a", options()))
    monkeypatch.setattr(cubins, "prepare_source", lambda text: DeviceSource(prepare_source(text).code, {}))
    assert machine_code(compile_with_nvrtc(code, "sm_90a", options())) == light
    assert set(light) == {"kernel"}


def test_kernels_optimised_side_by_side_have_the_same_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = KERNEL.partition(" {")[0] + ";"
    code = header("fp16") + declared + KERNEL + KERNEL.replace(" kernel(", " other(").replace("threadIdx.x + 1", "0")
    assert len(cubins._KERNEL.findall(code)) == 2
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(cubins.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found.append(machine_code(compile_with_nvrtc(code, "sm_90a", options())))
    assert found[0] == found[1]
    assert set(found[0]) == {"kernel", "other"}


@pytest.mark.parametrize(
    "tags", [("bf16", "fp16"), ("fp8", "fp16", "bf16"), ("math_constants", "warp_shuffle"), ("int8",)]
)
def test_every_header_block_compiles(tags: tuple[str, ...]) -> None:
    code = header(*tags) + 'extern "C" __global__ void kernel(int* x) { x[0] += 1; }'
    assert "kernel" in machine_code(compile_with_nvrtc(code, "sm_90a", options()))


def test_barriers_are_dropped_when_nothing_uses_them() -> None:
    block = header("cuda/barrier", "cooperative_groups")
    source = prepare_source(block + KERNEL)
    assert "#include <cuda/barrier>" not in source.code
    assert source.headers
    used = prepare_source(block + "__shared__ cuda::barrier<cuda::thread_scope_block> b;")
    assert "#include <cuda/barrier>" in used.code
    assert not used.headers


def test_other_headers_of_libcu_take_the_real_type_traits() -> None:
    assert not prepare_source(header() + "#include <cuda/std/array>\n").headers


def test_tensor_maps_have_the_size_of_the_drivers() -> None:
    code = header() + 'static_assert(sizeof(CUtensorMap) == 128 && alignof(CUtensorMap) == 64, "");'
    compile_with_nvrtc(code + KERNEL.replace("half", "float").replace("__float2float", ""), "sm_90a", options())


# Sums in a register array, in a loop and in a branch, through a function that takes references.
ARRAYS = """
__forceinline__ __device__ void pin(float& value) { asm volatile("" : "+f"(value) :: "memory"); }
extern "C" __global__ void kernel(float* __restrict__ x, int n);
extern "C" __global__ void kernel(float* __restrict__ x, int n) {
  alignas(64) float sums_ptr[16];
  alignas(64) float few[2];
  few[0] = x[0];
  BEGIN
  for (int i = 0; i < n; ++i) {
    ADD
    if (x[i] < 0) { PIN }
  }
  x[threadIdx.x] = TOTAL + few[0];
}
""".replace("BEGIN", "".join(f"sums_ptr[{i}] = 0.0f;\n" for i in range(16)))
ARRAYS = ARRAYS.replace("ADD", "".join(f"sums_ptr[{i}] = (sums_ptr[{i}] + x[i * {i + 2}]);\n" for i in range(16)))
ARRAYS = ARRAYS.replace("PIN", "".join(f"pin(sums_ptr[{i}]);" for i in range(16)))
ARRAYS = ARRAYS.replace("TOTAL", " * ".join(f"sums_ptr[{i}]" for i in range(16)))


def test_large_arrays_of_registers_are_variables_with_the_same_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_source(ARRAYS).code
    assert "sums_ptr[" not in prepared
    assert "alignas(64) float few[2];" in prepared
    made = machine_code(compile_with_nvrtc(ARRAYS, "sm_90a", options()))
    monkeypatch.setattr(cuda_source, "_ELEMENTS_MIN", 17)
    assert "alignas(64) float sums_ptr[16];" in prepare_source(ARRAYS).code
    assert machine_code(compile_with_nvrtc(ARRAYS, "sm_90a", options())) == made


@pytest.mark.parametrize(
    "use",
    [
        "x[1] = sums_ptr[n];",
        "x[1] = *(sums_ptr + 1);",
        "*(float4*)(&sums_ptr[4]) = *(float4*)x;",
        "*(float4*)(&(sums_ptr[4])) = *(float4*)x;",
        "{\n  alignas(64) half sums_ptr[2];\n  sums_ptr[0] = x[1];\n  }",
        "x[1] = sums_ptr[17];",
    ],
    ids=["index", "pointer", "address", "address in brackets", "declared again", "beyond the end"],
)
def test_arrays_that_are_used_otherwise_than_by_element_stay(use: str) -> None:
    code = ARRAYS.replace("few[0] = x[0];", f"few[0] = x[0];\n  {use}")
    assert use in code
    assert code in prepare_source(code).code


def test_arrays_of_one_name_in_two_kernels_are_looked_at_apart() -> None:
    other = ARRAYS[ARRAYS.index('extern "C"') :].replace(" kernel(", " other(")
    code = ARRAYS + other.replace("few[0] = x[0];", "x[1] = sums_ptr[n];")
    first, _, second = prepare_source(code).code.rpartition('extern "C"')
    assert ("sums_ptr[" in first, "sums_ptr[" in second) == (False, True)


def test_fast_math_is_an_attribute_of_the_target_and_changes_division() -> None:
    plain = resolve_target("cuda:sm_90a").target
    fast = resolve_target(f'{{"kind": "cuda", "arch": "sm_90a", "{FAST_MATH}": true}}').target
    assert (uses_fast_math(plain), uses_fast_math(fast)) == (False, True)
    assert FAST_MATH in str(fast)
    code = header("fp16") + KERNEL
    exact = machine_code(compile_with_nvrtc(code, "sm_90a", options()))["kernel"]
    approximate = machine_code(compile_with_nvrtc(code, "sm_90a", options(fast_math=True)))["kernel"]
    assert len(approximate) < len(exact)


def test_a_compile_error_is_shown() -> None:
    with pytest.raises(LoweringError, match=r"nvrtc did not compile the kernels for sm_90a:(.|\n)*no_such_name"):
        CubinRequest("__global__ void broken() { no_such_name(); }", "sm_90a", find_toolchain()).compile()


def test_a_compile_error_is_shown_before_the_warnings_that_come_after_it() -> None:
    unused = "\n".join(f"static __device__ int unused_{number}() {{ return 0; }}" for number in range(20))
    with pytest.raises(LoweringError, match=r"sm_90a:\n.*error.*no_such_name(.|\n)*1 error detected"):
        CubinRequest("__global__ void broken() { no_such_name(); }\n" + unused, "sm_90a", find_toolchain()).compile()


def test_full_memory_is_told_although_the_log_holds_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    compile_program = nvrtc.nvrtcCompileProgram

    def without_memory(*arguments: object) -> tuple[object]:
        compile_program(*arguments)
        return (nvrtc.nvrtcResult.NVRTC_ERROR_OUT_OF_MEMORY,)

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", without_memory)
    unused = "\n".join(f"static __device__ int unused_{number}() {{ return 0; }}" for number in range(20))
    with pytest.raises(LoweringError, match=r"sm_90a:\nerror: NVRTC_ERROR_OUT_OF_MEMORY(.|\n)*unused") as caught:
        CubinRequest(unused, "sm_90a", find_toolchain()).compile()
    assert is_of_memory(str(caught.value))


@pytest.mark.skipif(not (TOOLKIT / "bin" / "nvcc").is_file(), reason="needs nvcc")
def test_nvcc_compiles_the_same_source() -> None:
    nvcc = TOOLKIT / "bin" / "nvcc"
    folder = TOOLKIT / "include"
    code = header("fp16") + KERNEL
    assert set(machine_code(compile_with_nvcc(code, "sm_90a", nvcc, CompileOptions((folder, folder / "cccl"))))) == {
        "kernel"
    }
    with pytest.raises(LoweringError, match=r"nvcc did not compile the kernels for sm_90a:(.|\n)*no_such_name"):
        compile_with_nvcc("__global__ void broken() { no_such_name(); }", "sm_90a", nvcc, CompileOptions((folder,)))


def test_nvcc_that_cannot_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"nvcc \(.*\) could not be run"):
        compile_with_nvcc(KERNEL, "sm_90a", tmp_path / "nvcc", CompileOptions(()))
