"""The chain of a model's kernels: each call reads what was there or was made before it, and all of them run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tvm

from benchmarks.gpu_arms.cases import Case
from benchmarks.kernels.cubins import MANIFEST
from benchmarks.whole_models.bench_chain import CHAIN, VALUES, build, chain_of, run
from relaxtune.pipeline.prepare import ModelRequest, prepare_model

pytestmark = pytest.mark.slow

TARGET = "cuda:sm_90a"
DECODE = Case("llama-tiny-decode", 3, 64)


@pytest.mark.parametrize("case", [Case("bert-tiny", 2, 32), DECODE], ids=lambda case: case.model)
def test_calls_read_what_is_there(case: Case) -> None:
    lowered = prepare_model(ModelRequest(case.source, shapes=case.shapes, target=TARGET)).lowered
    chain, values = chain_of(lowered)
    assert {name for name, _buffers in chain.calls} == set(lowered.kernels)
    assert len(chain.calls) == sum(len(calls) for calls in lowered.kernels.values())
    there = {spec.name.replace(".", "_") for spec in lowered.graph.inputs} | set(lowered.weights) | set(values)
    for name, buffers in chain.calls:
        split = len(buffers) - chain.outputs[name]
        assert set(buffers[:split]) <= there, name
        assert not there & set(buffers[split:]), name
        shapes = [[int(size) for size in param.ty.shape] for param in lowered.mod[name].params]
        assert [chain.buffers[buffer][0] for buffer in buffers] == shapes, name
        there |= set(buffers[split:])
    assert set(chain.written) <= there


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chain")
    build(directory, DECODE, candidates=2, functions="^attention")
    return directory


def test_build_has_a_kernel_for_each_function_and_candidates_where_asked(built: Path) -> None:
    folder = built / DECODE.name
    functions = [entry["function"] for entry in json.loads((folder / MANIFEST).read_text())]
    chain = json.loads((folder / CHAIN).read_text())
    assert set(functions) == {name for name, _buffers in chain["calls"]}
    assert {name for name in functions if functions.count(name) > 1} == {
        name for name in functions if name.startswith("attention")
    }
    assert (folder / VALUES).is_file()


@pytest.mark.gpu
@pytest.mark.skipif(
    not tvm.cuda(0).exist or str(tvm.cuda(0).compute_version) != "9.0", reason="needs a GPU of compute capability 9.0"
)
def test_candidates_agree_in_the_chain(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings")
    assert run(built, built, rounds=3, out=tmp_path / "chain.json") == 0
    times = json.loads((tmp_path / "chain.json").read_text())["cases"][DECODE.name]["times_us"]
    assert {"whole", "beside"} < set(times)
    assert any(arm.startswith("attention") and arm.endswith("#1") for arm in times)
