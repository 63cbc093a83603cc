"""CUDA graphs of a module with symbolic sizes, on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.runtime.vm import VMInstrumentReturnKind

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.gpu import size_graphs
from relaxtune.pipeline.artifact.gpu.size_graphs import SizeGraphs
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs a CUDA device")]

SIZES = ((1, 7), (2, 16), (3, 1), (1, 64), (2, 33))


@pytest.fixture(scope="module")
def model() -> OnnxModel:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return load_model("bert-tiny", shapes=dict.fromkeys(names, ("batch", "sequence")))


@pytest.fixture(scope="module")
def artifact(model: OnnxModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(model, tmp_path_factory.mktemp("symbolic") / "artifact", {})


def compiled(model: OnnxModel, directory: Path, maxima: dict[str, int]) -> Path:
    target = resolve_target("cuda")
    lowered = lower(import_model(model), target.target, LoweringOptions(precision="fp16", maxima=maxima))
    environment = detect_environment(target)
    choices = select_kernels(lowered, (), database=None, target=target, environment=environment)
    write_artifact(compile_module(lowered, choices, target), directory)
    return directory


def graphs_of(module: Module) -> SizeGraphs:
    graphs = module._graphs
    assert graphs is not None
    return graphs


def feeds(model: OnnxModel, sizes: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    return random_inputs(model, seed=seed, dims=dict(zip(("batch", "sequence"), sizes, strict=True)))


def test_graphs_and_kernels_give_the_same_bits_and_onnx_runtimes_values(model: OnnxModel, artifact: Path) -> None:
    module, alone = Module.load(artifact), Module.load(artifact)
    alone._graphs = None
    # Twice without a graph or with its capture, twice with; the sizes come in turns, and share the pool.
    for turn in range(4):
        for sizes in SIZES:
            given = feeds(model, sizes, turn)
            found, right = module.run(given), alone.run(given)
            for name, array in found.items():
                np.testing.assert_array_equal(array, right[name])
            for array, reference in zip(found.values(), run_reference(model, given), strict=True):
                assert np.linalg.norm(array - reference) < 2e-2 * np.linalg.norm(reference)
        # A graph that reads a caller's inputs is made again when they lie elsewhere.
        assert graphs_of(module).captured in (range(1) if turn == 0 else range(len(SIZES), 2 * len(SIZES) + 1))


def test_graph_reads_the_callers_inputs_while_they_stay_and_its_own_after(model: OnnxModel, artifact: Path) -> None:
    module, alone = Module.load(artifact), Module.load(artifact)
    alone._graphs = None
    kept = module.to_device(feeds(model, (2, 16), 0))

    def agrees(tensors: tuple[tvm.runtime.Tensor, ...]) -> bool:
        pairs = zip(module.run_device(tensors), alone.run_device(tensors), strict=True)
        return all(np.array_equal(one.numpy(), other.numpy()) for one, other in pairs)

    for seed in range(4):
        for tensor, array in zip(kept, feeds(model, (2, 16), seed).values(), strict=True):
            tensor.copyfrom(array)
        assert agrees(kept)
    graphs = graphs_of(module)
    (graph,) = graphs._graphs.values()
    assert (graphs.captured, graph.inputs) == (1, None)
    # Other tensors beside the first ones: a second graph, with inputs of its own, serves both.
    others = module.to_device(feeds(model, (2, 16), 7))
    assert all(agrees(tensors) for tensors in (others, kept, others))
    (graph,) = graphs._graphs.values()
    assert graphs.captured == 2
    assert graph.inputs is not None


def test_least_recently_used_graphs_go(model: OnnxModel, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_graphs, "GRAPHS_MAX", 2)
    module, alone = Module.load(artifact), Module.load(artifact)
    alone._graphs = None
    for turn in range(5):
        for sizes in SIZES[:3]:
            given = feeds(model, sizes, turn)
            for name, array in module.run(given).items():
                np.testing.assert_array_equal(array, alone.run(given)[name])
        assert len(graphs_of(module)._graphs) <= 2


def test_memory_stays_the_same_over_many_sizes(model: OnnxModel, artifact: Path) -> None:
    module, rng = Module.load(artifact), np.random.default_rng(0)
    free: list[int] = []
    # Other tests take and give back memory of the same device: a leak would be there in every stretch of 600 sizes.
    while len(free) < 3 or (free[-3] - free[-1] >= 256 * 2**20 and len(free) < 12):
        for number in range(300):
            module.run(feeds(model, (int(rng.integers(1, 5)), int(rng.integers(1, 65))), number))
        free.append(tvm.cuda(0).available_global_memory)
    # The pool holds 64 sets of sizes at most, of less than 4 MB each.
    assert free[-3] - free[-1] < 256 * 2**20, free


def test_nothing_is_allocated_in_a_run_that_has_a_maximum(model: OnnxModel, artifact: Path, tmp_path: Path) -> None:
    names: list[str] = []

    def note(_function: object, name: str, before: bool, *_others: object) -> int:
        names.extend([name] if before else [])
        return int(VMInstrumentReturnKind.NO_OP)

    def allocations(module: Module) -> int:
        # The first call takes the planned memory.
        for sizes in SIZES:
            names.clear()
            module._machine.set_instrument(note)
            module._run_kernels(module.to_device(feeds(model, sizes, 0)))
            module._machine.set_instrument(None)
        return sum("alloc_storage" in name for name in names)

    assert allocations(Module.load(artifact)) > 0
    planned = Module.load(compiled(model, tmp_path / "planned", {"batch": 3, "sequence": 64}))
    assert allocations(planned) == 0
    with pytest.raises(PipelineError, match="64"):
        planned.run(feeds(model, (1, 65), 0))
