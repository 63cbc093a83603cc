"""Machine code with its PTX (`--portable`): what an artifact holds, where it loads, and that a newer GPU runs it."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.artifact import device_choice
from relaxtune.pipeline.artifact.device_choice import device_for
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import Manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.codegen import cubins
from relaxtune.pipeline.codegen.cuda_compiler import compiler_release
from relaxtune.pipeline.environment import target_key
from relaxtune.pipeline.errors import ArtifactError, LoweringError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.schedules.errors import TargetError
from relaxtune.schedules.targets import resolve_target

# As fatbinary_section.h and the files themselves have it: kinds of what a fat binary holds.
PTX, CUBIN = 1, 2
NEEDS_NEWER = pytest.mark.skipif(
    not tvm.cuda(0).exist or float(tvm.cuda(0).compute_version) < 8.1, reason="needs a GPU later than sm_80's"
)


def images(data: bytes) -> list[tuple[int, int]]:
    """Return kind and architecture of everything in the fat binaries inside `data`."""
    found = []
    for start in (at for at in range(len(data)) if data.startswith(cubins.FAT_MAGIC, at)):
        _, header, size = struct.unpack_from("<HHQ", data, start + 4)
        at = start + header
        while at < start + header + size:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, at)
            found.append((kind, *struct.unpack_from("<I", data, at + 28)))
            at += own + payload
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the artifacts of one matmul for sm_80: with PTX, and without."""
    folder = tmp_path_factory.mktemp("portable")
    weight = numpy_helper.from_array(np.eye(16, dtype=np.float32), "w")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 16]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", infos[:1], infos[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")
    for portable in (True, False):
        request = ModelRequest(folder / "m.onnx", target="cuda:sm_80", portable=portable)
        compile_model(request, folder / str(portable))
    return folder / "True", folder / "False"


def test_a_portable_artifact_has_both_and_the_same_kernels(both: tuple[Path, Path]) -> None:
    portable, plain = (load_manifest(one) for one in both)
    assert images((both[0] / "model.so").read_bytes()) == [(CUBIN, 80), (PTX, 80)]
    assert images((both[1] / "model.so").read_bytes()) == []
    assert (portable.target.ptx_cuda, plain.target.ptx_cuda) == (compiler_release(), None)
    assert portable.target.text == "cuda sm_80 and newer, by PTX"
    assert [kernel.kernel_hash for kernel in portable.kernels] == [kernel.kernel_hash for kernel in plain.kernels]


def test_records_hold_for_portable_code_too() -> None:
    plain, portable = resolve_target("cuda:sm_80"), resolve_target("cuda:sm_80", portable=True)
    assert target_key(portable) == target_key(plain)
    # A manifest keeps the target as this text, and a batch may give it.
    assert resolve_target(str(portable.target)).portable
    assert not plain.portable


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("cuda:sm_90a", "code for sm_90a has instructions of this GPU alone.* --target cuda:sm_90,"),
        ("cuda:sm_100f", "--target cuda:sm_100,"),
        ("llvm", "'llvm' is no GPU"),
    ],
)
def test_code_that_no_other_gpu_runs_is_refused(target: str, told: str) -> None:
    with pytest.raises(TargetError, match=told):
        resolve_target(target, portable=True)


@pytest.mark.parametrize(
    ("version", "driver", "refusal"),
    [
        ("8.0", None, None),
        ("8.6", (12, 0), None),
        ("9.0", (99, 0), None),
        ("12.0", None, None),
        ("9.0", (12, 8), r"has PTX of CUDA \d+\.\d+ .* translates PTX of CUDA 12.8 at most"),
        ("7.5", (99, 0), "compute capability 7.5"),
    ],
)
def test_newer_gpus_take_the_ptx(
    both: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    driver: tuple[int, int] | None,
    refusal: str | None,
) -> None:
    device = tvm.cuda(0)
    monkeypatch.setattr(device_choice, "cuda", lambda _: device)
    monkeypatch.setattr(device_choice, "device_exists", lambda _: True)
    monkeypatch.setattr(device_choice, "compute_version", lambda _: version)
    monkeypatch.setattr(device_choice, "device_name", lambda _: "some GPU")
    monkeypatch.setattr(device_choice, "driver_release", lambda: driver)
    manifest: Manifest = load_manifest(both[0])
    if refusal is None:
        assert device_for(manifest, None, both[0]) is device
    else:
        with pytest.raises(ArtifactError, match=refusal):
            device_for(manifest, None, both[0])
    plain = replace(manifest, target=replace(manifest.target, ptx_cuda=None))
    if not version.startswith("8"):
        with pytest.raises(ArtifactError, match=f"compute capability {version}"):
            device_for(plain, None, both[1])


def test_a_missing_library_and_a_refusal_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoweringError, match=r"for sm_80: nvFatbinAddCubin gave error \d+"):
        cubins.pack_fat_binary(b"no cubin", b"", "sm_80")
    monkeypatch.setattr(cubins, "_FAT_LIBRARY", "libnvfatbin.so.99")
    with pytest.raises(LoweringError, match=r"libnvfatbin.so.99.*pip install 'relaxtune\[cuda\]'"):
        cubins.pack_fat_binary(b"", b"", "sm_80")


@pytest.mark.gpu
@NEEDS_NEWER
def test_a_newer_gpu_runs_the_ptx(both: tuple[Path, Path]) -> None:
    module = Module.load(both[0])
    values = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    # Its weight is the identity.
    assert np.array_equal(module.run({"x": values})["y"], values)
