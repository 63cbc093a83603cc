from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings, strategies as st

from relaxtune.pipeline.passes.attention.strided_view import StridedView, whole


def positions(view: StridedView) -> np.ndarray:
    """Return for each element of a view its position in the base."""
    flat = [
        view.offset + sum(digit * stride for digit, (_, stride) in zip(digits, factors, strict=True))
        for factors in [[factor for axis in view.axes for factor in axis]]
        for digits in itertools.product(*(range(size) for size, _ in factors))
    ]
    return np.array(flat).reshape(view.shape)


@st.composite
def moves(draw: st.DrawFn) -> tuple[StridedView, np.ndarray]:
    """Return a view after some moves, and the same moves made on the positions themselves."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    view, array = whole(shape), np.arange(math.prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(0, 5))):
        move = draw(st.sampled_from(["permute", "reshape", "slice", "broadcast"]))
        axis = draw(st.integers(0, array.ndim - 1)) if array.ndim else 0
        moved: StridedView | None = None
        if move == "permute":
            axes = draw(st.permutations(range(array.ndim)))
            moved, made = view.permuted(axes), array.transpose(axes)
        elif move == "reshape":
            target = draw(st.sampled_from(_shapes_of(array.size)))
            moved, made = view.reshaped(target), array.reshape(target)
        elif move == "slice":
            start = draw(st.integers(0, array.shape[axis] - 1))
            stop = draw(st.integers(start + 1, array.shape[axis]))
            step = draw(st.integers(1, 2))
            made = array[(slice(None),) * axis + (slice(start, stop, step),)]
            moved = view.sliced(axis, start, stop, step)
        else:
            target = (2, *(size if size > 1 else 3 for size in array.shape))
            moved, made = view.broadcast(target), np.broadcast_to(array, target)
        if moved is not None and made.size <= 500:
            view, array = moved, made
    return view, array


def _shapes_of(size: int) -> list[tuple[int, ...]]:
    pairs = [(count, size // count) for count in range(1, size + 1) if size % count == 0]
    return [(size,), (1, size, 1), *pairs, *((2, a // 2, b) for a, b in pairs if a % 2 == 0)]


@settings(max_examples=300, deadline=None)
@given(moves())
def test_view_is_where_numpy_puts_each_element(case: tuple[StridedView, np.ndarray]) -> None:
    view, array = case
    assert view.shape == array.shape
    np.testing.assert_array_equal(positions(view), array)


def test_view_of_grouped_heads_keeps_the_group_as_a_stride_of_zero() -> None:
    heads = whole((2, 4, 1, 6, 8)).broadcast((2, 4, 3, 6, 8))
    assert heads is not None
    merged = heads.reshaped((2, 12, 6, 8))
    assert merged is not None
    assert merged.axes[1] == ((4, 48), (3, 0))


def test_view_has_no_strides_when_a_reshape_cuts_across_axes() -> None:
    transposed = whole((3, 4)).permuted([1, 0])
    assert transposed.reshaped((3, 4)) is None
    split = transposed.reshaped((2, 2, 3))
    assert split is not None
    assert split.axes == (((2, 2),), ((2, 1),), ((3, 4),))


def test_view_does_not_broadcast_to_another_size() -> None:
    assert whole((2, 3)).broadcast((2, 4)) is None
    assert whole((2, 3)).broadcast((3,)) is None
