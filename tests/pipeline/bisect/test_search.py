"""The bisection where neither a pass nor a kernel is to blame, and with artifacts that are not what they seem."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.bisect import Culprit, bisect, render
from relaxtune.pipeline.bisect.plain_kernels import ReferenceKernels, ready_for_host
from relaxtune.pipeline.bisect.search import _first_true
from relaxtune.pipeline.bisect.stages import Stages
from relaxtune.pipeline.bisect.subject import _without_graph, lowering_options, make_subject
from relaxtune.pipeline.bisect.tensors import onnx_tensors
from relaxtune.pipeline.bisect.trace import CallSite
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.passes.order import Phase, Step, stock
from relaxtune.pipeline.validate.validation import default_tolerance, sample_inputs
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.faults.planting import FaultyPass, build, edited_constant
from tests.pipeline.faults.small_models import make_model
from tests.pipeline.importer import onnx_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windowed")


@pytest.fixture(scope="module")
def model(folder: Path) -> OnnxModel:
    return make_model("windowed", folder)


@pytest.fixture(scope="module")
def module(model: OnnxModel, quick_target: ResolvedTarget, folder: Path) -> Module:
    return build(model, quick_target, folder)


@pytest.fixture(scope="module")
def inputs(model: OnnxModel) -> dict[str, np.ndarray]:
    return sample_inputs(model, samples=1, seed=0)[0]


def test_wrong_weights_are_no_fault_of_passes_or_kernels(
    model: OnnxModel, inputs: dict[str, np.ndarray], quick_target: ResolvedTarget, tmp_path: Path
) -> None:
    built = build(model, quick_target, tmp_path)
    zeros = [tvm.runtime.tensor(np.zeros(w.shape, str(w.dtype))) for w in built._weights]
    damaged = Module(built.manifest, built._machine, built.device, zeros, None)
    found = bisect(damaged, model, inputs, default_tolerance(damaged, model))
    assert found is not None
    assert found.culprit is Culprit.RUNTIME
    assert found.node is None
    assert "the weights or the runtime" in found.summary
    assert "runtime" in str(render(found).title)


def test_a_graph_without_kernels_is_run_after_any_pass(quick_target: ResolvedTarget) -> None:
    spec = ("float32", (2, 3))
    same = onnx_cases.make_model([helper.make_node("Identity", ["x"], ["y"])], {"x": spec}, {"y": spec})
    x = np.arange(6, dtype="float32").reshape(2, 3)
    stages = Stages(import_model(same), quick_target.target, LoweringOptions(), {"x": x})
    for steps in ((), stages.steps):
        run = stages.run(steps)
        assert run.outputs["y"].tolist() == x.tolist()
        assert run.trace == ()


def test_equal_modules_run_once_and_others_do_not(quick_target: ResolvedTarget) -> None:
    spec, c = ("float32", (2, 3)), np.ones((2, 3), "float32")
    added = onnx_cases.make_model([helper.make_node("Add", ["x", "c"], ["y"])], {"x": spec}, {"y": spec}, {"c": c})
    stages = Stages(import_model(added), quick_target.target, LoweringOptions(), {"x": np.zeros((2, 3), "float32")})
    same = Step(Phase.PATTERNS, "same", stock(relax.transform.Normalize()))
    larger = FaultyPass("same", "Add_y", edited_constant(1, lambda array: np.nextafter(array, 2, dtype="float32")))

    def from_another_node(mod: tvm.IRModule, state: LoweringState) -> tvm.IRModule:
        state.sources = {binding.var.name: ("/Another",) for binding in bindings_of(main_of(mod))}
        return mod

    first = stages.run([])
    assert stages.run([same]) is first
    assert (
        stages.run([replace(same, run=larger._run(same))]).outputs["y"].tolist()
        == [[np.nextafter(1, 2, dtype="f")] * 3] * 2
    )
    (called,) = stages.run([replace(same, run=from_another_node)]).trace
    assert called.call.onnx_nodes == ("/Another",)


def test_an_artifact_of_other_kernels_is_refused(module: Module, model: OnnxModel) -> None:
    subject = make_subject(module, model, None)
    first, *rest = subject.calls
    other = replace(subject, calls=(replace(first, function="another"), *rest))
    with pytest.raises(PipelineError, match="where the passes, run again, say kernel"):
        other.run(sample_inputs(model, samples=1, seed=0)[0], replacements={})
    shorter = replace(subject, calls=subject.calls[:1])
    with pytest.raises(PipelineError, match="no further kernel"):
        shorter.run(sample_inputs(model, samples=1, seed=0)[0])


def test_a_module_is_made_again_without_a_graph_and_other_kernels_are_told(
    module: Module, model: OnnxModel, inputs: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    subject = make_subject(module, model, None)
    again = _without_graph(subject.lowered, subject.target, module.manifest, None)
    np.testing.assert_array_equal(again.run(inputs)["y"], module.run(inputs)["y"])
    first, *rest = module.manifest.kernels
    recorded = replace(module.manifest, kernels=(replace(first, decision_sha256="0" * 64), *rest))
    with caplog.at_level(logging.WARNING):
        _without_graph(subject.lowered, subject.target, recorded, None)
    assert f"1 kernels are not the artifact's: {first.function}" in caplog.text


def test_the_options_of_an_artifact_are_read_back(
    model: OnnxModel, quick_target: ResolvedTarget, tmp_path: Path
) -> None:
    asked = LoweringOptions(precision="fp16", disabled_passes=frozenset({"combine_matmuls"}))
    module = build(model, quick_target, tmp_path, options=asked)
    assert lowering_options(module.manifest) == replace(asked, embed_weights=not module.manifest.weights)


@pytest.mark.parametrize("wanted", [1, 2, 7, 16])
def test_halves_find_the_first_true(wanted: int) -> None:
    asked: list[int] = []

    def test(number: int) -> bool:
        asked.append(number)
        return number >= wanted

    assert _first_true(test, 0, 16) == wanted
    assert len(asked) <= 4


def test_references_of_large_models_are_scheduled(module: Module, model: OnnxModel) -> None:
    subject = make_subject(module, model, None)
    mod = subject.lowered.mod
    host = tvm.target.Target("llvm")
    plain, small = ready_for_host(mod, host, subject.calls)
    assert int(small.attrs["opt-level"]) == 0
    _, large = ready_for_host(mod, host, [*subject.calls] * 10**5)
    assert "opt-level" not in large.attrs
    scheduled, _ = ready_for_host(mod, host, subject.calls, unscheduled_flops_max=1.0)
    name = subject.calls[0].function
    assert not plain[name].attrs.get("tirx.is_scheduled", False)
    assert scheduled[name].attrs["tirx.is_scheduled"]


def test_a_kernel_is_checked_and_replaced_on_given_arguments(
    module: Module, model: OnnxModel, inputs: dict[str, np.ndarray]
) -> None:
    subject = make_subject(module, model, None)
    references = ReferenceKernels(subject.lowered.mod, subject.host, subject.calls)
    # Not compiled in memory, which takes four times as long.
    assert references._code.kind == "library"
    seen: dict[str, str | None] = {}

    def check(call: CallSite, arguments: object) -> None:
        seen[call.binding] = references.find_fault(call, arguments)  # type: ignore[arg-type]

    subject.run(inputs, poison=True, after=check)
    assert len(seen) == len(subject.calls)
    assert set(seen.values()) == {None}


def test_every_tensor_has_its_writer_and_depth(model: OnnxModel, inputs: dict[str, np.ndarray]) -> None:
    tensors = onnx_tensors(model, inputs)
    assert tensors.depth("x") == 0
    assert tensors.depth("q") == 1
    assert tensors.depth("kt") == 1
    assert tensors.depth("products") == 2
    assert tensors.writer("x") is None
    assert tensors.order("x") == -1
    assert [node.label for node in tensors.makers("kt")] == ["/k/MatMul", "/Transpose"]
    between = tensors.between("kept", frozenset({"x", "products"}), frozenset())
    assert [node.label for node in between] == ["/scores/Mul", "/Where"]
