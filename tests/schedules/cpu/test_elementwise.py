from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings, strategies as st
from tvm import te, tirx, topi

from relaxtune.schedules.cpu.base import narrow_partitioned
from relaxtune.schedules.fallback import apply_fallback
from relaxtune.schedules.tir.blocks import static_extent
from relaxtune.schedules.tir.expressions import find_all
from tests.schedules.kernel_cases import Case, check, host, loop_kinds, prim_func, run


def transpose_case(shape: tuple[int, ...], order: tuple[int, ...]) -> Case:
    a = te.placeholder(shape, "float32", name="A")
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    return Case(prim_func([a, topi.transpose(a, order)]), [x], [np.transpose(x, order)])


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_chain_matches_numpy_when_shapes_are_drawn(shape):
    a = te.placeholder(shape, "float32", name="A")
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    out = topi.multiply(topi.exp(topi.add(a, a)), a)
    assert run(Case(prim_func([a, out]), [x], [np.exp(x + x) * x])) == "cpu-elementwise"


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((7, 5, 3), (2, 0, 1)),
        ((1, 12, 33, 8), (0, 2, 1, 3)),
        ((64, 50), (1, 0)),
        ((3, 128, 64), (0, 2, 1)),
        ((64, 5, 128), (1, 2, 0)),
        ((12, 37, 64), (0, 2, 1)),
    ],
)
def test_transpose_matches_numpy_when_axes_are_odd(shape, order):
    assert run(transpose_case(shape, order)) == "cpu-elementwise"


def test_transpose_takes_a_vector_of_rows_along_their_cache_lines():
    case = transpose_case((3, 128, 64), (0, 2, 1))
    script = apply_fallback(case.module, host().target).script(show_meta=False)
    lanes = host().limits.vector_bytes // 4
    assert f"T.parallel(T.int64({3 * 128 // lanes}))" in script
    assert script.index("range(T.int64(64))") < script.index(f"T.vectorized(T.int64({lanes}))")


def test_transpose_takes_a_vector_of_symbolic_rows_along_their_cache_lines():
    """The keys of each head, out of a projection of queries, keys and values; enough heads for all cores."""
    heads, depth = 2 * host().limits.cores, 20
    batch, sequence = te.var("batch", "int64"), te.var("sequence", "int64")
    a = te.placeholder((batch, sequence, 3 * heads * depth), "float32", name="A")
    keys = te.compute(
        (batch, heads, depth, sequence), lambda b, h, d, s: a[b, s, heads * depth + h * depth + d], name="keys"
    )
    func = prim_func([a, keys])
    for b, s in ((1, 1), (2, 37), (1, 64)):
        x = np.random.default_rng(0).standard_normal((b, s, 3 * heads * depth)).astype("float32")
        middle = x[..., heads * depth : 2 * heads * depth].reshape(b, s, heads, depth)
        case = Case(func, [x], [middle.transpose(0, 2, 3, 1)])
        assert run(case) == "cpu-elementwise"
    loops = find_all(apply_fallback(case.module, host().target)["main"].body, tirx.For)
    inside = [loop for loop in loops if static_extent(loop.extent) == depth]
    assert [loop.kind for loop in find_all(inside[0].body, tirx.For)] == [tirx.ForKind.VECTORIZED]


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 5), st.sampled_from([4, 16, 32, 37])),
    order=st.permutations(range(3)),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_transpose_matches_numpy_when_shapes_and_orders_are_drawn(shape, order):
    run(transpose_case(shape, tuple(order)))


def test_transpose_with_a_remainder_is_right_when_its_loops_are_partitioned():
    case = transpose_case((12, 37, 64), (0, 2, 1))
    narrowed = narrow_partitioned(apply_fallback(case.module, host().target))
    assert "pragma_loop_partition_hint" in narrowed.script(show_meta=False)
    check(case, narrowed, host().target)


def test_gather_matches_numpy_when_indices_are_integers():
    table = te.placeholder((50, 24), "float32", name="T")
    index = te.placeholder((3, 5), "int64", name="I")
    x = np.random.default_rng(0).standard_normal((50, 24)).astype("float32")
    i = np.random.default_rng(1).integers(0, 50, (3, 5))
    func = prim_func([table, index, topi.take(table, index, axis=0, mode="fast")])
    assert run(Case(func, [x, i], [x[i]])) == "cpu-elementwise"


def test_add_matches_numpy_when_the_shape_is_symbolic():
    n, m = te.var("n", "int64"), te.var("m", "int64")
    a = te.placeholder((n, m), "float32", name="A")
    func = prim_func([a, topi.add(a, tirx.const(1.0, "float32"))])
    for shape in ((1, 1), (3, 50), (40, 700)):
        x = np.random.default_rng(0).standard_normal(shape).astype("float32")
        run(Case(func, [x], [x + 1]))


def test_costly_value_is_kept_when_two_stages_read_it():
    a = te.placeholder((8, 40), "float32", name="A")
    e = topi.exp(a)
    func = prim_func([a, topi.add(e, a), topi.multiply(e, a)])
    x = np.random.default_rng(0).standard_normal((8, 40)).astype("float32")
    case = Case(func, [x], [np.exp(x) + x, np.exp(x) * x])
    run(case)
    assert apply_fallback(case.module, host().target).script(show_meta=False).count("T.exp") == 1


def test_flat_tensor_is_shared_among_cores_when_it_is_large():
    a = te.placeholder((100_003,), "float32", name="A")
    x = np.random.default_rng(0).standard_normal(100_003).astype("float32")
    case = Case(prim_func([a, topi.nn.relu(a)]), [x], [np.maximum(x, 0)])
    run(case)
    assert loop_kinds(apply_fallback(case.module, host().target)) >= {"parallel", "vectorized"}


def test_scalar_matches_numpy_when_there_are_no_loops():
    a = te.placeholder((), "float32", name="A")
    func = prim_func([a, topi.multiply(a, tirx.const(2.0, "float32"))])
    run(Case(func, [np.float32(3.0).reshape(())], [np.float32(6.0).reshape(())]))


def rotary_case(positions: int, heads: int, head_dim: int, dtype: str = "float32") -> Case:
    shape, half = (2, positions, heads * head_dim), head_dim // 2
    x, cos, sin = (
        te.placeholder((*shape[:2], size), dtype, name=name)
        for name, size in (("X", shape[2]), ("C", half), ("S", half))
    )
    rows = topi.transpose(topi.reshape(x, (*shape[:2], heads, head_dim)), (0, 2, 1, 3))
    low, high = (topi.strided_slice(rows, [at], [at + half], [1], axes=[3]) for at in (0, half))
    wide_cos, wide_sin = topi.expand_dims(cos, 1), topi.expand_dims(sin, 1)
    turned = topi.concatenate([low * wide_cos - high * wide_sin, high * wide_cos + low * wide_sin], axis=3)
    out = topi.reshape(topi.transpose(turned, (0, 2, 1, 3)), shape)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((*shape[:2], size)).astype(dtype) for size in (shape[2], half, half)]
    wide = inputs[0].astype("float32").reshape(*shape[:2], heads, head_dim)
    a, b = wide[..., :half], wide[..., half:]
    c, s = (table.astype("float32")[:, :, None] for table in inputs[1:])
    expected = np.concatenate([a * c - b * s, b * c + a * s], -1).reshape(shape).astype(dtype)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    return Case(prim_func([x, cos, sin, out]), inputs, [expected], tolerance, tolerance)


@pytest.mark.parametrize(
    ("positions", "heads", "head_dim", "dtype"),
    [(3, 4, 4, "float32"), (3, 4, 8, "float32"), (16, 3, 8, "float32"), (3, 4, 16, "float32"), (3, 4, 16, "float16")],
)
def test_rotary_embedding_matches_numpy_when_a_vector_covers_several_heads(positions, heads, head_dim, dtype):
    assert run(rotary_case(positions, heads, head_dim, dtype)) == "cpu-elementwise"


@pytest.mark.parametrize(
    ("head_dim", "mcpu", "kind"),
    [
        (8, "znver5", "unroll"),
        (8, "skylake-avx512", "unroll"),
        (4, "haswell", "unroll"),
        (16, "znver5", "vectorized"),
        (64, "znver5", "vectorized"),
    ],
)
def test_vector_is_unrolled_only_when_it_wraps_within_its_lanes(head_dim, mcpu, kind):
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})
    script = apply_fallback(rotary_case(128, 12, head_dim).module, target).script(show_meta=False)
    assert [word for word in ("unroll", "vectorized") if f"T.{word}(" in script] == [kind]


def maximum_beside_branches_case(rows: int, columns: int, length: int) -> Case:
    """Return max(x, c), which asks for NaN, in the first rows, and c in the others; c is read again by each vector."""
    x = te.placeholder((rows, columns, length), "float32", name="x")
    c = te.placeholder((2 * rows, 1, length), "float32", name="c")
    shape = (2 * rows, columns, length)
    joined = te.compute(
        shape, lambda i, j, k: tirx.if_then_else(i < rows, x[i, j, k], c[i - rows, 0, k]), name="joined"
    )

    def larger(i: tirx.Var, j: tirx.Var, k: tirx.Var) -> tirx.Expr:
        value, other = joined[i, j, k], c[i, 0, k]
        return tirx.Select(tirx.Or(other < value, tirx.isnan(value)), value, other)

    rng = np.random.default_rng(0)
    data, other = (rng.standard_normal([int(d) for d in t.shape]).astype("float32") for t in (x, c))
    both = np.concatenate([data, np.broadcast_to(other[:rows], data.shape)])
    return Case(prim_func([x, c, te.compute(shape, larger, name="larger")]), [data, other], [np.maximum(both, other)])


def shifted_beside_branches_case(rows: int, columns: int, length: int) -> Case:
    """Return min(c, the row before), or x in the last rows: a branch by an axis that the vector runs over, too."""
    x = te.placeholder((rows, columns, length), "float32", name="x")
    c = te.placeholder((rows, 1, length), "float32", name="c")
    shape = (2 * rows, columns, length)

    def shifted(i: tirx.Var, j: tirx.Var, k: tirx.Var) -> tirx.Expr:
        return tirx.if_then_else(j > 0, x[i, j - 1, k], x[i, j, k])

    joined = te.compute(
        shape, lambda i, j, k: tirx.if_then_else(rows <= i, x[i - rows, j, k], shifted(i, j, k)), name="joined"
    )

    def smaller(i: tirx.Var, j: tirx.Var, k: tirx.Var) -> tirx.Expr:
        value, other = joined[i, j, k], c[i % rows, 0, k]
        return tirx.Select(value < other, value, other)

    rng = np.random.default_rng(0)
    data, other = (rng.standard_normal([int(d) for d in t.shape]).astype("float32") for t in (x, c))
    moved = np.concatenate([data[:, :1], data[:, :-1]], 1)
    want = np.minimum(np.concatenate([moved, data]), np.concatenate([other, other]))
    return Case(prim_func([x, c, te.compute(shape, smaller, name="smaller")]), [data, other], [want])


@pytest.mark.parametrize("make", [maximum_beside_branches_case, shifted_beside_branches_case])
@pytest.mark.parametrize("shape", [(2, 7, 4), (3, 5, 8), (3, 10, 4)])
def test_vector_reads_no_more_than_its_rows_when_it_becomes_a_scalar_loop_with_branches(make, shape):
    case = make(*shape)
    check(case, narrow_partitioned(apply_fallback(case.module, host().target)), host().target)
