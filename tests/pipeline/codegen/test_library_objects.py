from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from pipeline.codegen import library_objects
from pipeline.codegen.library_objects import compile_library_objects, list_library_sources
from pipeline.errors import LoweringError
from schedules.libraries.cublaslt import CublasLt, CublasLtParameters
from schedules.targets import resolve_target
from tests.schedules.templates.matmul_cases import MatmulCase

_NO_LIBRARY = 1


def sources() -> list[Path]:
    func = MatmulCase((64,), 64, 64).func()
    made = CublasLt().apply(func, resolve_target("cuda:sm_90a"), CublasLtParameters())
    return list_library_sources([made, made, func])


def test_sources_are_found_once_and_only_where_a_library_is_called() -> None:
    assert [path.name for path in sources()] == ["cublaslt.c"]
    assert list_library_sources([MatmulCase((64,), 64, 64).func()]) == []
    assert compile_library_objects([], Path("nowhere")) == []


def test_without_the_library_the_call_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = compile_library_objects(sources(), tmp_path)
    subprocess.run(["ld", "-shared", "-o", tmp_path / "call.so", made], check=True)
    monkeypatch.setenv("RELAXTUNE_CUBLASLT", str(tmp_path / "missing.so"))
    matmul = ctypes.CDLL(str(tmp_path / "call.so")).relaxtune_cublaslt_matmul
    nothing = ctypes.c_void_p(None)
    size = ctypes.c_int64(64)
    assert matmul(nothing, nothing, nothing, nothing, nothing, size, size, size, 0, 0, 0, 0) == _NO_LIBRARY


def test_a_missing_or_failing_compiler_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int main(")
    with pytest.raises(LoweringError, match=r"failed on broken\.c"):
        compile_library_objects([broken], tmp_path)
    monkeypatch.setattr(library_objects.shutil, "which", lambda _name: None)
    with pytest.raises(LoweringError, match="no C compiler"):
        compile_library_objects([broken], tmp_path)
