"""Sizes beyond the limits of a symbolic axis are refused by every way to run an artifact."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import relaxtune
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, Manifest, parse_manifest
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.errors import PipelineError
from tests.pipeline.importer.onnx_cases import make_model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a convolution and a pooling over a symbolic length: 6 places at least, 32 at most, and a bucket of 8."""
    folder = tmp_path_factory.mktemp("windows")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[4]),
        helper.make_node("ReduceMax", ["p"], ["y"], keepdims=0),
    ]
    model = make_model(
        nodes,
        {"x": ("float32", ("batch", 2, "length"))},
        {"y": ("float32", ())},
        {"w": np.random.default_rng(0).standard_normal((2, 2, 3)).astype("float32")},
    )
    onnx.save(model.proto, folder / "windows.onnx")
    return relaxtune.compile(
        folder / "windows.onnx", folder / "artifact", target="llvm", samples=0, profile={"length": (6, 8, 32)},
        buckets={"length": (8,)},
    ).directory  # fmt: skip


def places(length: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(length).standard_normal((1, 2, length)).astype("float32")}


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (5, r"axis 'length' has size 5 \(from 'x'\), expected 6 or more, the room that poolings and convolutions need"),
        (0, r"axis 'length' has size 0 \(from 'x'\), expected 6 or more"),
        (33, r"axis 'length' has size 33 \(from 'x'\), the profile it was compiled with has 32 at most"),
    ],
)
def test_sizes_beyond_the_limits_are_refused(artifact: Path, length: int, said: str) -> None:
    module = Module.load(artifact)
    assert (module.manifest.minima, module.manifest.maxima) == ({"length": 6}, {"length": 32})
    with pytest.raises(PipelineError, match=said + r".* It takes: x: float32\[batch x 2 x length\]"):
        module.run(places(length))
    with pytest.raises(PipelineError, match=said):
        module.run_device(module.to_device(places(length)))


@pytest.mark.parametrize("length", [6, 7, 8, 32])
def test_sizes_within_the_limits_are_those_of_onnx_runtime(artifact: Path, length: int) -> None:
    module = Module.load(artifact)
    expected = onnxruntime.InferenceSession(artifact.parent / "windows.onnx").run(None, places(length))[0]
    np.testing.assert_allclose(module.run(places(length))["y"], expected, rtol=1e-5, atol=1e-5)
    (given,) = module.run_device(module.to_device(places(length)))
    np.testing.assert_allclose(given.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_manifest_that_does_not_say_the_least_sizes_is_read(artifact: Path) -> None:
    text = (artifact / MANIFEST_FILE).read_text()
    assert parse_manifest(text, "here").minima == {"length": 6}
    older = _without_minima(parse_manifest(text, "here"))
    assert "minima" not in json.loads(older)
    assert parse_manifest(older, "here") == replace(parse_manifest(text, "here"), minima={})


def _without_minima(manifest: Manifest) -> str:
    """Return the text of a manifest that an earlier version wrote."""
    body = json.loads(manifest.to_json())
    del body["minima"], body["manifest_sha256"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**body, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()})
