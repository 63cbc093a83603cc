"""Conditions that hold at all sizes, and those that do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relaxtune.pipeline.passes.kit.ir import bindings_of, main_of
from relaxtune.pipeline.passes.kit.known_values import KnownValues
from relaxtune.pipeline.passes.symbolic.fold_known_values import fold_known_values
from tests.pipeline.passes.pass_cases import graph_of, operators_of, run_module, state_of

PAST, BATCH = tirx.Var("past", "int64"), tirx.Var("batch", "int64")


def keys(more: int = 1, start: int = 0) -> relax.Expr:
    return relax.op.arange(start, PAST + more, 1, dtype="int64")


def place(more: int = 0, dtype: str = "int64") -> relax.Expr:
    return relax.op.astype(relax.op.shape_to_tensor(relax.ShapeExpr([PAST + more])), dtype)


def number(value: int) -> relax.Expr:
    return relax.const(np.array([value]), "int64")


OP = relax.op


def too_few(mask: relax.Expr, number_seen: float = 1.0, axis: int = -1) -> relax.Expr:
    """Return where fewer keys are seen than a number, as transformers asks."""
    rows = OP.broadcast_to(mask, relax.ShapeExpr([2, PAST + 1, PAST + 1]))
    seen = OP.sum(OP.astype(rows, "float32"), axis=[axis], keepdims=True)
    return OP.less(seen, relax.const(number_seen, "float32"))


def causal(more: int = 0) -> relax.Expr:
    queries = OP.expand_dims(keys(), [1])
    return OP.less_equal(OP.expand_dims(keys(start=more, more=1 + more), [0]), queries)


CASES: dict[str, tuple[Callable[[], relax.Expr], bool | None]] = {
    "a token sees all keys": (lambda: OP.less_equal(keys(), place()), True),
    "all but its own": (lambda: OP.less(keys(), place()), None),
    "a key more": (lambda: OP.less_equal(keys(2), place()), None),
    "less than one more": (lambda: OP.less(keys(), place(1)), True),
    "none is beyond": (lambda: OP.greater(keys(), place()), False),
    "the other way round": (lambda: OP.greater_equal(place(), keys()), True),
    "at least the first": (lambda: OP.greater_equal(keys(), number(0)), True),
    "more than the first": (lambda: OP.greater(keys(), number(0)), None),
    "all after a start": (lambda: OP.greater(keys(start=1), number(0)), True),
    "never negative": (lambda: OP.less(keys(), number(0)), False),
    "moved": (lambda: OP.less_equal(OP.expand_dims(keys(), [0]), OP.expand_dims(place(), [1])), True),
    "sums": (lambda: OP.less_equal(OP.add(keys(), number(5)), OP.add(place(3), number(2))), True),
    "a sum too large": (lambda: OP.less_equal(OP.add(keys(), number(6)), OP.add(place(3), number(2))), None),
    "differences": (lambda: OP.greater_equal(OP.subtract(place(), keys()), number(0)), True),
    "a difference too small": (lambda: OP.greater(OP.subtract(place(), keys()), number(0)), None),
    "products": (lambda: OP.less_equal(OP.multiply(keys(), number(2)), OP.multiply(place(), number(2))), True),
    "a product too small": (
        lambda: OP.less_equal(OP.multiply(keys(), number(3)), OP.multiply(place(), number(2))),
        None,
    ),
    "a negative factor": (lambda: OP.less_equal(OP.multiply(keys(), number(-1)), place()), None),
    "floats": (lambda: OP.less_equal(OP.astype(keys(), "float32"), place(0, "float32")), None),
    "a causal mask hides no row": (lambda: too_few(causal()), False),
    "the other way round, too": (
        lambda: too_few(OP.greater_equal(OP.expand_dims(keys(), [1]), OP.expand_dims(keys(), [0]))),
        False,
    ),
    "what hides itself hides the first row": (lambda: too_few(causal(1)), None),
    "two keys are not seen by all": (lambda: too_few(causal(), 2.0), None),
    "a column may be hidden": (lambda: too_few(OP.permute_dims(causal(), [1, 0])), None),
    "along the queries": (lambda: too_few(causal(), axis=-2), None),
    "a row of keys that are after all": (lambda: too_few(OP.less_equal(OP.expand_dims(keys(), [1]), keys())), None),
    "what hides nothing": (lambda: too_few(OP.less_equal(OP.multiply(keys(), number(0)), number(0))), False),
    "all is seen": (lambda: too_few(relax.const(np.array([[True]]))), False),
    "equal to some": (lambda: OP.equal(keys(), place()), None),
}


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_comparisons_are_known_where_all_sizes_agree(build: Callable[[], relax.Expr], expected: bool | None) -> None:
    graph = graph_of(lambda _builder, _x: build(), {"x": ((PAST,), "float32")})
    main = main_of(graph.mod)
    values = {binding.var: binding.value for binding in bindings_of(main)}
    found = KnownValues(values).of(main.body.body)
    assert found is None if expected is None else found == expected
    computed = [run_module(graph.mod, [np.zeros(past, "float32")])[0] for past in (1, 4)]
    assert expected is None or all((one == expected).all() for one in computed)


def test_long_chains_are_followed_no_further_than_a_bound_and_shared_parts_once() -> None:
    def case(_builder: relax.BlockBuilder, _x: relax.Expr) -> relax.Expr:
        total = place()
        for _ in range(200):
            total = _builder.emit(OP.add(total, total))
        return OP.less(total, number(0))

    main = main_of(graph_of(case, {"x": ((PAST,), "float32")}).mod)
    assert KnownValues({binding.var: binding.value for binding in bindings_of(main)}).of(main.body.body) is None


def masked(condition: relax.Expr, kind: str) -> Callable[..., relax.Expr]:
    def case(_builder: relax.BlockBuilder, x: relax.Expr, y: relax.Expr, _past: relax.Expr) -> relax.Expr:
        return OP.where(condition, x, y) if kind == "where" else getattr(OP, kind)(condition, x)

    return case


@pytest.mark.parametrize(
    ("condition", "kind", "kept"),
    [
        (lambda: OP.less_equal(keys(), place()), "logical_and", 0),
        (lambda: OP.greater(keys(), place()), "logical_or", 0),
        (lambda: OP.less_equal(keys(), place()), "where", 0),
        (lambda: OP.greater(keys(), place()), "where", 1),
        (lambda: OP.greater(keys(), place()), "logical_and", None),
        (lambda: OP.less_equal(keys(), place()), "logical_or", None),
        (lambda: OP.less(keys(), place()), "logical_and", None),
        (lambda: OP.less(keys(), place()), "where", None),
    ],
)
@pytest.mark.parametrize("rows", [BATCH, 1])
def test_known_conditions_are_dropped(
    condition: Callable[[], relax.Expr], kind: str, kept: int | None, rows: tirx.Var | int
) -> None:
    shape = ((rows, PAST + 1), "bool")
    graph = graph_of(masked(condition(), kind), {"x": shape, "y": shape, "past": ((PAST,), "float32")})
    mod = fold_known_values(graph.mod, state_of(graph))
    assert (kind in operators_of(mod)) == (kept is None)
    rng = np.random.default_rng(0)
    for past in (1, 5):
        feeds = [rng.integers(0, 2, (1, past + 1)).astype(bool) for _ in range(2)] + [np.zeros(past, "float32")]
        (right,), (found,) = run_module(graph.mod, feeds), run_module(mod, feeds)
        np.testing.assert_array_equal(found, right)
        assert kept is None or (found == feeds[kept]).all()


def check(mod: tvm.ir.IRModule, folded: tvm.ir.IRModule, *feeds: Callable[[int], np.ndarray]) -> None:
    """Hold that two modules give the same, at several sizes."""
    for past in (1, 2, 5):
        given = [feed(past) for feed in feeds]
        (right,), (found,) = run_module(mod, given), run_module(folded, given)
        np.testing.assert_array_equal(found, right)


def test_a_known_condition_that_makes_the_result_larger_stays() -> None:
    shape = ((1,), "bool")
    graph = graph_of(
        lambda _builder, x, _past: OP.logical_and(OP.less_equal(keys(), place()), x),
        {"x": shape, "past": ((PAST,), "float32")},
    )
    assert fold_known_values(graph.mod, state_of(graph)).same_as(graph.mod)


def mask() -> relax.Expr:
    """Return 0 where a decode step's token sees a key: everywhere."""
    hidden = relax.const(-1e9, "float32")
    return OP.where(OP.less_equal(keys(), place()), relax.const(0.0, "float32"), hidden)


@pytest.mark.parametrize(
    ("build", "stays"),
    [
        (lambda x: OP.add(x, relax.const(0.0)), False),
        (lambda x: OP.subtract(OP.multiply(relax.const(1.0), x), relax.const(np.zeros(1, "float32"))), False),
        (lambda x: OP.subtract(relax.const(0.0), x), True),
        (lambda x: OP.add(x, mask()), False),
        (lambda x: OP.add(mask(), x), False),
        (lambda x: OP.subtract(x, mask()), False),
        (lambda x: OP.subtract(mask(), x), True),
        (lambda x: OP.multiply(x, OP.exp(mask())), True),
        (lambda x: OP.multiply(x, OP.add(mask(), relax.const(1.0, "float32"))), False),
        (lambda x: OP.divide(x, OP.ones(relax.ShapeExpr([PAST + 1]), "float32")), False),
    ],
)
def test_what_changes_nothing_at_all_sizes_is_dropped(build: Callable[[relax.Expr], relax.Expr], stays: bool) -> None:
    graph = graph_of(lambda _builder, x, _past: build(x), {"x": ((PAST + 1,), "float32"), "past": ((PAST,), "float32")})
    mod = fold_known_values(graph.mod, state_of(graph))
    assert bool(operators_of(mod)) == stays
    check(graph.mod, mod, lambda past: np.arange(past + 1, dtype="float32"), lambda past: np.zeros(past, "float32"))


@pytest.mark.parametrize(
    ("index", "in_first"),
    [
        (lambda: OP.reshape(OP.arange(0, PAST, 1, "int64"), relax.ShapeExpr([PAST, 1])), True),
        (lambda: OP.arange(0, PAST + 1, 1, "int64"), False),
        (lambda: OP.subtract(OP.arange(0, PAST, 1, "int64"), number(1)), False),
    ],
)
def test_a_look_up_in_joined_tables_reads_the_first_where_all_its_places_are(
    index: Callable[[], relax.Expr], in_first: bool
) -> None:
    def case(builder: relax.BlockBuilder, x: relax.Expr, more: relax.Expr) -> relax.Expr:
        return OP.take(builder.emit(OP.concat([x, more], axis=0)), builder.emit(index()), axis=0, mode="wrap")

    graph = graph_of(case, {"x": ((PAST, 3), "float32"), "more": ((BATCH, 3), "float32")})
    mod = fold_known_values(graph.mod, state_of(graph))
    assert ("concat" not in operators_of(mod)) == in_first
    rng = np.random.default_rng(0)
    check(graph.mod, mod, *[lambda past: rng.standard_normal((past, 3)).astype("float32")] * 2)


LOWEST = relax.const(float(np.finfo("float32").min), "float32")
BIAS = relax.const(np.array([[1.0, -2.0], [0.5, 3.0]]), "float32")


@pytest.mark.parametrize(
    ("chosen", "least", "known"),
    [
        (lambda index: OP.take(BIAS, index, axis=0, mode="clip"), LOWEST, True),
        (lambda index: OP.take(BIAS, index, axis=0, mode="clip"), relax.const(-3.0, "float32"), True),
        # Some of the table are no more than that; another number may not be less.
        (lambda index: OP.take(BIAS, index, axis=0, mode="clip"), relax.const(-2.0, "float32"), False),
        (lambda index: OP.expand_dims(OP.astype(index, "float32"), [1]), LOWEST, False),
    ],
)
def test_a_comparison_tells_what_was_chosen_by_positions(
    chosen: Callable[[relax.Expr], relax.Expr], least: relax.Expr, known: bool
) -> None:
    def case(_builder: relax.BlockBuilder, seen: relax.Expr, index: relax.Expr) -> relax.Expr:
        of_positions = OP.greater(OP.where(OP.expand_dims(seen_by(), [1]), chosen(index), LOWEST), least)
        of_input = OP.greater(OP.where(OP.expand_dims(seen, [1]), chosen(index), LOWEST), least)
        return OP.logical_or(of_positions, of_input)

    def seen_by() -> relax.Expr:
        return OP.less(OP.arange(0, PAST, 1, "int64"), number(2))

    graph = graph_of(case, {"seen": ((PAST,), "bool"), "index": ((PAST,), "int64")})
    mod = fold_known_values(graph.mod, state_of(graph))
    # A mask that is an input would be kept for one more reader.
    assert operators_of(mod).count("greater") == (1 if known else 2)
    check(graph.mod, mod, lambda past: np.arange(past) % 2 == 1, lambda past: np.arange(past) % 2)


@pytest.mark.parametrize(
    ("masks", "least", "known"),
    [
        ([-100.0, 0.0], float(np.finfo("float32").min), True),
        ([-100.0, 0.0], -50.0, False),
        ([-100.0, np.nan], float(np.finfo("float32").min), False),
        # In float32 the sum of both is -inf, which is not more than the lowest number.
        ([-3e38, 0.0], float(np.finfo("float32").min), False),
    ],
)
def test_a_comparison_of_constants_that_are_copied_is_known(masks: list[float], least: float, known: bool) -> None:
    """Swin's masks of windows, added to a bias, hide no key."""
    bias = relax.const(np.array([[-3e38, 1.0]] if min(masks) < -1e3 else [[-2.0, 1.0]], "float32"))

    def case(builder: relax.BlockBuilder, _images: relax.Expr) -> relax.Expr:
        each = relax.const(np.array([[[one, one]] for one in masks], "float32"))
        copied = builder.emit(OP.broadcast_to(OP.expand_dims(each, [0]), relax.ShapeExpr([PAST, 2, 1, 2])))
        flat = builder.emit(OP.reshape(copied, relax.ShapeExpr([PAST * 2, 1, 2])))
        return OP.greater(builder.emit(OP.add(bias, flat)), relax.const(least, "float32"))

    graph = graph_of(case, {"images": ((PAST,), "float32")})
    mod = fold_known_values(graph.mod, state_of(graph))
    assert ("greater" not in operators_of(mod)) == known
    check(graph.mod, mod, lambda past: np.zeros(past, "float32"))
