"""Attention of ONNX Runtime's contrib operators and of the newest ONNX ones, and what belongs to it."""

from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from tests.pipeline.importer.converters.test_contrib_converters import (
    RNG,
    B,
    H,
    N,
    S,
    floats,
    model_of,
    same_numbers,  # noqa: F401 - for each test
)
from tests.pipeline.importer.onnx_cases import assert_agrees, run_reference, run_relax

HIDDEN = N * H
# Queries and keys of the size that trained ones have: scores of 50 would pass on their own rounding, enlarged by exp.
PROJECTION = np.float32(12**-0.5)
MASKS = {
    "none": None,
    "keys": np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], "int32"),
    "queries": np.tril(np.ones((B, S, S), "int32")),
    "counts": np.array([4, 2], "int32"),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [0, 1])
def test_packed_attention_for_every_mask(mask: str, causal: int) -> None:
    inputs = [
        ("x", floats(B, S, 12)),
        ("weights", PROJECTION * floats(12, 3 * HIDDEN)),
        ("bias", floats(3 * HIDDEN)),
        None if MASKS[mask] is None else ("mask", MASKS[mask]),
    ]
    model, feeds = model_of("Attention", inputs, {"y": ("float32", (B, S, HIDDEN))}, num_heads=N, unidirectional=causal)
    assert_agrees(model, feeds)


@pytest.mark.parametrize("cached", [True, False])
def test_packed_attention_with_a_cache_or_a_bias_and_a_scale(cached: bool) -> None:
    past = 3 if cached else 0
    inputs = [
        ("x", floats(B, S, 12)),
        ("weights", PROJECTION * floats(12, 3 * HIDDEN)),
        ("bias", floats(3 * HIDDEN)),
        None,
        ("past", floats(2, B, N, past, H)) if cached else None,
        None if cached else ("added", floats(B, N, S, past + S)),
    ]
    outputs = {"y": ("float32", (B, S, HIDDEN))}
    outputs |= {"present": ("float32", (2, B, N, past + S, H))} if cached else {}
    assert_agrees(*model_of("Attention", inputs, outputs, num_heads=N, unidirectional=1, scale=0.3))


# With cached keys ONNX Runtime takes no mask.
@pytest.mark.parametrize(("form", "mask"), [("apart", "none"), ("apart", "keys"), ("cached-keys", "none")])
def test_multi_head_attention_for_every_form(form: str, mask: str) -> None:
    keys = S
    query = ("q", floats(B, S, HIDDEN))
    given = {
        "apart": [query, ("k", floats(B, keys, HIDDEN)), ("v", floats(B, keys, HIDDEN))],
        "cached-keys": [query, ("k", floats(B, N, keys, H)), ("v", floats(B, N, keys, H))],
    }[form]
    bias = ("bias", floats(3 * HIDDEN)) if form == "apart" else None
    masked = None if MASKS[mask] is None else ("mask", MASKS[mask])
    model, feeds = model_of(
        "MultiHeadAttention", [*given, bias, masked], {"y": ("float32", (B, S, HIDDEN))}, num_heads=N
    )
    assert_agrees(model, feeds)


@pytest.mark.parametrize("form", ["packed", "packed-keys"])
def test_packed_multi_head_attention_is_the_same(form: str) -> None:
    # ONNX Runtime has packed inputs on a GPU only: here it gets them apart.
    query, key, value = (floats(B, S, N, H) for _ in range(3))
    flat = [(name, part.reshape(B, S, HIDDEN)) for name, part in zip("qkv", (query, key, value), strict=True)]
    outputs = {"y": ("float32", (B, S, HIDDEN))}
    apart, feeds = model_of("MultiHeadAttention", flat, outputs, num_heads=N)
    if form == "packed":
        packed = [("q", np.stack([query, key, value], 3)), None, None]
    else:
        packed = [flat[0], ("k", np.stack([key, value], 3)), None]
    model, packed_feeds = model_of("MultiHeadAttention", packed, outputs, num_heads=N)
    (got,), (want,) = run_relax(import_model(model), packed_feeds), run_reference(apart, feeds)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_with_a_cache(causal: int) -> None:
    past = 3
    inputs = [
        ("q", floats(B, S, HIDDEN)),
        ("k", floats(B, S, HIDDEN)),
        ("v", floats(B, S, HIDDEN)),
        None,
        None,
        ("added", floats(1, N, S, past + S)),
        ("past_k", floats(B, N, past, H)),
        ("past_v", floats(B, N, past, H)),
    ]
    cache = ("float32", (B, N, past + S, H))
    outputs = {"y": ("float32", (B, S, HIDDEN)), "k2": cache, "v2": cache}
    assert_agrees(*model_of("MultiHeadAttention", inputs, outputs, num_heads=N, unidirectional=causal))


K = 2


def tables(places: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(places)[:, None] / 10000 ** (np.arange(H // 2) / (H // 2))
    return np.cos(angles).astype("float32"), np.sin(angles).astype("float32")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize("past", [0, 4])
def test_group_query_attention(packed: bool, rotary: int, past: int) -> None:
    length = S if past == 0 else 1
    # Rows of unequal pasts, where there is one.
    counts = np.array([past + length - 1, (past + length - 1) - (2 if past else 0)], "int32")
    cos, sin = tables(16)
    inputs: list[tuple[str, np.ndarray] | None] = (
        [("q", floats(B, length, (N + 2 * K) * H)), None, None]
        if packed
        else [
            ("q", floats(B, length, HIDDEN)),
            ("k", floats(B, length, K * H)),
            ("v", floats(B, length, K * H)),
        ]
    )
    inputs += [
        ("past_k", floats(B, K, past, H)) if past else None,
        ("past_v", floats(B, K, past, H)) if past else None,
        ("counts", counts),
        ("total", np.array(past + length, "int32")),
        ("cos", cos) if rotary else None,
        ("sin", sin) if rotary else None,
    ]
    cache = ("float32", (B, K, past + length, H))
    outputs = {"y": ("float32", (B, length, HIDDEN)), "k2": cache, "v2": cache}
    model, feeds = model_of("GroupQueryAttention", inputs, outputs, num_heads=N, kv_num_heads=K, do_rotary=rotary)
    check_group_query(model, feeds, counts)


def check_group_query(model: OnnxModel, feeds: dict[str, np.ndarray], counts: np.ndarray) -> None:
    """Compare with ONNX Runtime; keys of the caches beyond a row's count are not defined."""
    graph = import_model(model)
    got, want = run_relax(graph, feeds), run_reference(model, feeds)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert ours.shape == theirs.shape
        for row, count in enumerate(counts):
            np.testing.assert_allclose(ours[row, :, : count + 1], theirs[row, :, : count + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attributes", [{"local_window_size": 2}, {"softcap": 5.0}, {"scale": 0.2}])
def test_group_query_attention_attributes(attributes: dict[str, float]) -> None:
    inputs = [
        ("q", floats(B, S, HIDDEN)),
        ("k", floats(B, S, K * H)),
        ("v", floats(B, S, K * H)),
        None,
        None,
        ("counts", np.full(B, S - 1, "int32")),
        ("total", np.array(S, "int32")),
    ]
    cache = ("float32", (B, K, S, H))
    outputs = {"y": ("float32", (B, S, HIDDEN)), "k2": cache, "v2": cache}
    model, feeds = model_of("GroupQueryAttention", inputs, outputs, num_heads=N, kv_num_heads=K, **attributes)
    check_group_query(model, feeds, np.full(B, S - 1))


def test_padding_of_a_first_prompt_sees_no_key_beyond_its_row() -> None:
    counts = np.array([S - 1, *[1] * (B - 1)], "int32")
    inputs = [("q", floats(B, S, HIDDEN)), ("k", floats(B, S, K * H)), ("v", floats(B, S, K * H)), None, None]
    inputs += [("counts", counts), ("total", np.array(S, "int32"))]
    cache = ("float32", (B, K, S, H))
    outputs = {"y": ("float32", (B, S, HIDDEN)), "k2": cache, "v2": cache}
    model, feeds = model_of("GroupQueryAttention", inputs, outputs, num_heads=N, kv_num_heads=K)
    check_group_query(model, feeds, counts)


@pytest.mark.parametrize("extra", ["positions", "sink", "smooth"])
def test_group_query_attention_reads_its_positions_and_sinks(extra: str) -> None:
    cos, sin = tables(16)
    counts = np.full(B, S - 1, "int32")
    inputs: list[tuple[str, np.ndarray] | None] = [
        ("q", floats(B, 1, HIDDEN)),
        ("k", floats(B, 1, K * H)),
        ("v", floats(B, 1, K * H)),
        ("past_k", floats(B, K, S - 1, H)),
        ("past_v", floats(B, K, S - 1, H)),
        ("counts", counts),
        ("total", np.array(S, "int32")),
        ("cos", cos),
        ("sin", sin),
        # Rows of the tables: not the places of the new keys.
        ("places", np.array([[3], [7]])) if extra == "positions" else None,
        None,
        ("sink", floats(N)) if extra == "sink" else None,
    ]
    cache = ("float32", (B, K, S, H))
    outputs = {"y": ("float32", (B, 1, HIDDEN)), "k2": cache, "v2": cache}
    attributes = {"num_heads": N, "kv_num_heads": K, "do_rotary": 1, "smooth_softmax": int(extra == "smooth")}
    model, feeds = model_of("GroupQueryAttention", inputs, outputs, **attributes)
    check_group_query(model, feeds, counts)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("one_place", [True, False])
def test_contrib_rotary_embedding(interleaved: int, flat: bool, one_place: bool) -> None:
    cos, sin = tables(16)
    data = floats(B, S, HIDDEN) if flat else floats(B, N, S, H)
    places = np.array([3], "int64") if one_place else RNG.integers(0, 16, (B, S)).astype("int64")
    inputs = [("x", data), ("places", places), ("cos", cos), ("sin", sin)]
    assert_agrees(*model_of("RotaryEmbedding", inputs, {"y": ("float32", data.shape)}, interleaved=interleaved))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("with_places", [True, False])
def test_rotary_embedding_of_opset_23(interleaved: int, with_places: bool) -> None:
    cos, sin = tables(16)
    if with_places:
        inputs = [("cos", cos), ("sin", sin), ("places", RNG.integers(0, 16, (B, S)).astype("int64"))]
    else:
        inputs = [("cos", floats(B, S, H // 2)), ("sin", floats(B, S, H // 2))]
    model, feeds = model_of(
        "RotaryEmbedding",
        [("x", floats(B, N, S, H)), *inputs],
        {"y": ("float32", (B, N, S, H))},
        domain="",
        opset=23,
        interleaved=interleaved,
    )
    assert_agrees(model, feeds)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_of_opset_23(flat: bool, mask: str, causal: int) -> None:
    keys = S + 1
    shapes = [(B, N, S, H), (B, K, keys, H), (B, K, keys, H)]
    if flat:
        shapes = [(B, S, HIDDEN), (B, keys, K * H), (B, keys, K * H)]
    inputs: list[tuple[str, np.ndarray] | None] = [
        (name, floats(*shape)) for name, shape in zip("qkv", shapes, strict=True)
    ]
    kept = RNG.integers(0, 2, (S, keys)).astype(bool)
    kept[:, 0] = True
    inputs += [None if mask == "none" else ("mask", kept if mask == "bool" else floats(S, keys))]
    attributes = {"q_num_heads": N, "kv_num_heads": K} if flat else {}
    model, feeds = model_of(
        "Attention",
        inputs,
        {"y": ("float32", shapes[0])},
        domain="",
        opset=23,
        is_causal=causal,
        **attributes,
    )
    assert_agrees(model, feeds)


def test_attention_of_opset_23_with_a_cache() -> None:
    past = 3
    inputs = [
        ("q", floats(B, N, S, H)),
        ("k", floats(B, K, S, H)),
        ("v", floats(B, K, S, H)),
        None,
        ("past_k", floats(B, K, past, H)),
        ("past_v", floats(B, K, past, H)),
    ]
    cache = ("float32", (B, K, past + S, H))
    outputs = {"y": ("float32", (B, N, S, H)), "k2": cache, "v2": cache}
    assert_agrees(*model_of("Attention", inputs, outputs, domain="", opset=23, is_causal=1, softcap=4.0))
