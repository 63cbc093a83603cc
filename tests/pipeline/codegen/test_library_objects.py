from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import tvm_ffi.libinfo

from relaxtune.pipeline.codegen import library_objects
from relaxtune.pipeline.codegen.library_objects import compile_library_objects, list_library_sources
from relaxtune.pipeline.errors import LoweringError
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.libraries.cublaslt import CublasLt, CublasLtParameters
from relaxtune.schedules.libraries.cudnn_attention import CudnnAttention, CudnnAttentionParameters
from relaxtune.schedules.libraries.vendors import CUDNN, VENDOR_LIBRARIES
from relaxtune.schedules.targets import resolve_target
from tests.schedules.attention_cases import AttentionCase
from tests.schedules.templates.matmul_cases import MatmulCase

_NO_LIBRARY = 1
TARGET = "cuda:sm_90a"


def sources() -> list[Path]:
    """Return the sources of a matmul and an attention, each twice, and of a function that calls nothing."""
    func = MatmulCase((64,), 64, 64).func()
    matmul = CublasLt().apply(func, resolve_target(TARGET), CublasLtParameters())
    attention = attention_function(*AttentionCase(head_dim=64, dtype="float16").made())
    attended = CudnnAttention().apply(attention, resolve_target(TARGET), CudnnAttentionParameters())
    return list_library_sources([matmul, attended, matmul, func], "cuda")


def test_sources_are_found_once_and_only_where_a_library_is_called() -> None:
    assert [path.name for path in sources()] == ["cublaslt.c", "cudnn_attention.c"]
    assert list_library_sources([MatmulCase((64,), 64, 64).func()], "cuda") == []
    assert [path.name for path in list_library_sources([], "llvm")] == ["cpu_threads.c"]
    assert compile_library_objects([], Path("nowhere")) == []


def test_without_the_libraries_the_calls_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compile_library_objects(sources(), tmp_path)
    subprocess.run(["ld", "-shared", "-o", tmp_path / "call.so", *made], check=True)
    monkeypatch.setenv("RELAXTUNE_CUBLASLT", str(tmp_path / "missing.so"))
    monkeypatch.setenv("RELAXTUNE_CUDNN", str(tmp_path / "missing.so"))
    calls = ctypes.CDLL(str(tmp_path / "call.so"))
    nothing = ctypes.c_void_p(None)
    size = ctypes.c_int64(64)
    matmul = calls.relaxtune_cublaslt_matmul
    assert matmul(nothing, nothing, nothing, nothing, nothing, size, size, size, 0, 0, 0, 0, 0) == _NO_LIBRARY
    attention = calls.relaxtune_cudnn_attention
    assert attention(b"1 2 3", nothing, nothing, nothing, nothing, nothing) == _NO_LIBRARY


def test_sources_compile_without_warnings(tmp_path: Path) -> None:
    include = [f"-I{folder}" for folder in tvm_ffi.libinfo.include_paths()]
    for source in [*sources(), *list_library_sources([], "llvm")]:
        command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", *include, "-c", source, "-o", tmp_path / "made.o"]
        subprocess.run(command, check=True)


def test_a_missing_library_is_told_where_it_is_looked_for() -> None:
    for library in VENDOR_LIBRARIES:
        for part in (library.file, library.variable, library.distribution, "--routes library"):
            assert part in library.missing
    assert "9.10.2 or later" in CUDNN.missing


def test_a_missing_or_failing_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int main(")
    with pytest.raises(LoweringError, match=r"failed on broken\.c"):
        compile_library_objects([broken], tmp_path)
    monkeypatch.setattr(library_objects.cc, "get_cc", lambda: None)
    with pytest.raises(LoweringError, match=r"no C\+\+ compiler on the path to compile broken\.c"):
        compile_library_objects([broken], tmp_path)
