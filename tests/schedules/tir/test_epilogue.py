from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.ir.expr import TensorLoad

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.tir.epilogue import MatmulFunction, gate_column
from relaxtune.schedules.tir.expressions import substitute
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.matmul_cases import MatmulCase

PLAIN = MatmulCase((4, 6), 24, 16)
ALL = replace(PLAIN, epilogue=("bias", "gelu", "row_scale", "residual"), output="float32")


def recognised(case: MatmulCase) -> MatmulFunction:
    found = recognise_matmul(case.func())
    assert isinstance(found, MatmulFunction), found
    return found


def refused(func: tirx.PrimFunc) -> str:
    found = recognise_matmul(func)
    assert isinstance(found, Refusal)
    return found.reason


def test_leading_axes_are_rows() -> None:
    found = recognised(PLAIN)
    assert (found.m, found.n, found.k) == (24, 24, 16)
    assert (found.a, found.b, found.output) == (0, 1, 2)
    assert (found.input_dtype, found.output_dtype, found.b_transposed) == ("float16", "float16", False)
    assert recognised(replace(PLAIN, transposed=True)).b_transposed


def test_matmul_alone_has_the_accumulator_as_epilogue() -> None:
    found = recognised(replace(PLAIN, output="float32"))
    assert found.epilogue.value.same_as(found.epilogue.accumulator)
    assert found.epilogue.loads() == ()


def test_external_loads_are_told_apart_and_counted_once() -> None:
    epilogue = recognised(ALL).epilogue
    kinds = {
        str(load.source.name): (epilogue.is_aligned(load), epilogue.is_per_column(load)) for load in epilogue.loads()
    }
    assert kinds == {"bias": (False, True), "residual": (True, False), "scale": (False, False)}
    assert len(epilogue.loads()) == 3


def test_inlined_epilogue_computes_what_the_blocks_do() -> None:
    """Both forms run on the CPU over the same float32 accumulators."""
    func = ALL.func()
    found = recognise_matmul(func)
    assert isinstance(found, MatmulFunction)
    epilogue = found.epilogue
    rng = np.random.default_rng(0)
    shapes = [tuple(int(size) for size in param.ty.shape) for param in func.params]
    arrays = [rng.normal(size=s).astype(str(p.ty.dtype)) for s, p in zip(shapes, func.params, strict=True)]
    whole = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"](*whole)

    total = te.placeholder(epilogue.shape, "float32", name="total")
    inputs = {
        param: te.placeholder(shape, str(param.ty.dtype), name=str(param.name))
        for param, shape in zip(func.params, shapes, strict=True)
    }

    def value(*axes: tirx.Var) -> tirx.Expr:
        known = dict(zip(epilogue.axes, axes, strict=True)) | {epilogue.accumulator: total(*axes)}
        moved = tvm_ffi.structural_map(
            epilogue.value,
            (TensorLoad, lambda load: inputs[load.source](*load.indices) if load.source in inputs else load),
        )
        return substitute(moved, known)

    result = te.compute(epilogue.shape, value)
    used = [inputs[param] for param in func.params[2:-1]]
    inlined = te.create_prim_func([total, *used, result], index_dtype_override="int64")
    a, b = (array.astype("float32") for array in arrays[:2])
    output = tvm.runtime.tensor(np.full(epilogue.shape, np.nan, "float32"))
    module = tvm.compile(tvm.IRModule({"main": inlined.with_attr("global_symbol", "main")}), target="llvm")
    module["main"](tvm.runtime.tensor(a @ b), *(tvm.runtime.tensor(array) for array in arrays[2:-1]), output)
    np.testing.assert_allclose(output.numpy(), whole[-1].numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(PLAIN, accumulator="float16"), "the accumulator is float16, expected float32"),
        (replace(PLAIN, epilogue=("shifted",)), "at another position than it writes"),
        (replace(PLAIN, epilogue=("summed",)), "found 2 among 3 blocks"),
        (replace(PLAIN, epilogue=("squared",) * 9), "operations when inlined, more than 600"),
    ],
)
def test_recognise_says_why_not(case: MatmulCase, message: str) -> None:
    assert message in refused(case.func())


def test_gates_and_values_interleaved_by_eight_columns_are_two_accumulators() -> None:
    found = recognised(replace(PLAIN, n=32, epilogue=("gated", "bias"), output="float32"))
    epilogue = found.epilogue
    assert (found.n, found.columns, epilogue.accumulators, epilogue.shape) == (32, 16, 2, (4, 6, 16))
    both: list[tirx.Var] = []
    tvm_ffi.structural_walk(epilogue.value, (tirx.Var, both.append))
    assert any(var.same_as(epilogue.accumulator) for var in both)
    assert any(var.same_as(epilogue.second) for var in both)


def test_halves_of_the_columns_are_not_taken_for_interleaved() -> None:
    """silu(x[:, :8]) * x[:, 8:]: a thread has only one of the two columns."""
    a, b = te.placeholder((4, 8), "float16", name="a"), te.placeholder((8, 32), "float16", name="b")
    k = te.reduce_axis((0, 8))
    total = te.compute(
        (4, 32), lambda m, n: te.sum(a[m, k].astype("float32") * b[k, n].astype("float32"), axis=k), name="total"
    )
    func = te.create_prim_func([a, b, te.compute((4, 16), lambda m, c: total[m, c] * total[m, c + 16])])
    assert "at another position than it writes" in refused(func)


def test_gates_alone_are_refused() -> None:
    a, b = te.placeholder((4, 8), "float16", name="a"), te.placeholder((8, 32), "float16", name="b")
    k = te.reduce_axis((0, 8))
    total = te.compute(
        (4, 32), lambda m, n: te.sum(a[m, k].astype("float32") * b[k, n].astype("float32"), axis=k), name="total"
    )
    func = te.create_prim_func([a, b, te.compute((4, 16), lambda m, c: total[m, gate_column(c)])])
    assert refused(func) == "the epilogue reads half of the matmul's columns"


def test_elementwise_function_is_no_matmul() -> None:
    x = te.placeholder((4, 4), "float16", name="x")
    func = te.create_prim_func([x, te.compute((4, 4), lambda i, j: x[i, j] + x[i, j])])
    assert "expected one reduction, found 0" in refused(func)


def test_batched_matmul_is_refused() -> None:
    a, b = (te.placeholder((2, 8, 8), "float16", name=name) for name in "ab")
    k = te.reduce_axis((0, 8))

    def product(i: tirx.Var, m: tirx.Var, n: tirx.Var) -> tirx.Expr:
        return te.sum(a[i, m, k].astype("float32") * b[i, k, n].astype("float32"), axis=k)

    assert "a batched matmul has its own template" in refused(
        te.create_prim_func([a, b, te.compute((2, 8, 8), product)])
    )


def test_symbolic_shape_is_refused() -> None:
    m = te.var("m", "int64")
    x = te.placeholder((m, 4), "float32", name="x")
    func = te.create_prim_func([x, te.compute((m, 4), lambda i, j: x[i, j])], index_dtype_override="int64")
    assert refused(func) == "a parameter is no tensor of static shape"


def test_sum_of_one_operand_is_refused() -> None:
    x = te.placeholder((4, 8), "float32", name="x")
    k = te.reduce_axis((0, 8))
    func = te.create_prim_func([x, te.compute((4,), lambda i: te.sum(x[i, k], axis=k))])
    assert "is not a sum of products of two operands" in refused(func)


def test_two_outputs_are_refused() -> None:
    a, b = (te.placeholder((8, 8), "float16", name=name) for name in "ab")
    k = te.reduce_axis((0, 8))
    total = te.compute(
        (8, 8), lambda m, n: te.sum(a[m, k].astype("float32") * b[k, n].astype("float32"), axis=k), name="total"
    )
    twice = te.compute((8, 8), lambda m, n: total[m, n] * 2.0, name="twice")
    assert "one output" in refused(te.create_prim_func([a, b, total, twice]))


def product(left: list[int], right: list[int], dtypes: tuple[str, str] = ("float16", "float16")) -> tirx.PrimFunc:
    """Return a product over the axes m, n, k (0, 1, 2) that index the operands."""
    a, b = (te.placeholder((8, 8), dtype, name=name) for name, dtype in zip("ab", dtypes, strict=True))
    k = te.reduce_axis((0, 8))

    def total(*axes: tirx.Var) -> tirx.Expr:
        three = (*axes, k.var)
        x, y = a[three[left[0]], three[left[1]]], b[three[right[0]], three[right[1]]]
        return te.sum(x.astype("float32") * y.astype("float32"), axis=k)

    return te.create_prim_func([a, b, te.compute((8, 8), total)])


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (product([2, 0], [2, 1]), "the left operand is not indexed as [rows..., k]"),
        (product([0, 2], [2, 0]), "the right operand is neither [k, n] nor [n, k]"),
        (product([0, 2], [2, 1], ("float16", "bfloat16")), "the operands' dtypes differ: ['bfloat16', 'float16']"),
    ],
)
def test_operands_of_another_form_are_refused(func: tirx.PrimFunc, message: str) -> None:
    assert message in refused(func)


def test_scheduled_function_is_refused() -> None:
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": PLAIN.func()}))
    block = schedule.get_sblock("matmul", "main")
    schedule.split(schedule.get_loops(block)[-1], [None, 4])
    assert "is scheduled already" in refused(schedule.mod["main"])


def test_transposed_output_is_refused() -> None:
    a, b = (te.placeholder((8, 8), "float16", name=name) for name in "ab")
    k = te.reduce_axis((0, 8))
    total = te.compute((8, 8), lambda m, n: te.sum(a[m, k].astype("float32") * b[k, n].astype("float32"), axis=k))
    turned = te.compute((8, 8), lambda n, m: total[m, n])
    assert "at another position than it writes" in refused(te.create_prim_func([a, b, turned]))


def test_operand_computed_inside_is_refused() -> None:
    a, b = (te.placeholder((8, 8), "float16", name=name) for name in "ab")
    k = te.reduce_axis((0, 8))
    total = te.compute((8, 8), lambda m, n: te.sum(a[m, k].astype("float32") * b[k, n].astype("float32"), axis=k))
    doubled = te.compute((8, 8), lambda i, j: a[i, j] + a[i, j], name="doubled")
    late = te.compute((8, 8), lambda m, n: te.sum(doubled[m, k].astype("float32") * b[k, n].astype("float32"), axis=k))
    assert "an operand is computed inside" in refused(te.create_prim_func([a, b, late]))
    assert isinstance(recognise_matmul(te.create_prim_func([a, b, total])), MatmulFunction)


def test_symbolic_rows_are_recognised_where_asked_for() -> None:
    batch, sequence = (tirx.Var(name, "int64") for name in ("batch", "sequence"))
    func = replace(ALL, rows=(batch, sequence), epilogue=("bias", "gelu", "residual")).func()
    assert "no tensor of static shape" in refused(func)
    found = recognise_matmul(func, rows=128)
    assert isinstance(found, MatmulFunction), found
    assert (found.m, found.n, found.k) == (128, 24, 16)
    assert tvm.sym.Analyzer().can_prove_equal(found.rows, batch * sequence)
    kinds = {
        str(load.source.name): (found.epilogue.is_aligned(load), found.epilogue.is_per_column(load))
        for load in found.epilogue.loads()
    }
    assert kinds == {"bias": (False, True), "residual": (True, False)}
    static = recognise_matmul(ALL.func(), rows=128)
    assert isinstance(static, MatmulFunction)
    assert (static.m, static.rows) == (24, None)
