from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.codegen import cuda_compiler, cuda_libraries
from relaxtune.pipeline.codegen.cuda_compiler import COMPILE_CALLBACK, CompilerKind, CubinRequest, find_toolchain
from relaxtune.pipeline.codegen.cuda_libraries import load_library, pypi_folders, pypi_root
from relaxtune.pipeline.errors import ArtifactError, LoweringError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.schedules.targets import portable_host, resolve_target

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
EM_CUDA = 190


def elf_images(data: bytes) -> list[bytes]:
    """Return what follows each ELF magic in `data`."""
    starts = [i for i in range(len(data)) if data.startswith(b"\x7fELF", i)]
    return [data[start:] for start in starts]


def elf_machine(image: bytes) -> int:
    """Return e_machine of an ELF header: 62 is x86-64, 190 NVIDIA CUDA (ELF registry)."""
    return int.from_bytes(image[18:20], "little")


@pytest.fixture(scope="module")
def cuda_artifact(bert_tiny: OnnxModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = resolve_target("cuda:sm_90a")
    compiled = compile_module(lower(import_model(bert_tiny), target.target), (), target)
    directory = tmp_path_factory.mktemp("cuda") / "bert-tiny"
    write_artifact(compiled, directory)
    return directory


def test_artifact_embeds_a_cubin_and_no_source(cuda_artifact: Path) -> None:
    data = (cuda_artifact / "model.so").read_bytes()
    cubins = [image for image in elf_images(data) if elf_machine(image) == EM_CUDA]
    assert len(cubins) == 1
    assert b"sm_90a" in cubins[0]
    assert b"__global__" not in data
    assert b'extern "C"' not in data


def test_artifact_says_what_it_needs(cuda_artifact: Path) -> None:
    from relaxtune.pipeline.artifact.directory import verify_artifact

    target = verify_artifact(cuda_artifact).target
    assert (target.kind, target.arch, target.cuda_graph) == ("cuda", "sm_90a", True)
    assert target.libraries == ("libcudart.so.13", "libcuda.so.1")
    # Host code for any x86-64 processor, which SSE2 belongs to.
    assert not [name for name in target.cpu_features if name.startswith(("avx", "fma", "sse3", "sse4"))]


def test_headers_without_libcu_are_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    half, whole = tmp_path / "half", tmp_path / "whole"
    for root in (half, whole):
        (root / "include").mkdir(parents=True)
        (root / "include" / "cuda_runtime.h").touch()
    (whole / "include" / "cuda" / "std").mkdir(parents=True)
    (whole / "include" / "cuda" / "std" / "cstdint").touch()
    monkeypatch.setattr(cuda_compiler, "pypi_root", lambda _: half)
    monkeypatch.setattr(cuda_compiler, "TOOLKIT", whole)
    assert find_toolchain().root == whole


def test_a_host_that_was_given_is_kept() -> None:
    given = resolve_target('{"kind": "cuda", "arch": "sm_90a", "host": {"kind": "llvm", "mcpu": "skylake-avx512"}}')
    assert portable_host(given) == given
    detected = portable_host(resolve_target("cuda:sm_90a"))
    assert detected.arch == "sm_90a"
    assert "mcpu" not in detected.target.host.attrs


@pytest.mark.skipif(tvm.cuda(0).exist, reason="needs a machine without a GPU")
def test_artifact_is_refused_where_it_cannot_run(cuda_artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is for a GPU \(sm_90a\), and this machine has no CUDA device 0"):
        Module.load(cuda_artifact)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")
def test_artifact_agrees_with_the_cpu(cuda_artifact: Path, artifact: Path, bert_inputs: dict[str, np.ndarray]) -> None:
    module, expected = Module.load(cuda_artifact), Module.load(artifact).run(bert_inputs)
    for _ in range(3):
        for name, array in module.run(bert_inputs).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-3)


def test_the_callback_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def cubin_of(code: str) -> bytes:
        return bytes(tvm_ffi.get_global_func(COMPILE_CALLBACK)(code))

    marks: list[str] = []
    original = tvm_ffi.get_global_func(COMPILE_CALLBACK)
    tvm_ffi.register_global_func(COMPILE_CALLBACK, lambda code: marks.append(code) or b"mark", override=True)
    try:
        with cuda_compiler.cuda_compiler("sm_80"):
            assert elf_machine(cubin_of(KERNEL)) == EM_CUDA
        assert cubin_of("after") == b"mark"
    finally:
        tvm_ffi.register_global_func(COMPILE_CALLBACK, original, override=True)
    assert marks == ["after"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_cubin_is_for_the_architecture_asked_for(arch: str) -> None:
    cubin = CubinRequest(KERNEL, arch, find_toolchain()).compile()
    assert elf_machine(cubin) == EM_CUDA
    assert arch.encode() in cubin


def test_a_compile_error_shows_the_compilers_words() -> None:
    with pytest.raises(LoweringError, match=r"did not compile the kernels for sm_90a:(.|\n)*no_such_name"):
        CubinRequest("__global__ void broken() { no_such_name(); }", "sm_90a", find_toolchain()).compile()


def test_nvcc_is_taken_where_the_binding_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cuda_compiler.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(cuda_compiler, "TOOLKIT", tmp_path)
    toolchain = find_toolchain()
    assert (toolchain.kind, toolchain.root) == (CompilerKind.NVCC, tmp_path)
    with pytest.raises(LoweringError, match="nvcc did not compile the kernels"):
        CubinRequest(KERNEL, "sm_90a", toolchain).compile()


def test_no_toolchain_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_compiler.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(cuda_compiler, "TOOLKIT", tmp_path)
    monkeypatch.setattr(cuda_compiler, "pypi_root", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoweringError, match=r"no CUDA compiler was found: .* pip install 'relaxtune\[cuda\]'"):
        find_toolchain()


def test_an_output_that_is_no_cubin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "compile_with_nvrtc", lambda *_, **__: b"//ptx of some sort")
    with pytest.raises(LoweringError, match=r"gave no cubin for sm_90a: its output starts with b'//ptx of'"):
        CubinRequest(KERNEL, "sm_90a", find_toolchain()).compile()


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = load_library("libnosuchthing.so.9", [])
    assert reason is not None
    assert "libnosuchthing.so.9" in reason
    assert pypi_folders("no-such-distribution") == []
    assert pypi_root("no-such-distribution") is None
    assert pypi_root("numpy") is None

    monkeypatch.setattr(cuda_libraries, "cuda_runtime_loaded", lambda: False)
    monkeypatch.setattr(cuda_libraries, "CUDART", "libnosuchthing.so.9")
    assert "libnosuchthing.so.9" in (cuda_libraries.load_cuda_runtime() or "")
    monkeypatch.setattr(cuda_compiler, "load_cuda_runtime", lambda: "no cudart")
    monkeypatch.setattr(cuda_compiler, "load_library", lambda *_: None)
    with pytest.raises(LoweringError, match=r"CUDA runtime cannot be loaded \(no cudart\); install it with"):
        cuda_compiler.ensure_cuda_runtime()


def test_the_stand_in_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoweringError, match="needs a C compiler"):
        cuda_compiler._load_stand_in()
    monkeypatch.undo()
    monkeypatch.setattr(cuda_compiler, "_STAND_IN_SOURCE", "not C")
    with pytest.raises(LoweringError, match=r"stand-in for libcuda\.so\.1 could not be made"):
        cuda_compiler._load_stand_in()
