from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import te

from relaxtune.models import load_model
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.tasks import sizes_of_tables
from relaxtune.pipeline.tasks.extract import extract_tasks, list_untunable, untunable_reason
from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec, make_arrays
from relaxtune.pipeline.tuning.measure.wrong_result import find_mismatch
from relaxtune.pipeline.validate.tolerances import KernelTolerance
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.tir.index_ranges import ALL_BYTES, index_ranges
from relaxtune.schedules.tir.signature import describe_kernel
from tests.pipeline.tuning.tuning_cases import Place, add_one_mod, extern_mod, matmul_mod


@pytest.fixture(scope="module")
def bert(place: Place) -> LoweredModule:
    return lower(import_model(load_model("bert-tiny")), place.target.target, LoweringOptions())


def test_templates_are_not_asked_for_tables_that_nobody_tunes(
    bert: LoweredModule, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes_of_tables, "called_kernels", None)
    assert sizes_of_tables.tasks_of_tables(bert, (), place.target) == ()


def fields(func: tvm.tirx.PrimFunc) -> dict[str, object]:
    return dict(json.loads(describe_kernel(func).signature))


def primfunc(inputs: list[te.Tensor], output: te.Tensor) -> tvm.tirx.PrimFunc:
    return te.create_prim_func([*inputs, output])


def test_extract_tasks_covers_every_kernel_once(bert: LoweredModule) -> None:
    tasks = extract_tasks([bert])
    assert len({task.workload_hash for task in tasks}) == len(tasks)
    assert len({task.name for task in tasks}) == len(tasks)
    untunable = {kernel.name for kernel in list_untunable([bert])}
    covered = {name for task in tasks for name in task.functions[bert.graph.name]}
    assert covered | untunable == set(bert.kernels)
    calls = sum(len(calls) for name, calls in bert.kernels.items() if name not in untunable)
    assert sum(task.weight for task in tasks) == calls
    families = {task.family for task in tasks}
    assert "matmul" in families
    assert all(task.onnx_nodes for task in tasks if task.family == "matmul")
    assert [t.weight * t.flops for t in tasks] == sorted((t.weight * t.flops for t in tasks), reverse=True)


def test_extract_tasks_merges_equal_kernels_of_several_models(bert: LoweredModule) -> None:
    once, twice = extract_tasks([bert]), extract_tasks([bert, bert])
    assert [task.workload_hash for task in once] == [task.workload_hash for task in twice]
    assert [2 * task.weight for task in once] == [task.weight for task in twice]


def test_extract_tasks_bounds_embedding_indices_by_the_table(bert: LoweredModule) -> None:
    found = {task.name: task for task in extract_tasks([bert]) if task.family == "gather"}
    words, segments = (found[name] for name in ("take", "take1"))
    vocabulary = int(words.mod["main"].params[0].shape[0])
    assert vocabulary > 2
    assert words.index_ranges == {1: vocabulary}
    assert segments.index_ranges == {1: 2}


def test_signature_of_a_matmul_names_sizes_and_layout() -> None:
    found = fields(matmul_mod(8, 16, 4)["main"])
    assert found["family"] == "matmul"
    assert (found["m"], found["k"], found["n"], found["batch"]) == (8, 16, 4, 1)
    assert (found["trans_a"], found["trans_b"], found["acc_dtype"]) == (False, False, "float32")
    assert found["epilogue"] == []


def test_signature_of_a_transposed_batch_matmul_with_epilogue() -> None:
    a = te.placeholder((3, 8, 16), "float16", name="A")
    b = te.placeholder((3, 4, 16), "float16", name="B")
    bias = te.placeholder((4,), "float32", name="bias")
    residual = te.placeholder((3, 8, 4), "float32", name="residual")
    k = te.reduce_axis((0, 16), name="k")
    dot = te.compute(
        (3, 8, 4),
        lambda z, i, j: te.sum(a[z, i, k].astype("float32") * b[z, j, k].astype("float32"), axis=k),
        name="dot",
    )
    shifted = te.compute((3, 8, 4), lambda z, i, j: dot[z, i, j] + bias[j], name="shift")
    out = te.compute((3, 8, 4), lambda z, i, j: te.exp(shifted[z, i, j]) + residual[z, i, j], name="out")
    found = fields(primfunc([a, b, bias, residual], out))
    assert found["family"] == "batch_matmul"
    assert (found["batch"], found["m"], found["n"], found["k"]) == (3, 8, 4, 16)
    assert (found["trans_a"], found["trans_b"]) == (False, True)
    assert (found["a"], found["acc_dtype"]) == (["p0", "float16"], "float32")
    steps = found["epilogue"]
    assert [step["op"] for step in steps] == ["add", "add"]
    assert [step["operands"][0]["role"] for step in steps] == ["bias", "residual"]
    assert "exp(" in steps[1]["expr"][0]


def test_signature_differs_when_the_epilogue_does() -> None:
    a = te.placeholder((8,), name="A")

    def scaled(factor: float) -> str:
        return describe_kernel(primfunc([a], te.compute((8,), lambda i: a[i] * factor))).signature

    assert scaled(0.5) == scaled(0.5)
    assert scaled(0.5) != scaled(0.25)


def _sum(a: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, 8), name="k")
    return te.compute((4,), lambda i: te.sum(a[i, k], axis=k))


def _norm(a: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, 8), name="k")
    squares = te.compute((4,), lambda i: te.sum(a[i, k] * a[i, k], axis=k))
    return te.compute((4, 8), lambda i, j: a[i, j] * te.rsqrt(squares[i]))


def _softmax(a: te.Tensor) -> te.Tensor:
    return tvm.topi.nn.softmax(a, axis=-1)


def _transpose(a: te.Tensor) -> te.Tensor:
    return te.compute((8, 4), lambda i, j: a[j, i])


def _relu(a: te.Tensor) -> te.Tensor:
    return te.compute((4, 8), lambda i, j: te.max(a[i, j], 0.0))


@pytest.mark.parametrize(
    ("make", "family"),
    [(_sum, "reduction"), (_norm, "norm"), (_softmax, "softmax"), (_transpose, "layout"), (_relu, "elementwise")],
)
def test_signature_tells_the_family(make: object, family: str) -> None:
    a = te.placeholder((4, 8), name="A")
    assert callable(make)
    assert describe_kernel(primfunc([a], make(a))).family == family


@pytest.mark.parametrize(
    ("index", "bound"),
    [
        (lambda i: i, 100),
        (lambda i: i.astype("int32"), 100),
        (lambda i: tvm.tirx.Select(i < 0, i + 100, i), 100),
        (lambda i: i * 10 + 3, 10),
        (lambda i: tvm.tirx.min(i, 99), 100),
        (lambda i: i // 3, 1),
    ],
)
def test_index_ranges_follow_the_index_expression(index: object, bound: int) -> None:
    table = te.placeholder((100, 4), name="table")
    ids = te.placeholder((6,), "int64", name="ids")
    assert callable(index)
    out = te.compute((6, 4), lambda i, j: table[index(ids[i]), j])
    func = primfunc([table, ids], out)
    assert describe_kernel(func).family == "gather"
    assert index_ranges(func) == {1: bound}


def test_operands_of_integer_matmuls_are_all_integers_of_8_bits() -> None:
    a, b = te.placeholder((8, 64), "uint8", name="a"), te.placeholder((64, 8), "int8", name="b")
    k = te.reduce_axis((0, 64), name="k")
    total = te.compute((8, 8), lambda i, j: te.sum(a[i, k].astype("int32") * b[k, j].astype("int32"), axis=k))
    ranges = index_ranges(te.create_prim_func([a, b, total]))
    assert ranges == {0: ALL_BYTES, 1: ALL_BYTES}
    specs = [ArgumentSpec((64, 64), "uint8"), ArgumentSpec((64, 64), "int8")]
    unsigned, signed = make_arrays(specs, ranges, seed=0)
    assert (unsigned.min(), unsigned.max()) == (0, 255)
    assert (signed.min(), signed.max()) == (-128, 127)


def test_index_ranges_follow_intermediates_and_leave_masks_at_two() -> None:
    table = te.placeholder((50, 4), name="table")
    ids = te.placeholder((6,), "int64", name="ids")
    mask = te.placeholder((6,), "bool", name="mask")
    cast = te.compute((6,), lambda i: ids[i].astype("int32"), name="cast")
    out = te.compute((6, 4), lambda i, j: tvm.tirx.Select(mask[i], table[cast[i], j], 0.0))
    assert index_ranges(primfunc([table, ids, mask], out)) == {1: 50, 2: 2}


def test_untunable_reason_names_the_cause(place: Place) -> None:
    n = te.var("n")
    a = te.placeholder((n,), name="A")
    symbolic = primfunc([a], te.compute((n,), lambda i: a[i] + 1.0))
    assert "the size of its parameter A, n, is known at run time only" in str(untunable_reason(symbolic))
    scheduled = apply_fallback(add_one_mod(), place.target.target)["main"]
    assert untunable_reason(scheduled) == "it is already scheduled"
    assert untunable_reason(matmul_mod()["main"]) is None


def test_make_arrays_stays_in_range_and_is_repeatable() -> None:
    specs = [ArgumentSpec((50,), "int64"), ArgumentSpec((50,), "bool"), ArgumentSpec((4, 8), "bfloat16")]
    first, again, other = (make_arrays(specs, {0: 7}, seed) for seed in (1, 1, 2))
    assert first[0].min() >= 0
    assert first[0].max() == 6
    assert first[1].dtype == np.bool_
    assert first[2].dtype.name == "bfloat16"
    assert np.abs(first[2].astype(np.float32)).max() <= 1
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert (first[0] != other[0]).any()


@pytest.mark.parametrize(
    ("output", "expected", "found"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([1.0, 2.1], [1.0, 2.0], "1 of 2 elements are off"),
        ([1.0, np.nan], [1.0, 2.0], "1 of 2 elements are off"),
        ([np.nan, np.inf], [np.nan, np.inf], None),
        ([-np.inf, 0.0], [np.inf, 0.0], "1 of 2 elements are off"),
        ([1.0, 0.0], [np.inf, 0.0], "1 of 2 elements are off"),
    ],
)
def test_find_mismatch_of_floats(output: list[float], expected: list[float], found: str | None) -> None:
    told = find_mismatch(np.array(output, np.float32), np.array(expected, np.float32), KernelTolerance(1e-5, 1e-5))
    assert (told is None) == (found is None)
    assert found is None or found in str(told)


def test_find_mismatch_of_integers_is_exact() -> None:
    loose = KernelTolerance(1.0, 1.0)
    assert find_mismatch(np.array([1, 2]), np.array([1, 2]), loose) is None
    assert "1 of 2 integers differ, first at (1,)" in str(find_mismatch(np.array([1, 3]), np.array([1, 2]), loose))


def test_extern_calls_inside_blocks_stay_tunable() -> None:
    assert untunable_reason(extern_mod("abs", 1)["main"]) is None
