"""Passes that leave fewer kernels on a GPU: gathers that fuse, norms that widen inside, gates stored rounded."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.passes.kit.state import LoweringState
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import resolve_target
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, graph_of, run_lowered, small_model

FP16 = LoweringOptions(precision="fp16")
TABLE = np.arange(20.0).reshape(5, 4).astype("float32")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make for a CPU what is made for a GPU, to run it here."""
    monkeypatch.setattr(LoweringState, "launches_cost", True)


def notes_of(lowered: LoweredModule, name: str) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == name)


def kernels(lowered: LoweredModule) -> int:
    return sum(map(len, lowered.kernels.values()))


def embeddings() -> OnnxModel:
    f = Form()
    ids, kinds = (f.input(name, "int64", 2, 3) for name in ("ids", "kinds"))
    words = f.op("Gather", TABLE, ids, axis=0)
    total = f.op("Add", f.op("Add", words, f.op("Gather", 10 * TABLE, kinds, axis=0)), f.weight(3, 4))
    return f.model(total, (2, 3, 4))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_gather_rows_makes_one_kernel_of_embeddings_when_indices_are_negative_too() -> None:
    model = embeddings()
    lowered = lower(import_model(model), LLVM)
    assert kernels(lowered) == 1
    feeds = {"ids": np.array([[0, 4, -1], [-5, 2, 1]]), "kinds": np.array([[1, 1, 0], [3, -2, 4]])}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_gather_rows_stays_within_the_table_when_an_index_does_not() -> None:
    def build(b: relax.BlockBuilder, table: relax.Var, ids: relax.Var) -> relax.Expr:
        return relax.op.take(table, ids, axis=0, mode="clip")

    graph = graph_of(build, {"table": ((5, 4), "float32"), "ids": ((2,), "int64")})
    lowered = lower(graph, LLVM)
    assert list(lowered.kernels) == ["gather"]
    (got,) = run_lowered(lowered, {"table": TABLE, "ids": np.array([7, -3])})
    assert_agrees([got], [TABLE[[4, 0]]], 0.0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_gather_rows_keeps_the_bounds_of_indices_known() -> None:
    (task,) = extract_tasks([lower(import_model(embeddings()), resolve_target("cuda:sm_90a").target)])
    assert sorted(task.index_ranges.values()) == [5, 5]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_look_ups_of_elements_are_part_of_what_reads_them(axis: int) -> None:
    f = Form()
    found = f.op("GatherElements", f.op("Sigmoid", f.x(2, 3, 4)), f.input("index", "int64", 2, 3, 2), axis=axis)
    model = f.model(f.op("Tanh", found), (2, 3, 2))
    lowered = lower(import_model(model), LLVM)
    assert kernels(lowered) == 1
    generator = np.random.default_rng(0)
    feeds = {
        "x": generator.standard_normal((2, 3, 4)).astype("float32"),
        "index": generator.integers(-2, 2, (2, 3, 2)),
    }
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_look_ups_by_tuples_of_one_index_are_look_ups_of_rows() -> None:
    f = Form()
    found = f.op("GatherND", TABLE, f.input("index", "int64", 2, 3, 1))
    model = f.model(f.op("Tanh", found), (2, 3, 4))
    lowered = lower(import_model(model), LLVM)
    assert kernels(lowered) == 1
    feeds = {"index": np.array([[0, 4, -1], [-5, 2, 1]])[..., None]}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)
    (task,) = extract_tasks([lower(import_model(model), resolve_target("cuda:sm_90a").target)])
    assert list(task.index_ranges.values()) == [5]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["rows", "rows by tuples", "elements by tuples"])
def test_look_ups_in_tables_of_symbolic_size_are_part_of_what_is_around_them(kind: str) -> None:
    f = Form()
    width = () if kind.startswith("elements") else (4,)
    table = f.op("Sigmoid", f.input("table", "float", "rows", *width))  # type: ignore[arg-type]
    index = f.input("index", "int64", "count", *([1] if kind.endswith("tuples") else []))  # type: ignore[arg-type]
    found = f.op("GatherND" if kind.endswith("tuples") else "Gather", table, index)
    model = f.model(f.op("Tanh", found), ("count", *width))  # type: ignore[arg-type]
    lowered = lower(import_model(model), LLVM)
    assert kernels(lowered) == 1
    generator = np.random.default_rng(0)
    for rows, count in ((1, 1), (1, 4), (5, 1), (3, 7)):
        ids = generator.integers(-rows, rows, (count, *([1] if kind.endswith("tuples") else [])))
        feeds = {"table": generator.standard_normal((rows, *width)).astype("float32"), "index": ids}
        assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_look_ups_wrap_by_the_rows_of_their_own_table_when_another_size_is_added() -> None:
    def build(b: relax.BlockBuilder, table: relax.Var, ids: relax.Var, other: relax.Var) -> relax.Expr:
        size = relax.op.reshape(b.emit(relax.op.shape_to_tensor(relax.ShapeExpr([other.ty.shape.values[0]]))), [])
        negative = b.emit(relax.op.less(ids, relax.const(0, "int64")))
        wrapped = b.emit(relax.op.where(negative, b.emit(relax.op.add(ids, b.emit(size))), ids))
        return relax.op.take(table, wrapped, axis=0, mode="clip")

    rows, others = tirx.Var("rows", "int64"), tirx.Var("others", "int64")
    inputs = {"table": ((rows, 4), "float32"), "ids": ((2,), "int64"), "other": ((others,), "float32")}
    lowered = lower(graph_of(build, inputs), LLVM)
    feeds = {"table": TABLE, "ids": np.array([-3, 1]), "other": np.zeros(4, "float32")}
    assert_agrees(run_lowered(lowered, feeds), [TABLE[[1, 1]]], 0.0)


@pytest.mark.parametrize("operator", ["Gather", "GatherND"])
def test_half_precision_looks_rounded_rows_up_when_a_matmul_reads_them(operator: str) -> None:
    f = Form()
    rows = f.op("Tanh", f.op("MatMul", f.x(6, 8), f.weight(8, 8)))
    index = f.input("index", "int64", 5, *([1] if operator == "GatherND" else []))
    model = f.model(f.op("MatMul", f.op(operator, rows, index), f.weight(8, 4)), (5, 4))
    lowered = lower(import_model(model), LLVM, FP16)
    dtypes = {call: str(lowered.mod[call].params[-1].dtype) for call in lowered.kernels}
    assert list(dtypes.values()).count("float32") == 1, "the result alone"
    generator = np.random.default_rng(0)
    ids = generator.integers(-6, 6, (5, *([1] if operator == "GatherND" else [])))
    feeds = {"x": generator.standard_normal((6, 8)).astype("float32"), "index": ids}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-2)


def test_gather_rows_leaves_more_kernels_when_it_is_off_or_the_target_is_a_cpu() -> None:
    off = LoweringOptions(disabled_passes=frozenset({"gather_rows"}))
    assert kernels(lower(import_model(embeddings()), resolve_target("cuda:sm_90a").target, off)) > 1
    assert kernels(lower(import_model(embeddings()), LLVM)) > 1


@pytest.mark.parametrize("index", [0, 2, -1])
def test_simplify_views_makes_a_slice_of_one_position(index: int) -> None:
    f = Form()
    row = f.op("Gather", f.op("Sigmoid", f.x(2, 3, 4)), np.int64(index), axis=1)
    model = f.model(f.op("Tanh", row), (2, 4))
    lowered = lower(import_model(model), LLVM)
    assert not any("take" in name for name in lowered.kernels)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_norms_of_half_agree_with_onnx_runtime_when_graph_is_half_precision(name: str) -> None:
    model = small_model(name, precision="fp16")
    lowered = lower(import_model(model), LLVM)
    assert notes_of(lowered, "norms_of_half") == ("5 norms widen inside",)
    assert not any(name.startswith("cast") for name in lowered.kernels)
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-2)


@pytest.mark.parametrize("disabled", ["norms_of_half", "gather_rows"])
def test_half_precision_graph_has_more_kernels_when_a_pass_is_off(disabled: str) -> None:
    graph = import_model(small_model("gpt2-tiny", precision="fp16"))
    target = resolve_target("cuda:sm_90a").target
    off = lower(graph, target, LoweringOptions(disabled_passes=frozenset({disabled})))
    assert kernels(off) > kernels(lower(graph, target))


def gated(second: str) -> OnnxModel:
    f = Form()
    x = f.x(2, 3, 8)
    gate = f.op("MatMul", x, f.weight(8, 16))
    gate = f.op("Mul", gate, f.op("Sigmoid", gate))
    up = f.op("MatMul", x, f.weight(8, 16)) if second == "matmul" else gate
    return f.model(f.op("MatMul", f.op("Mul", gate, up), f.weight(16, 8)), (2, 3, 8))


@pytest.mark.parametrize("second", ["matmul", "itself"])
def test_half_precision_stores_nothing_wide_between_the_matmuls_of_a_gate(second: str) -> None:
    model = gated(second)
    lowered = lower(import_model(model), LLVM, FP16)
    dtypes = [str(lowered.mod[name].params[-1].dtype) for name in lowered.kernels]
    assert dtypes.count("float32") == 1, "the result alone"
    # The input's rounding, the factors, the last matmul.
    assert len(dtypes) == kernels(lowered) == (4 if second == "matmul" else 3)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 8)).astype("float32")}
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 2e-2)
