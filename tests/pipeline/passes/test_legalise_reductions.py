"""Reductions at the edges: over a symbolic axis without elements in a call, and of bfloat16 with a NaN."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import detect_environment
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.validate.validation import poisoned_kernels
from relaxtune.schedules.targets import ResolvedTarget
from tests.pipeline.importer.onnx_cases import make_model, run_reference
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered

FLOATS = ("Mean", "Max", "Min", "Sum", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
INTEGERS = ("Max", "Min", "Prod", "Sum", "Mean")


def feeds_of(batch: int, length: int) -> dict[str, np.ndarray]:
    x = np.arange(batch * length * 3, dtype="float32").reshape(batch, length, 3) - 4
    return {"x": x, "i": np.arange(batch * length, dtype="int32").reshape(1, batch, length)}


def along_a_symbolic_axis() -> OnnxModel:
    """Return a graph of reductions over an axis `s`, which may have no elements, as a cache may."""
    floats = [helper.make_node(f"Reduce{name}", ["x", "one"], [f"x{name}"], keepdims=0) for name in FLOATS]
    integers = [helper.make_node(f"Reduce{name}", ["i", "two"], [f"i{name}"]) for name in INTEGERS]
    relu = helper.make_node("Relu", ["xMax"], ["y"])
    product = helper.make_node("Einsum", ["x", "x"], ["z"], equation="bsi,bsj->bij")
    outputs = {
        **{f"x{name}": ("float32", ("b", 3)) for name in FLOATS},
        **{f"i{name}": ("int32", (1, "b", 1)) for name in INTEGERS},
        "y": ("float32", ("b", 3)),
        "z": ("float32", ("b", 3, 3)),
    }
    inputs = {"x": ("float32", ("b", "s", 3)), "i": ("int32", (1, "b", "s"))}
    axes = {"one": np.array([1]), "two": np.array([2])}
    return make_model([*floats, *integers, relu, product], inputs, outputs, axes, opset=18)


def test_reductions_of_no_elements_at_run_time_are_those_of_onnx_runtime(
    llvm_target: ResolvedTarget, tmp_path: Path
) -> None:
    """As compiled, and with memory full of NaN: what no kernel writes shows."""
    model = along_a_symbolic_axis()
    lowered = lower(import_model(model), llvm_target.target)
    choices = select_kernels(
        lowered,
        extract_tasks([lowered]),
        database=None,
        target=llvm_target,
        environment=detect_environment(llvm_target),
    )
    write_artifact(compile_module(lowered, choices, llvm_target), tmp_path / "a")
    module = Module.load(tmp_path / "a")
    for feeds in (feeds_of(2, 0), feeds_of(2, 5), feeds_of(1, 1)):
        with poisoned_kernels(module):
            got = module.run(feeds)
        for spec, want in zip(model.outputs, run_reference(model, feeds), strict=True):
            np.testing.assert_allclose(got[spec.name], want, rtol=1e-5, err_msg=spec.name)


def test_the_place_of_an_extreme_of_none_is_0() -> None:
    """ONNX leaves it undefined, and it may be an index of something else."""
    nodes = [helper.make_node(name, ["x"], [name], axis=1, keepdims=0) for name in ("ArgMax", "ArgMin")]
    outputs = {name: ("int64", ("b", 3)) for name in ("ArgMax", "ArgMin")}
    model = make_model(nodes, {"x": ("float32", ("b", "s", 3))}, outputs, opset=18)
    for got in run_lowered(lower(import_model(model), UNOPTIMISED), {"x": np.zeros((2, 0, 3), "float32")}):
        np.testing.assert_array_equal(got, np.zeros((2, 3), "int64"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_least_and_the_greatest_keep_a_nan_and_infinities(dtype: str) -> None:
    rows = np.array([[1, np.nan, -2], [np.nan] * 3, [np.inf, -np.inf, 0], [-np.inf] * 3, [0.5, 3, -0.25]])
    x = rows.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    nodes = [helper.make_node(f"Reduce{name}", ["x", "axis"], [name]) for name in ("Min", "Max")]
    outputs = {name: (dtype, (5, 1)) for name in ("Min", "Max")}
    model = make_model(nodes, {"x": (dtype, (5, 3))}, outputs, {"axis": np.array([1])}, opset=20)
    least, greatest = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": x})
    np.testing.assert_array_equal(least.astype("float64").ravel(), rows.min(1))
    np.testing.assert_array_equal(greatest.astype("float64").ravel(), rows.max(1))


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_logarithm_of_a_sum_of_exponentials_takes_no_infinity_from_itself(dtype: str, kept: int) -> None:
    rows = np.array([[np.inf, 0, 1], [-np.inf] * 3, [1, 2, 3], [-np.inf, 0, -np.inf], [0, np.nan, np.inf]])
    node = helper.make_node("ReduceLogSumExp", ["x", "axis"], ["y"], keepdims=kept)
    outputs = {"y": (dtype, (5, 1) if kept else (5,))}
    model = make_model([node], {"x": (dtype, (5, 3))}, outputs, {"axis": np.array([1])}, opset=18)
    (got,) = run_lowered(lower(import_model(model), UNOPTIMISED), {"x": rows.astype(dtype)})
    assert got.shape == ((5, 1) if kept else (5,))
    want = np.array([np.inf, -np.inf, 3.4076059644443806, 0, np.nan])
    np.testing.assert_allclose(got.astype("float64").ravel(), want, rtol=1e-3 if dtype == "float16" else 1e-6)


def test_the_logarithm_of_a_sum_of_no_integers_is_folded() -> None:
    """It is -inf, which no integer of Python is: folding it must not fail."""
    node = helper.make_node("ReduceLogSum", ["x"], ["y"], keepdims=0)
    model = make_model([node], {"x": ("int64", (2, 0, 3))}, {"y": ("int64", ())}, opset=18)
    lowered = lower(import_model(model), UNOPTIMISED)
    assert not [report.failure for report in lowered.reports if report.failure]
    feeds = {"x": np.zeros((2, 0, 3), "int64")}
    np.testing.assert_array_equal(run_lowered(lowered, feeds), run_reference(model, feeds))


@pytest.mark.parametrize(
    ("keys", "checked"), [("length", False), ("past + length", False), ("past", True), ("2*length", False)]
)
def test_a_reduction_is_checked_for_no_elements_where_its_result_may_have_some(keys: str, checked: bool) -> None:
    """A mask of [queries, keys] has no fewer keys than queries: sums over keys stay what TVM can fuse after others."""
    graph = make_model(
        [helper.make_node("ReduceSum", ["mask", "last"], ["y"], keepdims=1)],
        {"mask": ("float32", ("batch", "length", keys)), "past": ("float32", ("past",))},
        {"y": ("float32", ("batch", "length", 1))},
        {"last": np.array([-1])},
    )
    lowered = lower(import_model(graph), UNOPTIMISED)
    assert ("unless_none" in str(lowered.mod)) == checked
