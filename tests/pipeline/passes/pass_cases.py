"""Small graphs for the tests of the passes, and running lowered modules beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.target import Target

from relaxtune.models import OnnxModel, TensorSpec, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.presets import get_preset
from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, plan_memory_passes
from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.schedules.cpu.vector_math import register_vector_math
from tests.token_lists import token_lists
from tests.unoptimised import LLVM, UNOPTIMISED, runnable


def small_model(name: str, precision: str | None = None, batch: int = 1) -> OnnxModel:
    """Return a zoo model with short sequences, which compile and run in a fraction of a second."""
    sizes = {"batch": batch, "sequence": 12, "past_sequence": 7}
    shapes = {spec.name: tuple(_size(axis, sizes) for axis in spec.shape) for spec in get_preset(name).inputs}
    return load_model(name, shapes=shapes, precision=precision)


def _size(axis: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(axis, int):
        return axis
    return sum(sizes.get(term) or int(term) for term in axis.replace(" ", "").split("+"))


def graph_of(build: Callable[..., relax.Expr], inputs: Mapping[str, tuple[Sequence[object], str]]) -> ImportedGraph:
    """Return a graph whose `main` is what `build` emits; every binding stands for the ONNX node of its own name."""
    params = [relax.Var(name, relax.TensorType(list(shape), dtype)) for name, (shape, dtype) in inputs.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(builder, *params))
        builder.emit_func_output(result)
    mod = builder.get()
    main = main_of(mod).with_attr("num_input", len(params))
    mod[mod.get_global_var("main")] = main
    names = [binding.var.name for binding in bindings_of(main)]
    specs = tuple(
        TensorSpec(n, d, tuple(a if isinstance(a, int) else str(a) for a in s)) for n, (s, d) in inputs.items()
    )
    proto = helper.make_model(helper.make_graph([], "empty", [], []))
    model = OnnxModel("case", proto, None, "0" * 64, specs, ())
    source_map = {name: (f"node_{name}",) for name in names}
    return ImportedGraph("case", model, mod, specs, (), source_map, "0" * 64)


def state_of(graph: ImportedGraph, **options: object) -> LoweringState:
    state = LoweringState(graph, LLVM, LoweringOptions(**options))  # type: ignore[arg-type]
    state.sources.update(graph.source_map)
    return state


def operators_of(mod: tvm.ir.IRModule) -> list[str]:
    """Return the operator of every binding of `main`, in order."""
    values = [binding.value for binding in bindings_of(main_of(mod))]
    return [v.op.name.removeprefix("relax.") for v in values if isinstance(v, relax.Call) and hasattr(v.op, "name")]


def run_module(mod: tvm.ir.IRModule, arguments: Sequence[np.ndarray], target: Target = UNOPTIMISED) -> list[np.ndarray]:
    """Return the outputs of `main`, compiled with the stock pipeline."""
    with target:
        machine = runnable(tvm.compile(mod, target=target))
    return _arrays(machine["main"](*map(tvm.runtime.tensor, arguments)))


def run_lowered(
    lowered: LoweredModule, feeds: Mapping[str, np.ndarray], target: Target = UNOPTIMISED
) -> list[np.ndarray]:
    """Return the outputs of a lowered module, its kernels compiled without a schedule."""
    return run_compiled(compiled(lowered, target), lowered, feeds)


def compiled(lowered: LoweredModule, target: Target = UNOPTIMISED) -> relax.VirtualMachine:
    """Return a lowered module compiled without schedules."""
    # As compiling does: TVM's own tanh is off by 6e-8 of 1, however small the result.
    register_vector_math()
    with target, tvm.transform.PassContext(opt_level=3):
        mod = tvm.transform.Sequential(plan_memory_passes(target, cuda_graph=False))(lowered.mod)
        return runnable(tvm.compile(mod, target, relax_pipeline=None))


def run_compiled(
    machine: relax.VirtualMachine, lowered: LoweredModule, feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    unpadding = lowered.unpadding
    lists = () if unpadding is None else token_lists(unpadding, feeds[unpadding.mask])
    arguments = [*(feeds[spec.name] for spec in lowered.graph.inputs), *lists, *lowered.weights.values()]
    return _arrays(machine["main"](*[tvm.runtime.tensor(np.asarray(a, order="C")) for a in arguments]))


def _arrays(result: object) -> list[np.ndarray]:
    if isinstance(result, tvm.runtime.Tensor):
        return [result.numpy()]
    return [item.numpy() for item in result]  # type: ignore[attr-defined]


def feeds_of(model: OnnxModel, **dims: int) -> dict[str, np.ndarray]:
    return random_inputs(model, seed=0, dims=dims)


def assert_agrees(got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual.astype("float64"), expected.astype("float64"), rtol=tolerance, atol=tolerance)


def make_onnx(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[str, Sequence[int | str]]],
    outputs: Mapping[str, tuple[str, Sequence[int | str]]],
    constants: Mapping[str, np.ndarray],
) -> OnnxModel:
    """Return a model of the given nodes."""

    def value(name: str, dtype: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, getattr(TensorProto, dtype.upper()), list(shape))

    def named(dtype: str) -> str:
        return {"FLOAT": "float32"}.get(dtype.upper(), dtype)

    graph = helper.make_graph(
        list(nodes),
        "case",
        [value(name, *spec) for name, spec in inputs.items()],
        [value(name, *spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(proto)
    specs = [tuple(TensorSpec(n, named(d), tuple(s)) for n, (d, s) in values.items()) for values in (inputs, outputs)]
    return OnnxModel("case", proto, None, "0" * 64, specs[0], specs[1])
