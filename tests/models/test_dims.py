from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from relaxtune.models import parse_shape_override
from relaxtune.models.dims import evaluate_dim, split_offset
from relaxtune.models.errors import ModelShapeError

# Without an x, which separates the axes.
NAMES = st.from_regex(r"[a-wyz_][a-wyz_0-9]{0,8}", fullmatch=True)


@given(name=NAMES, axes=st.lists(st.integers(1, 10**6) | NAMES, min_size=1, max_size=5))
def test_override_round_trips(name: str, axes: list[int | str]) -> None:
    assert parse_shape_override(f"{name}={'x'.join(map(str, axes))}") == (name, tuple(axes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("input_ids=1x128", ("input_ids", (1, 128))),
        (" input_ids = batch x 128 ", ("input_ids", ("batch", 128))),
        ("past_key_values.0.key=1x2x9x32", ("past_key_values.0.key", (1, 2, 9, 32))),
        ("past=1x2x0x8", ("past", (1, 2, 0, 8))),
        ("a=b=3", ("a=b", (3,))),
        ("ids=max_len*128", ("ids", ("max_len", 128))),
    ],
)
def test_override_is_read(text: str, expected: tuple[str, tuple[int | str, ...]]) -> None:
    assert parse_shape_override(text) == expected


@pytest.mark.parametrize("text", ["", "input_ids", "=1x2", "input_ids=", "1x128"])
def test_override_without_both_sides_is_refused(text: str) -> None:
    with pytest.raises(ModelShapeError, match=r"cannot be read: expected NAME=AxBxC .* input_ids=1x128"):
        parse_shape_override(text)


@pytest.mark.parametrize(
    ("text", "axis"),
    [("a=-1x2", "'-1'"), ("a=1xx2", "''"), ("a=1.5", "'1.5'"), ("a=1x", "''"), ("a=²", "'²'")],
)
def test_override_with_a_bad_axis_is_refused(text: str, axis: str) -> None:
    with pytest.raises(ModelShapeError, match=f"has the axis {axis}: expected NAME="):
        parse_shape_override(text)


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (3, 3),
        ("n", 5),
        ("m", "m"),
        ("n + 1", 6),
        ("2*(n - 1)//3", 2),
        ("n % 2", 1),
        ("-n + 10", 5),
        ("n + m", "n + m"),
        ("-m", "-m"),
        ("n // 0", "n // 0"),
        ("n % 0", "n % 0"),
        ("n ** 2", "n ** 2"),
        ("n / 2", "n / 2"),
        ("Max(1, n)", "Max(1, n)"),
        ("__import__('os')", "__import__('os')"),
        ("True", "True"),
        ("unk__0", "unk__0"),
        ("a b", "a b"),
        ("(" * 500, "(" * 500),
        ("odd\0name", "odd\0name"),
        ("odd.name", 8),
        ("min(n, 7, 3)", 3),
        pytest.param("%".join("abcdefgh" * 8), "%".join("abcdefgh" * 8), id="remainders that double"),
        pytest.param("*".join(["(a+b+c+d)"] * 30), "*".join(["(a+b+c+d)"] * 30), id="product of many terms"),
    ],
)
def test_dim_is_computed_where_it_can_be(dim: int | str, expected: int | str) -> None:
    assert evaluate_dim(dim, {"n": 5, "odd.name": 8}) == expected


@pytest.mark.parametrize(
    ("dim", "expected"),
    [("past + 1", ("past", 1)), ("past+16", ("past", 16)), ("past", None), ("2*past + 1", None), ("past + x", None)],
)
def test_offset_is_split(dim: str, expected: tuple[str, int] | None) -> None:
    assert split_offset(dim) == expected
