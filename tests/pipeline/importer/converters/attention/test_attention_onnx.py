"""ONNX's Attention against ONNX Runtime: masks, windows, caches, scores, rows without a key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper

from relaxtune.models import load_model
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes.kit.ir import main_of
from tests.pipeline.importer.converters.test_contrib_converters import floats, model_of
from tests.pipeline.importer.onnx_cases import assert_agrees, run_reference, run_relax

B, N, S, H = 2, 4, 5, 8


def heads(name: str, count: int = N, length: int = S) -> tuple[str, np.ndarray]:
    return name, floats(B, count, length, H)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_are_an_output_of_four_kinds(mode: int) -> None:
    inputs = [heads("q"), heads("k"), heads("v"), ("m", floats(S, S))]
    outputs = {"y": ("float32", (B, N, S, H)), "s": ("float32", (B, N, S, S))}
    model, feeds = model_of("Attention", inputs, outputs, domain="", opset=23, qk_matmul_output_mode=mode)
    model.proto.graph.node[0].output[:] = ["y", "", "", "s"]
    assert_agrees(model, feeds)


def test_a_row_whose_every_key_is_hidden_is_zero() -> None:
    mask = np.ones((S, S), "bool")
    mask[1] = False
    inputs = [heads("q"), heads("k"), heads("v"), ("m", mask)]
    model, feeds = model_of("Attention", inputs, {"y": ("float32", (B, N, S, H))}, domain="", opset=23)
    (got,), (want,) = run_relax(import_model(model), feeds), run_reference(model, feeds)
    assert not got[:, :, 1].any()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", [True, False], ids=["Attention", "its parts"])
def test_a_cache_of_no_places_is_taken(operator: bool, tmp_path: Path) -> None:
    inputs = [heads("q"), heads("k"), heads("v"), None, heads("pk", length=0), heads("pv", length=0)]
    shape = ("float32", (B, N, S, H))
    model, feeds = model_of("Attention", inputs, {"y": shape, "nk": shape, "nv": shape}, domain="", opset=23)
    if not operator:
        del model.proto.graph.node[:]
        make = helper.make_node
        model.proto.graph.node.extend(
            [
                make("Concat", ["pk", "k"], ["nk"], axis=2),
                make("Concat", ["pv", "v"], ["nv"], axis=2),
                make("Transpose", ["nk"], ["turned"], perm=[0, 1, 3, 2]),
                make("MatMul", ["q", "turned"], ["scores"]),
                make("Softmax", ["scores"], ["shares"]),
                make("MatMul", ["shares", "nv"], ["y"]),
            ]
        )
    onnx.save(model.proto, tmp_path / "empty.onnx")
    graph = assert_agrees(load_model(tmp_path / "empty.onnx"), feeds)
    assert all(isinstance(size, tvm.tirx.IntImm) for one in main_of(graph.mod).params for size in one.ty.shape)


@pytest.mark.parametrize("queries", [3, 6])
def test_causal_queries_stand_after_the_cache_also_where_keys_are_of_another_length(queries: int) -> None:
    inputs = [heads("q", length=queries), heads("k", length=6), heads("v", length=6)]
    inputs += [None, heads("pk", length=4), heads("pv", length=4)]
    outputs = {
        "y": ("float32", (B, N, queries, H)),
        "nk": ("float32", (B, N, 10, H)),
        "nv": ("float32", (B, N, 10, H)),
    }
    assert_agrees(*model_of("Attention", inputs, outputs, domain="", opset=23, is_causal=1))


@pytest.mark.parametrize("causal", [0, 1])
def test_counts_of_keys_hide_padding_and_place_the_queries(causal: int) -> None:
    inputs = [heads("q", length=2), heads("k", 2, 7), heads("v", 2, 7), None, None, None]
    inputs += [("n", np.array([7, 4]))]
    outputs = {"y": ("float32", (B, N, 2, H))}
    model, feeds = model_of("Attention", inputs, outputs, domain="", opset=24, is_causal=causal)
    keys, values = (np.repeat(feeds[name], 2, axis=1) for name in ("k", "v"))
    (got,) = run_relax(import_model(model), feeds)
    for row, count in enumerate(feeds["n"]):
        for query in range(2):
            seen = min(count, query + 1 + count - 2) if causal else count
            scores = np.einsum("nh,nth->nt", feeds["q"][row, :, query], keys[row, :, :seen]) / np.sqrt(H)
            weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
            want = np.einsum("nt,nth->nh", weights, values[row, :, :seen])
            np.testing.assert_allclose(got[row, :, query], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_what_is_beyond_a_short_mask_is_hidden(dtype: str) -> None:
    mask = floats(S, 3) > -0.5 if dtype == "bool" else floats(S, 3)
    mask[:, 0] = True
    inputs = [heads("q"), heads("k"), heads("v"), ("m", mask)]
    model, feeds = model_of("Attention", inputs, {"y": ("float32", (B, N, S, H))}, domain="", opset=24)
    added = np.where(mask, 0, -np.inf) if dtype == "bool" else mask
    scores = np.einsum("bnsh,bnth->bnst", feeds["q"], feeds["k"])[..., :3] / np.sqrt(H) + added
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    (got,) = run_relax(import_model(model), feeds)
    np.testing.assert_allclose(got, weights @ feeds["v"][:, :, :3], rtol=1e-5, atol=1e-5)
