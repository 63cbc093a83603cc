"""Tables of kernels that other processes make while others are chosen."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from relaxtune.pipeline.ahead import tables as ahead
from relaxtune.pipeline.ahead.maker import TableRequest
from relaxtune.pipeline.ahead.tables import TableMakers, tables_ahead
from relaxtune.pipeline.artifact.compile import CompiledModule, compile_module
from relaxtune.pipeline.choose import selection
from relaxtune.pipeline.codegen import cuda_compiler, cuda_units
from relaxtune.pipeline.codegen.cuda_compiler import CubinRequest
from relaxtune.pipeline.errors import LoweringError
from relaxtune.pipeline.prepare import ModelRequest, PreparedModel, prepare_model
from relaxtune.pipeline.processes.process import ChildProcess
from relaxtune.pipeline.tuned_model import choose_kernels
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.made_table import MadeTable

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


@pytest.fixture(scope="module")
def makers(prepared: PreparedModel) -> Iterator[TableMakers]:
    with closing(TableMakers()) as started:
        started.expect(prepared.model, prepared.target)
        assert started.server is not None
        yield started


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Compile each source to its hash; return how often each was compiled. Two kernels are many, and one function."""
    found: Counter[str] = Counter()

    def compile_cubin(code: str, *_others: object, **_options: object) -> bytes:
        found[code] += 1
        return cuda_compiler.ELF_MAGIC + hashlib.sha256(code.encode()).digest()

    monkeypatch.setattr(cuda_compiler, "compile_cubin", compile_cubin)
    monkeypatch.setattr(ahead.TablesAhead, "_have_compiled", lambda _self, _request: None)
    tables_of_few(monkeypatch)
    return found


def tables_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "FUNCTIONS_MIN", 1)
    for module in (cuda_units, ahead):
        monkeypatch.setattr(module, "KERNELS_MIN", 2)


def compiled(prepared: PreparedModel, *, cuda_graph: bool = True) -> CompiledModule:
    choices = choose_kernels(prepared, None)
    return compile_module(prepared.lowered, choices, prepared.target, cuda_graph=cuda_graph)


def library(made: CompiledModule, path: Path) -> bytes:
    made.executable.export_library(str(path))
    return path.read_bytes()


def test_each_kernel_is_made_and_compiled_once_and_is_the_same(
    prepared: PreparedModel, makers: TableMakers, sources: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compiled(prepared)
    before = Counter(sources)
    assert set(before.values()) == {1}
    sources.clear()
    with tables_ahead(prepared.lowered.mod, prepared.target, makers):
        choices = choose_kernels(prepared, None)
        assert [type(choice.made) for choice in choices] == [MadeTable] * (len(WIDTHS) - 1)
        with monkeypatch.context() as patch:
            # Nothing is made here.
            patch.setattr(selection, "apply_decision", None)
            early = compile_module(prepared.lowered, choices, prepared.target)
        assert sources == before
        # What another compilation takes, of the same choices or of its own, is made here.
        again = [compile_module(prepared.lowered, choices, prepared.target), compiled(prepared)]
    assert set(sources.values()) == {3}
    for made in (early, *again):
        assert made.kernel_hashes == plain.kernel_hashes
        assert made.launches == plain.launches
        assert made.determinism == plain.determinism
        assert library(made, tmp_path / "early.so") == library(plain, tmp_path / "plain.so")


@pytest.mark.parametrize("many", [True, False], ids=["without a graph", "few kernels"])
def test_tables_that_do_not_fit_the_compilation_are_made_here(
    prepared: PreparedModel,
    makers: TableMakers,
    sources: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    many: bool,
) -> None:
    if not many:
        for module in (cuda_units, ahead):
            monkeypatch.setattr(module, "KERNELS_MIN", 100)
    plain = compiled(prepared, cuda_graph=not many)
    with tables_ahead(prepared.lowered.mod, prepared.target, makers):
        choices = choose_kernels(prepared, None)
        assert many or set(sources.values()) == {1}
        early = compile_module(prepared.lowered, choices, prepared.target, cuda_graph=not many)
    assert library(early, tmp_path / "early.so") == library(plain, tmp_path / "plain.so")


def test_what_is_lost_with_its_process_is_made_here(
    prepared: PreparedModel, makers: TableMakers, sources: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = compiled(prepared)
    send = ChildProcess.send

    def send_and_kill(child: ChildProcess, request: object) -> None:
        if isinstance(request, TableRequest) and "matmul1" in request.function:
            os.kill(child.pid, signal.SIGKILL)
        send(child, request)

    monkeypatch.setattr(ChildProcess, "send", send_and_kill)
    with tables_ahead(prepared.lowered.mod, prepared.target, makers):
        choices = choose_kernels(prepared, None)
        lost = [choice.function for choice in choices if not isinstance(choice.made, MadeTable)]
        early = compile_module(prepared.lowered, choices, prepared.target)
    assert lost
    assert all("matmul1" in name for name in lost)
    assert library(early, tmp_path / "early.so") == library(plain, tmp_path / "plain.so")


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_kernels_are_compiled_by_processes_or_here(
    prepared: PreparedModel, makers: TableMakers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    tables_of_few(monkeypatch)
    here: list[str] = []
    send, compile_cubin = ChildProcess.send, cuda_compiler.compile_cubin

    def send_and_kill(child: ChildProcess, request: object) -> None:
        if killed and isinstance(request, CubinRequest) and not here:
            os.kill(child.pid, signal.SIGKILL)
        send(child, request)

    def compile_counted(code: str, *others: Any, **options: Any) -> bytes:
        here.append(code)
        return compile_cubin(code, *others, **options)

    monkeypatch.setattr(ChildProcess, "send", send_and_kill)
    monkeypatch.setattr(cuda_compiler, "compile_cubin", compile_counted)
    with tables_ahead(prepared.lowered.mod, prepared.target, makers):
        early = compiled(prepared)
    assert bool(here) == killed
    elsewhere = len(here)
    plain = compiled(prepared)
    assert elsewhere < len(here) - elsewhere
    assert library(early, tmp_path / "early.so") == library(plain, tmp_path / "plain.so")


def test_error_of_the_compiler_is_the_compilations(
    prepared: PreparedModel, makers: TableMakers, sources: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> bytes:
        raise LoweringError("nvrtc did not compile the kernels")

    monkeypatch.setattr(cuda_compiler, "compile_cubin", refuse)
    with (
        tables_ahead(prepared.lowered.mod, prepared.target, makers),
        pytest.raises(LoweringError, match="nvrtc did not compile the kernels"),
    ):
        compiled(prepared)


def test_tables_that_are_not_compiled_after_all_are_left(
    prepared: PreparedModel, makers: TableMakers, sources: Counter[str]
) -> None:
    with tables_ahead(prepared.lowered.mod, prepared.target, makers):
        choices = choose_kernels(prepared, None)
    sources.clear()
    compile_module(prepared.lowered, choices, prepared.target)
    assert set(sources.values()) == {1}


def test_a_shell_alone_is_refused(prepared: PreparedModel, makers: TableMakers, sources: Counter[str]) -> None:
    with tables_ahead(prepared.lowered.mod, prepared.target, makers):
        shells = [replace(choice, made=choice.outline) for choice in choose_kernels(prepared, None)]
    with pytest.raises(LoweringError, match=r"code generation of .* was made for a compilation that is not under way"):
        compile_module(prepared.lowered, shells, prepared.target)


def test_a_cpu_and_a_model_of_few_functions_have_nothing_made_elsewhere(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "ForkServer", None)
    with tables_ahead(prepared.lowered.mod, prepared.target):
        assert all(choice.outline is choice.scheduled for choice in choose_kernels(prepared, None))
    monkeypatch.setattr(ahead, "FUNCTIONS_MIN", 1)
    with closing(TableMakers()) as none:
        none.expect(prepared.model, resolve_target("llvm"))
        with tables_ahead(prepared.lowered.mod, resolve_target("llvm"), none):
            assert none.server is None
