"""Every CPU rule at sizes known only at run time: one, primes, and a vector or tile more or less one.

A wrong number is the worst a schedule can do, and it hides where memory happens to hold the right value: see
`agreement` for how each kernel is compared with the unscheduled one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings, strategies as st
from tvm import te, tirx, topi
from tvm.ir import Call
from tvm.script import ir as I, tirx as T

from relaxtune.schedules.cpu.any_size import matmul as any_size_matmul
from relaxtune.schedules.cpu.any_size.row_tiles import parts_of_rows
from relaxtune.schedules.cpu.packing import packed_matmul
from relaxtune.schedules.fallback import apply_fallback, fallback_with_rules
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.tir.blocks import static_extent
from relaxtune.schedules.tir.expressions import find_all
from tests.schedules.agreement import Pair, assert_pair_agrees, build_pair, symbols_of
from tests.schedules.kernel_cases import conv1d_symbolic, conv2d_symbolic, host, matmul_case, prim_func, rows_case

SIZES = (1, 2, 7, 13, 15, 16, 17, 31, 32, 33, 47, 65)
NARROW = '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}'


@I.ir_module
class PastTheEnd:
    @T.prim_func(s_tir=True)
    def main(a: T.handle, b: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        n = T.int64()
        A = T.match_buffer(a, (n,))
        B = T.match_buffer(b, (n,))
        for i in range(n + T.int64(1)):
            with T.sblock("B"):
                v = T.axis.spatial(n + T.int64(1), i)
                B[v] = A[T.min(v, n - T.int64(1))] + T.float32(1)


def size(name: str) -> tirx.Var:
    return te.var(name, "int64")


def masked_softmax(last: int | None = None) -> tirx.PrimFunc:
    """Attention weights as PyTorch exports them: softmax, and 0 where a row of -inf made it NaN."""
    sequence = size("s")
    scores = te.placeholder((size("b"), 4, sequence, last or sequence), "float32", name="scores")
    weights = topi.nn.softmax(scores)
    guarded = te.compute(
        weights.shape,
        lambda *i: tirx.if_then_else(tirx.isnan(weights[i]), tirx.const(0.0, "float32"), weights[i]),
        name="where",
    )
    return prim_func([scores, guarded])


def attention_scores(transposed: bool) -> tirx.PrimFunc:
    batch, rows, columns = size("b"), size("s"), size("t")
    a = te.placeholder((batch, 4, rows, 16), "float32", name="A")
    w = te.placeholder((batch, 4, columns, 16) if transposed else (batch, 4, 16, columns), "float32", name="W")
    mask = te.placeholder((batch, 1, 1, columns), "float32", name="mask")
    k = te.reduce_axis((0, 16), "k")
    scores = te.compute(
        (batch, 4, rows, columns),
        lambda i, h, m, n: te.sum(a[i, h, m, k] * (w[i, h, n, k] if transposed else w[i, h, k, n]), axis=k),
        name="scores",
    )
    return prim_func([a, w, mask, topi.add(scores, mask)])


def attention(width: int, masked: bool, projected: int = 0) -> tirx.PrimFunc:
    """Two matmuls and the softmax between them; the result has its heads behind its rows.

    Q may be a slice of rows of so many elements.
    """
    batch, rows, columns = size("b"), size("s"), size("t")
    source = te.placeholder((batch, rows, projected) if projected else (batch, 2, rows, 20), "float32", name="Q")
    q = te.compute((batch, 2, rows, 20), lambda i, h, m, n: source[i, m, h * 20 + n + 7]) if projected else source
    w = te.placeholder((batch, 2, 20, columns), "float32", name="K")
    v = te.placeholder((batch, 2, columns, width), "float32", name="V")
    mask = te.placeholder((batch, 1, rows, columns), "float32", name="mask")
    scores = topi.divide(topi.nn.matmul(q, w), tirx.const(4.0, "float32"))
    hidden = te.compute(
        scores.shape,
        lambda i, h, m, n: tirx.Select(mask[i, 0, m, n] > 0, scores[i, h, m, n], tirx.const(-1e9, "float32")),
        name="hidden",
    )
    weights = topi.nn.softmax(hidden if masked else scores)
    k = te.reduce_axis((0, columns), "k")
    result = te.compute(
        (batch, rows, 2, width), lambda i, m, h, n: te.sum(weights[i, h, m, k] * v[i, h, k, n], axis=k), name="result"
    )
    return prim_func([source, w, v, *([mask] if masked else []), result])


def reduced(axes: list[int], dtype: str = "float32") -> tirx.PrimFunc:
    a = te.placeholder((size("b"), size("s"), 33), dtype, name="A")
    return prim_func([a, topi.sum(a, axes)])


def largest(axis: int) -> tirx.PrimFunc:
    a = te.placeholder((size("b"), size("s")), "float32", name="A")
    return prim_func([a, topi.argmax(a, axis)])


def joined(axis: int) -> tirx.PrimFunc:
    shape = (size("b"), size("s"), 24)
    a, b = (te.placeholder(shape, "float32", name=name) for name in "AB")
    return prim_func([a, b, topi.concatenate([topi.exp(a), b], axis)])


def moved(axes: tuple[int, ...]) -> tirx.PrimFunc:
    a = te.placeholder((size("b"), size("s"), size("h")), "float32", name="A")
    return prim_func([a, topi.transpose(a, axes)])


def packed(columns: int, length: int) -> tirx.PrimFunc:
    x = te.placeholder((size("b"), size("s"), length), "float32", name="x")
    weight = te.placeholder((-(-columns // 32), length, 32), "float32", name="packed")
    return prim_func([x, weight, packed_matmul(columns)(x, weight)])


def looked_up() -> tirx.PrimFunc:
    table = te.placeholder((70, 100), "float32", name="table")
    indices = te.placeholder((size("b"), size("s")), "int64", name="indices")
    return prim_func([table, indices, topi.take(table, indices, 0, mode="clip")])


KERNELS: dict[str, tuple[str, Callable[[], tirx.PrimFunc]]] = {
    "softmax, isnan, where": ("cpu-any-size-rows", masked_softmax),
    "softmax over 100": ("cpu-reduction", lambda: masked_softmax(100)),
    "layer norm": ("cpu-any-size-rows", lambda: rows_case("layer_norm", 1, 1, "rl").func),
    "layer norm over 100": ("cpu-reduction", lambda: rows_case("layer_norm", 1, 100, "r").func),
    "rms norm": ("cpu-any-size-rows", lambda: rows_case("rms_norm", 1, 1, "rl").func),
    "max": ("cpu-reduction", lambda: rows_case("max", 1, 1, "rl").func),
    "sum of two axes": ("cpu-reduction", lambda: reduced([1, 2])),
    "sum of integers": ("cpu-reduction", lambda: reduced([2], "int64")),
    "sum of the first axis": ("cpu-reduction", lambda: reduced([0])),
    "sum of everything": ("cpu-generic", lambda: reduced([0, 1, 2])),
    "argmax": ("cpu-generic", lambda: largest(1)),
    "matmul m": ("cpu-any-size-matmul", lambda: matmul_case(1, 64, 32, epilogue="gelu", symbolic="m").func),
    "matmul m, odd n": ("cpu-any-size-matmul", lambda: matmul_case(1, 53, 32, epilogue="bias", symbolic="m").func),
    "matmul n": ("cpu-any-size-matmul", lambda: matmul_case(5, 1, 20, epilogue="gelu", symbolic="n").func),
    "matmul k": ("cpu-matmul", lambda: matmul_case(37, 48, 1, transposed=True, symbolic="k").func),
    "matmul all": ("cpu-any-size-matmul", lambda: matmul_case(1, 1, 1, batch=2, symbolic="mnk").func),
    "scores": ("cpu-any-size-matmul", lambda: attention_scores(transposed=False)),
    "scores, transposed": ("cpu-matmul", lambda: attention_scores(transposed=True)),
    "attention, masked": ("cpu-any-size-attention", lambda: attention(64, masked=True)),
    "attention, one vector": ("cpu-any-size-attention", lambda: attention(16, masked=False)),
    "attention, Q elsewhere": ("cpu-any-size-attention", lambda: attention(64, masked=True, projected=90)),
    "attention, Q in rows 4 KiB apart": ("cpu-reduction", lambda: attention(64, masked=False, projected=1024)),
    "attention, part of a vector": ("cpu-reduction", lambda: attention(20, masked=True)),
    "packed": ("cpu-any-size-matmul", lambda: packed(64, 20)),
    "packed, part of a panel, rows 4 KiB apart": ("cpu-any-size-matmul", lambda: packed(45, 1024)),
    "patches": ("cpu-convolution", lambda: conv2d_symbolic(channels=3, size=32, filters=64, kernel=8)),
    "patches, partial": ("cpu-reduction", lambda: conv2d_symbolic(channels=3, size=9, filters=7, kernel=3)),
    "audio": ("cpu-convolution", lambda: conv1d_symbolic(channels=8, filters=64)),
    "concatenate rows": ("cpu-elementwise", lambda: joined(1)),
    "concatenate columns": ("cpu-elementwise", lambda: joined(2)),
    "transpose": ("cpu-elementwise", lambda: moved((2, 0, 1))),
    "take": ("cpu-elementwise", looked_up),
}


QUICK_NARROW = ("softmax, isnan, where", "layer norm", "matmul all", "attention, masked", "packed", "patches, partial")


@pytest.mark.quick_cases(*(f"{name}-host" for name in KERNELS), *(f"{name}-avx2" for name in QUICK_NARROW))
@pytest.mark.parametrize("narrow", [False, True], ids=["host", "avx2"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_agrees_with_itself_unscheduled_when_sizes_come_at_run_time(name: str, narrow: bool) -> None:
    expected_rule, make = KERNELS[name]
    func = make()
    pair = build_pair(func, resolve_target(NARROW).target if narrow else host().target)
    assert pair.rule == expected_rule
    symbols = symbols_of(func)
    assert symbols
    for turn in range(len(SIZES)):
        # Each symbol walks through the sizes at its own stride, so that short and long meet.
        assert_pair_agrees(pair, {s: drawn(s, SIZES[(turn * (2 * i + 1) + 4 * i) % 12]) for i, s in enumerate(symbols)})


def drawn(symbol: str, value: int) -> int:
    """Return a size that a test has time for: batches stay small."""
    return 1 + value % 3 if symbol == "b" else value


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    chosen = (
        "softmax, isnan, where",
        "scores",
        "layer norm",
        "matmul all",
        "attention, one vector",
        "attention, masked",
    )
    return {name: build_pair(KERNELS[name][1](), host().target) for name in chosen}


@given(values=st.lists(st.integers(1, 70), min_size=3, max_size=3), seed=st.integers(0, 3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_kernel_agrees_with_itself_unscheduled_when_sizes_are_drawn(
    pairs: dict[str, Pair], values: list[int], seed: int
) -> None:
    for pair in pairs.values():
        sizes = dict(zip(symbols_of(pair.func), values, strict=False))
        assert_pair_agrees(pair, {s: drawn(s, v) for s, v in sizes.items()}, seed=seed)


def test_attention_has_nan_in_the_rows_that_had_it_when_scores_are_not_finite(pairs: dict[str, Pair]) -> None:
    """NaN and both infinities in Q, infinity in V; and no key at all, which leaves a sum of nothing."""
    pair = pairs["attention, one vector"]
    rng = np.random.default_rng(0)
    for queries, keys in ((37, 50), (16, 16), (5, 3), (4, 0), (0, 4)):
        shapes = ((1, 2, queries, 20), (1, 2, 20, keys), (1, 2, keys, 16))
        q, k, v = (rng.standard_normal(shape).astype("float32") for shape in shapes)
        if queries and keys:
            q[0, 0, 1, 3], q[0, 0, 2, 4], q[0, 1, 3, 5] = np.nan, np.inf, -np.inf
            v[0, 1, keys - 1, 7] = np.inf
        results = []
        for library in (pair.plain, pair.scheduled):
            out = tvm.runtime.tensor(np.full((1, queries, 2, 16), 7, "float32"))
            library["main"](*map(tvm.runtime.tensor, (q, k, v)), out)
            results.append(out.numpy())
        assert not keys or not queries or np.isnan(results[0]).any()
        # Unscheduled, a sum without terms is never begun.
        expected = results[0] if keys else np.zeros_like(results[0])
        np.testing.assert_allclose(results[1], expected, rtol=2e-4, atol=2e-4)


def test_attention_of_many_keys_agrees_when_a_group_has_fewer_tiles(pairs: dict[str, Pair]) -> None:
    for queries, keys in ((61, 700), (61, 2100), (61, 6001)):
        assert_pair_agrees(pairs["attention, one vector"], {"b": 1, "s": queries, "t": keys})


def hides_later(queries: int, keys: int) -> np.ndarray:
    return np.tril(np.ones((queries, keys)), keys - queries)


def hides_padding(queries: int, keys: int) -> np.ndarray:
    return np.broadcast_to(np.arange(keys) < keys // 3, (queries, keys))


def hides_all_of_some_rows(queries: int, keys: int) -> np.ndarray:
    return hides_later(queries, keys) * (np.arange(queries)[:, None] % 5 > 0)


def hides_all(queries: int, keys: int) -> np.ndarray:
    return np.zeros((queries, keys))


@pytest.mark.parametrize("hides", [hides_later, hides_padding, hides_all_of_some_rows, hides_all])
@pytest.mark.parametrize("special", [False, True])
def test_attention_agrees_when_a_mask_hides_the_last_keys(
    pairs: dict[str, Pair], hides: Callable[[int, int], np.ndarray], special: bool
) -> None:
    """No score of theirs is computed, and none is weighed; NaN in K, and infinity in V, are as if all were."""
    rng = np.random.default_rng(0)
    for queries, keys in ((100, 100), (9, 130), (70, 64), (7, 31)):
        shapes = ((2, 2, queries, 20), (2, 2, 20, keys), (2, 2, keys, 64))
        q, k, v = (rng.standard_normal(shape).astype("float32") for shape in shapes)
        if special:
            k[0, 1, 3, keys - 2] = np.nan
            v[1, 0, keys - 1, 5], v[1, 1, keys // 2, 7] = np.inf, np.nan
        mask = np.zeros((2, 1, queries, keys), "float32")
        mask[0], mask[1] = hides(queries, keys), 1
        results = []
        for library in (pairs["attention, masked"].plain, pairs["attention, masked"].scheduled):
            for swapped in (mask, mask[::-1].copy()):
                out = tvm.runtime.tensor(np.full((2, queries, 2, 64), 7, "float32"))
                library["main"](*map(tvm.runtime.tensor, (q, k, v, swapped)), out)
                results.append(out.numpy())
        for plain, scheduled in zip(results[:2], results[2:], strict=True):
            assert np.isnan(plain).any() == special
            np.testing.assert_allclose(scheduled, plain, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("masked", "ends"), [(False, 1), (True, 2)])
def test_attention_looks_for_the_last_key_that_is_seen_when_a_mask_chooses(masked: bool, ends: int) -> None:
    scheduled = apply_fallback(tvm.IRModule({"main": attention(64, masked)}), host().target)["main"]
    assert len(find_all(scheduled.body, tirx.While)) == ends


def test_softmax_sums_exponentials_while_it_makes_them() -> None:
    scheduled = apply_fallback(tvm.IRModule({"main": masked_softmax()}), host().target)["main"]
    loops = [loop for loop in find_all(scheduled.body, tirx.For) if loop.kind == tirx.ForKind.SERIAL]
    # Vectors and a rest of the maximum, of the sum, and of the result.
    assert len(loops) == 6


@pytest.mark.parametrize(("processor", "count"), [("x86-64-v3", 4), ("x86-64-v4", 9)])
def test_next_panel_of_a_packed_weight_is_fetched_by_the_first_tiles_of_rows(processor: str, count: int) -> None:
    target = resolve_target(f'{{"kind": "llvm", "mcpu": "{processor}", "num-cores": 2}}').target
    scheduled = apply_fallback(tvm.IRModule({"main": packed(64, 20)}), target)["main"]
    fetches = [call for call in find_all(scheduled.body, Call) if call.op.name == "tirx.call_llvm_intrin"]
    # One in each tile: of the most rows (2, or 14), and the few sizes of the last ones. These may be alone, and fetch
    # the other line of a panel's row, too, where they are.
    assert len(fetches) == count
    assert sum(str(call.args[1]).endswith("T.int64(16)])") for call in fetches) == (count - 1) // 2
    # Other tiles find the next panel fetched: fetching it again would take loads from their multiply-adds.
    loops = [loop for loop in find_all(scheduled.body, tirx.For) if static_extent(loop.extent) == 20]
    assert len([loop for loop in loops if not any(call in fetches for call in find_all(loop, Call))]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("vector_bytes", "loops", "rows"), [(32, (1, 3), 301), (64, (9, 3), 287)])
def test_long_panel_is_read_block_by_block_while_groups_of_rows_keep_their_sums(
    vector_bytes: int, loops: tuple[int, int], rows: int
) -> None:
    """A panel of 4,099 rows: parts and blocks of k, the last one shorter. The most rows are groups of tiles.

    Vectors of 64 bytes: both panels are of one job, and keep their sums from part to part.
    """
    facts = {"l1_bytes": 48 << 10, "l2_bytes": 1 << 20, "vector_bytes": vector_bytes, "cores": 1}
    limits = replace(host().limits, **facts)
    func = packed(45, 4099)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_size_matmul, "cpu_limits", lambda _target: limits)
        pair = build_pair(func, host().target)
        scheduled = apply_fallback(tvm.IRModule({"main": func}), host().target)["main"]
    extents = [static_extent(loop.extent) for loop in find_all(scheduled.body, tirx.For)]
    assert all(extent in extents for extent in loops)
    for b, s in ((1, 1), (1, 14), (1, 224), (7, 32), (7, rows // 7)):
        assert_pair_agrees(pair, {"b": b, "s": s})


@pytest.mark.parametrize(
    ("cores", "parts"),
    [(1, {1: 1, 1000: 1}), (2, {0: 1, 191: 1, 192: 2, 5000: 2}), (6, {191: 1, 192: 2, 288: 3, 575: 3, 576: 6})],
)
def test_rows_are_cut_for_cores_of_their_own_when_they_are_many(cores: int, parts: dict[int, int]) -> None:
    cut = {rows: parts_of_rows(tirx.IntImm("int64", rows), cores) for rows in parts}
    assert {rows: int(tvm.sym.Analyzer().simplify(found)) for rows, found in cut.items()} == parts


@pytest.mark.quick_cases("3")
@pytest.mark.parametrize("cores", [2, 3, 4])
def test_packed_weight_agrees_when_cores_have_rows_of_their_own(cores: int) -> None:
    facts = {"l1_bytes": 48 << 10, "l2_bytes": 2 << 20, "vector_bytes": 64, "cores": cores}
    limits = replace(host().limits, **facts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(any_size_matmul, "cpu_limits", lambda _target: limits)
        pair = build_pair(packed(109, 70), host().target)
    for rows in (0, 1, 7, 16, 33, 100, 191, 192, 193, 200, 289, 383, 384, 401):
        assert_pair_agrees(pair, {"b": 1, "s": rows})
    assert_pair_agrees(pair, {"b": 3, "s": 67})


def test_comparison_sees_what_is_never_written_and_what_is_written_past_an_end() -> None:
    """The comparison itself: a lane without an initial value, and a store that is one element too far."""
    n = size("n")
    a = te.placeholder((n,), "float32", name="A")
    good = build_pair(prim_func([a, te.compute((n,), lambda i: a[i] + 1.0, name="B")]), host().target)
    short = prim_func([a, te.compute((n,), lambda i: tirx.Select(i < n - 1, a[i] + 1.0, tirx.const(9.0)), name="B")])
    with pytest.raises(AssertionError, match=r"rule cpu-elementwise at \{'n': 5\}"):
        assert_pair_agrees(Pair(good.rule, good.func, build_pair(short, host().target).plain, good.plain), {"n": 5})
    library = tirx.build(PastTheEnd, target=host().target)
    with pytest.raises(AssertionError, match="wrote past the end of an output"):
        assert_pair_agrees(Pair(good.rule, good.func, library, good.plain), {"n": 5})


def test_kernel_is_left_as_it_is_when_no_rule_can_schedule_it() -> None:
    """A sum of sizes that TVM's fusing of loops cannot divide by: compiling must not fail for want of a schedule."""
    batch, height = size("b"), size("y")
    image = te.placeholder((batch, 3, height, 8), "float32", name="image")
    weight = te.placeholder((1, 3, 1, 1), "float32", name="weight")
    func = prim_func([image, weight, topi.nn.conv2d_nchw(image, weight, 1, 1, 1)])
    assert fallback_with_rules(tvm.IRModule({"main": func}), host().target)[1] == {"main": "cpu-plain"}
    pair = build_pair(func, host().target)
    assert_pair_agrees(pair, {"b": 2, "y": 5})
