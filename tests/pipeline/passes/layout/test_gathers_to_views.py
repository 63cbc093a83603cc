"""Gathers that read each place once, and near misses of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tvm import relax, tirx

from relaxtune.pipeline.passes.layout.gathers_to_views import gathers_to_views
from tests.pipeline.passes.pass_cases import graph_of, operators_of, run_module, state_of

OP = relax.op
ROWS, PLACES = tirx.Var("rows", "int64"), tirx.Var("places", "int64")
Size = tirx.Expr | int
# Shape of the data and its first two sizes -> what is gathered of it.
Case = Callable[[relax.BlockBuilder, relax.Expr, Size, Size], relax.Expr]


def counted(size: Size, axis: int, rank: int, *, start: int = 0) -> relax.Expr:
    """Return numbers that count up along one axis of some."""
    numbers = OP.arange(start, size + start, 1, dtype="int64")
    return OP.expand_dims(numbers, [one for one in range(rank) if one != axis])


def wrapped(builder: relax.BlockBuilder, index: relax.Expr, size: relax.Expr) -> relax.Expr:
    index = builder.emit(index)
    return builder.emit(OP.where(OP.less(index, relax.const(0, "int64")), OP.add(index, size), index))


def pairs(builder: relax.BlockBuilder, row: relax.Expr, place: relax.Expr, shape: Sequence[Size]) -> relax.Expr:
    parts = [OP.expand_dims(OP.broadcast_to(one, relax.ShapeExpr(list(shape))), [-1]) for one in (row, place)]
    return wrapped(builder, OP.concat(parts, axis=-1), relax.const(np.array([9, 9]), "int64"))


def nd(shape: Callable[[Size, Size], Sequence[Size]], row: int, place: int, **options: int) -> Case:
    def case(builder: relax.BlockBuilder, data: relax.Expr, rows: Size, places: Size) -> relax.Expr:
        sizes = shape(rows, places)
        at = counted(rows, row, len(sizes)), counted(places, place, len(sizes), start=options.get("start", 0))
        return OP.gather_nd(data, pairs(builder, *at, sizes))

    return case


def flat(*, axis: int = 0, step: Callable[[Size, Size], Size] = lambda _, places: places, more: int = 0) -> Case:
    def case(builder: relax.BlockBuilder, data: relax.Expr, rows: Size, places: Size) -> relax.Expr:
        row, place = (
            (counted(rows, 0, 4), counted(places, 3, 4)) if axis == 0 else (counted(rows, 3, 4), counted(places, 0, 4))
        )
        by = OP.shape_to_tensor(relax.ShapeExpr([tirx.IntImm("int64", 1) * step(rows, places)]))
        index = OP.add(OP.multiply(row, by), OP.add(place, relax.const(more, "int64")))
        return OP.take(
            OP.reshape(data, relax.ShapeExpr([rows * places, 1])),
            wrapped(builder, index, relax.const(7, "int64")),
            axis=0,
            mode="clip",
        )

    return case


def counted_through(shape: Callable[[Size, Size], Sequence[Size]]) -> Case:
    """Return rows of a flat tensor by places that are counted in one go, and then put in some shape."""

    def case(builder: relax.BlockBuilder, data: relax.Expr, rows: Size, places: Size) -> relax.Expr:
        numbers = builder.emit(OP.arange(0, rows * places, 1, dtype="int64"))
        index = OP.reshape(numbers, relax.ShapeExpr(list(shape(rows, places))))
        return OP.take(OP.reshape(data, relax.ShapeExpr([rows * places, 1])), index, axis=0, mode="fast")

    return case


VIEWS: dict[str, Case] = {
    "counted in one go": counted_through(lambda r, p: (r, p)),
    "a mask by row and place": nd(lambda r, p: (r, 1, 1, p), 0, 3),
    "for each query": nd(lambda r, p: (r, 1, p, p), 0, 3),
    "places before rows": nd(lambda r, p: (p, r), 1, 0),
    "flat": flat(),
    "flat, places before rows": flat(axis=1),
}
OTHERS: dict[str, Case] = {
    "from the second place": nd(lambda r, p: (r, 1, 1, p), 0, 3, start=1),
    "both along one axis": lambda b, data, r, p: OP.gather_nd(data, pairs(b, counted(r, 0, 1), counted(r, 0, 1), (r,))),
    "counted in one go, turned": counted_through(lambda r, p: (p, r)),
    "flat, one further": flat(more=1),
    "flat, wrong rows": flat(step=lambda rows, _: rows),
}


@pytest.mark.parametrize("sizes", [(ROWS, PLACES), (2, 5), (1, 5), (ROWS, 5), (1, PLACES)], ids=str)
@pytest.mark.parametrize("name", [*VIEWS, *OTHERS])
def test_gathers_of_each_place_are_views(name: str, sizes: tuple[Size, Size]) -> None:
    case = (VIEWS | OTHERS)[name]
    graph = graph_of(lambda builder, data: case(builder, data, *sizes), {"data": (sizes, "float32")})
    mod = gathers_to_views(graph.mod, state_of(graph))
    left = {"gather_nd", "take"} & set(operators_of(mod))
    if name in VIEWS:
        assert not left
    for rows, places in ((2, 5), (1, 5), (4, 5), (3, 4)):
        wanted = (rows, places)
        if any(isinstance(size, int) and size != want for size, want in zip(sizes, wanted, strict=True)):
            continue
        if (name == "both along one axis" and rows > places) or name == "from the second place":
            continue  # reads what is not there
        data = np.arange(rows * places, dtype="float32").reshape(rows, places)
        (right,), (found,) = run_module(graph.mod, [data]), run_module(mod, [data])
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("name", ["flat, one further", "from the second place"])
def test_others_stay(name: str) -> None:
    graph = graph_of(
        lambda builder, data: OTHERS[name](builder, data, ROWS, PLACES), {"data": ((ROWS, PLACES), "bool")}
    )
    assert gathers_to_views(graph.mod, state_of(graph)).same_as(graph.mod)


def test_more_axes_of_the_data_stay_behind() -> None:
    graph = graph_of(
        lambda builder, data: nd(lambda r, p: (p, 1, r), 2, 0)(builder, data, ROWS, PLACES),
        {"data": ((ROWS, PLACES, 3), "float32")},
    )
    mod = gathers_to_views(graph.mod, state_of(graph))
    assert "gather_nd" not in operators_of(mod)
    data = np.random.default_rng(0).standard_normal((2, 5, 3)).astype("float32")
    (found,) = run_module(mod, [data])
    np.testing.assert_array_equal(found, data.transpose(1, 0, 2)[:, None])


def test_indices_that_are_given_stay() -> None:
    graph = graph_of(
        lambda _builder, data, index: OP.gather_nd(data, index),
        {"data": ((ROWS, PLACES), "float32"), "index": ((ROWS, PLACES, 2), "int64")},
    )
    assert gathers_to_views(graph.mod, state_of(graph)).same_as(graph.mod)


def element_index(places: relax.Expr, axis: int) -> relax.Expr:
    """Return indices [rows, places, 3] of places along an axis."""
    apart = OP.expand_dims(places, [one for one in range(3) if one != axis])
    return OP.broadcast_to(apart, relax.ShapeExpr([ROWS, PLACES, 3]))


@pytest.mark.parametrize(
    ("index", "axis", "itself"),
    [
        (lambda: element_index(OP.arange(0, PLACES, 1, "int64"), 1), 1, True),
        (lambda: element_index(OP.arange(0, ROWS, 1, "int64"), 0), 0, True),
        (lambda: element_index(relax.const(np.arange(3)), 2), 2, True),
        (lambda: element_index(OP.arange(0, 3, 1, "int64"), 2), 2, True),
        # Backwards, the first place alone, and along another axis.
        (lambda: element_index(relax.const(np.arange(3)[::-1].copy()), 2), 2, False),
        (lambda: element_index(relax.const(np.zeros(3, "int64")), 2), 2, False),
        (lambda: element_index(OP.arange(0, 3, 1, "int64"), 2), 1, False),
    ],
)
def test_elements_gathered_at_their_own_places_are_the_tensor(
    index: Callable[[], relax.Expr], axis: int, itself: bool
) -> None:
    graph = graph_of(
        lambda _builder, data: OP.gather_elements(data, index(), axis=axis), {"data": ((ROWS, PLACES, 3), "float32")}
    )
    mod = gathers_to_views(graph.mod, state_of(graph))
    assert ("gather_elements" not in operators_of(mod)) == itself
    for rows, places in ((1, 3), (2, 5)):
        data = np.random.default_rng(0).standard_normal((rows, places, 3)).astype("float32")
        (right,), (found,) = run_module(graph.mod, [data]), run_module(mod, [data])
        np.testing.assert_array_equal(found, right)


def test_fewer_elements_than_the_tensor_has_stay_gathered() -> None:
    graph = graph_of(
        lambda _builder, data: OP.gather_elements(data, element_index(OP.arange(0, PLACES, 1, "int64"), 1), axis=1),
        {"data": ((ROWS, PLACES + 1, 3), "float32")},
    )
    assert gathers_to_views(graph.mod, state_of(graph)).same_as(graph.mod)
