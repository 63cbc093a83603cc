"""Kernels of symbolic sizes that begin to compile while others are chosen."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.artifact import ahead, compile
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module, compiling_ahead
from relaxtune.pipeline.codegen import cuda_compiler, cuda_units
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.tuned_model import choose_kernels
from relaxtune.schedules.targets import resolve_target

WIDTHS = (256, 320, 384, 448)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    draw = np.random.default_rng(0).standard_normal
    sides = list(itertools.pairwise(WIDTHS))
    weights = [numpy_helper.from_array(draw(side).astype("float16"), f"w{n}") for n, side in enumerate(sides)]
    nodes = [helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"x{n + 1}"]) for n in range(len(sides))]
    graph = helper.make_graph(
        nodes,
        "matmuls",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT16, ["tokens", WIDTHS[0]])],
        [helper.make_tensor_value_info(f"x{len(sides)}", TensorProto.FLOAT16, ["tokens", WIDTHS[-1]])],
        weights,
    )
    path = tmp_path_factory.mktemp("model") / "matmuls.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return prepare_model(ModelRequest(path, target="cuda:sm_90a"))


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Compile each source to its hash; return how often each was compiled. Two kernels are many."""
    found: Counter[str] = Counter()

    def compile_cubin(code: str, *_others: object, **_options: object) -> bytes:
        found[code] += 1
        return cuda_compiler.ELF_MAGIC + hashlib.sha256(code.encode()).digest()

    monkeypatch.setattr(cuda_compiler, "compile_cubin", compile_cubin)
    for module in (cuda_units, ahead):
        monkeypatch.setattr(module, "KERNELS_MIN", 2)
    return found


def compiled(prepared: PreparedModel) -> CompiledModule:
    return compile_module(prepared.lowered, choose_kernels(prepared, None), prepared.target)


def test_each_kernel_is_lowered_and_compiled_once_and_is_the_same(
    prepared: PreparedModel, sources: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compiled(prepared)
    before = Counter(sources)
    assert set(before.values()) == {1}
    sources.clear()
    begun: list[str] = []
    lower = ahead.lower_kernels
    monkeypatch.setattr(ahead, "lower_kernels", lambda name, func: begun.append(name) or lower(name, func))
    with compiling_ahead(prepared.target):
        early = compiled(prepared)
        assert sources == before
        # The next compilation inside the block begins its own.
        compiled(prepared)
    assert set(sources.values()) == {2}
    assert len(begun) == 2 * (len(WIDTHS) - 1)
    assert early.kernel_hashes == plain.kernel_hashes
    assert early.launches == plain.launches


def test_what_cannot_be_lowered_ahead_is_told_by_the_compilation(
    prepared: PreparedModel, sources: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise ValueError("no kernels")

    monkeypatch.setattr(ahead, "lower_kernels", refuse)
    with compiling_ahead(prepared.target):
        compiled(prepared)
    assert set(sources.values()) == {1}


def test_error_of_the_compiler_is_the_compilations(
    prepared: PreparedModel, sources: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> bytes:
        raise LoweringError("nvrtc did not compile the kernels")

    monkeypatch.setattr(cuda_compiler, "compile_cubin", refuse)
    with compiling_ahead(prepared.target), pytest.raises(LoweringError, match="nvrtc did not compile the kernels"):
        compiled(prepared)


def test_kernels_that_are_not_compiled_after_all_are_left(prepared: PreparedModel, sources: Counter[str]) -> None:
    with compiling_ahead(prepared.target):
        choose_kernels(prepared, None)
    sources.clear()
    compiled(prepared)
    assert set(sources.values()) == {1}


def test_few_kernels_begin_with_the_compilation(
    prepared: PreparedModel, sources: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cuda_units, ahead):
        monkeypatch.setattr(module, "KERNELS_MIN", 100)
    with compiling_ahead(prepared.target):
        choose_kernels(prepared, None)
        assert not sources
        compiled(prepared)
    assert list(sources.values()) == [1]


def test_a_cpu_has_nothing_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "KernelsAhead", None)
    with compiling_ahead(resolve_target("llvm")):
        ahead.begin_kernel("f", None)
