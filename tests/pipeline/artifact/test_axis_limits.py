"""Sizes beyond the limits of a symbolic axis are refused by every way to run an artifact."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import relaxtune
from relaxtune.models import ModelError
from relaxtune.pipeline.artifact.directory import load_manifest
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, Manifest, parse_manifest
from relaxtune.pipeline.artifact.module import Module
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
    older = _without(parse_manifest(text, "here"), "minima")
    assert "minima" not in json.loads(older)
    assert parse_manifest(older, "here") == replace(parse_manifest(text, "here"), minima={})


def _without(manifest: Manifest, *keys: str) -> str:
    """Return the text of a manifest that an earlier version wrote."""
    body = json.loads(manifest.to_json())
    for key in (*keys, "manifest_sha256"):
        del body[key]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**body, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return words and positions of past and new tokens: a table of 20 positions, one of 50 words."""
    folder = tmp_path_factory.mktemp("positions")
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["x"]),
        helper.make_node("Shape", ["past"], ["before"], start=1, end=2),
        helper.make_node("Shape", ["ids"], ["new"], start=1, end=2),
        helper.make_node("Add", ["before", "new"], ["all"]),
        helper.make_node("Slice", ["places", "before", "all", "zero"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    model = make_model(
        nodes,
        {"ids": ("int32", ("batch", "new")), "past": ("float32", ("batch", "past", 1))},
        {"y": ("float32", ("batch", "new", 8))},
        {
            "words": rng.standard_normal((50, 8)).astype("float32"),
            "places": rng.standard_normal((20, 8)).astype("float32"),
            "zero": np.array([0]),
        },
    )
    onnx.save(model.proto, folder / "decoder.onnx")
    return relaxtune.compile(
        folder / "decoder.onnx", folder / "artifact", target="llvm", samples=0, buckets={"new": (4,)}
    ).directory


def tokens(past: int, new: int, ids: int = 1) -> dict[str, np.ndarray]:
    return {"ids": np.full((1, new), ids, "int32"), "past": np.zeros((1, past, 1), "float32")}


@pytest.mark.parametrize("sizes", [(0, 20), (16, 4), (19, 1), (7, 5)])
def test_sums_of_axes_within_a_table_are_those_of_onnx_runtime(decoder: Path, sizes: tuple[int, int]) -> None:
    feeds = tokens(*sizes, ids=-50)
    expected = onnxruntime.InferenceSession(decoder.parent / "decoder.onnx").run(None, feeds)[0]
    np.testing.assert_array_equal(Module.load(decoder).run(feeds)["y"], expected)


@pytest.mark.parametrize("sizes", [(0, 21), (17, 4), (20, 1), (400, 400)])
def test_sums_of_axes_beyond_a_table_are_refused(decoder: Path, sizes: tuple[int, int]) -> None:
    module, feeds = Module.load(decoder), tokens(*sizes)
    said = rf"axis 'new \+ past' has size {sum(sizes)}, table 'places' takes 20 at most \(new={sizes[1]} from 'ids', "
    with pytest.raises(PipelineError, match=said):
        module.run(feeds)
    with pytest.raises(PipelineError, match=said):
        module.run_device(module.to_device(feeds))


@pytest.mark.parametrize("ids", [50, -51, 2**31 - 1])
def test_ids_outside_a_table_are_refused_on_the_host_and_kept_inside_on_the_device(decoder: Path, ids: int) -> None:
    module = Module.load(decoder)
    with pytest.raises(
        PipelineError, match=rf"input 'ids' has the value {ids}, table 'words' .* has 50 rows and takes"
    ):
        module.run(tokens(0, 3, ids))
    (inside,) = module.run_device(module.to_device(tokens(0, 3, ids)))
    row = module.run(tokens(0, 3, 49 if ids > 0 else 0))["y"]
    np.testing.assert_array_equal(inside.numpy(), row)


@pytest.mark.parametrize(
    "asked", [{"shapes": {"new": (21,)}}, {"buckets": {"new": (4, 21)}}, {"profile": {"new": (1, 4, 21)}}]
)
def test_sizes_beyond_a_table_are_refused_when_compiling(
    decoder: Path, tmp_path: Path, asked: dict[str, object]
) -> None:
    with pytest.raises(ModelError, match=r"has size 21, table 'places' takes 20 at most"):
        relaxtune.compile(decoder.parent / "decoder.onnx", tmp_path / "out", target="llvm", **asked)


def test_an_artifact_that_does_not_know_its_limits_is_loaded_and_says_so(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = tmp_path / "older"
    shutil.copytree(decoder, older)
    (older / MANIFEST_FILE).write_text(_without(load_manifest(decoder), "limits", "indices"))
    assert Module.load(older).run(tokens(0, 3))["y"].shape == (1, 3, 8)
    assert "did not keep the limits of its axes" in caplog.text
    caplog.clear()
    Module.load(decoder)
    assert not caplog.text


def test_sizes_that_a_graph_compares_are_compared_in_each_call(tmp_path: Path) -> None:
    # TVM takes both for one size, and leaves the check out.
    nodes = [
        helper.make_node("Concat", ["row", "row"], ["rows"], axis=0),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Expand", ["rows", "sizes"], ["y"]),
    ]
    inputs = {"x": ("float32", ("t", 4)), "row": ("float32", ("u", 4))}
    onnx.save(make_model(nodes, inputs, {"y": ("float32", ("t", 4))}).proto, tmp_path / "model.onnx")
    relaxtune.compile(tmp_path / "model.onnx", tmp_path / "made", target="llvm", samples=0)
    module = Module.load(tmp_path / "made")
    row = np.arange(12, dtype="float32").reshape(3, 4)
    np.testing.assert_array_equal(module.run({"x": np.zeros((6, 4), "float32"), "row": row})["y"], np.tile(row, (2, 1)))
    for count in (2, 5):
        with pytest.raises(PipelineError, match=r"axis 't' has size 6, the graph takes \d+ (at most|or more)"):
            module.run({"x": np.zeros((6, 4), "float32"), "row": np.ones((count, 4), "float32")})


def test_image_that_is_no_multiple_and_branch_that_does_not_fit_are_refused(tmp_path: Path) -> None:
    """Two strides meet where the height is a multiple of 4; a branch squeezes what has one place at a height of 4."""
    squeezed, kept = (
        helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, 1, None)])
        for name, node in (
            ("one", helper.make_node("Squeeze", ["half_max", "two"], ["one"])),
            ("all", helper.make_node("ReduceMax", ["half_max", "two"], ["all"], keepdims=0)),
        )
    )
    nodes = [
        helper.make_node("MaxPool", ["x"], ["half"], kernel_shape=[2], strides=[2]),
        helper.make_node("MaxPool", ["half"], ["half_max"], kernel_shape=[2], strides=[2]),
        helper.make_node("Resize", ["half_max", "", "twice"], ["large"], mode="nearest", nearest_mode="floor",
                         coordinate_transformation_mode="asymmetric"),
        helper.make_node("Concat", ["half", "large"], ["y"], axis=1),
        helper.make_node("If", ["narrow"], ["z"], then_branch=squeezed, else_branch=kept),
    ]  # fmt: skip
    model = make_model(
        nodes,
        {"x": ("float32", (1, 3, "height")), "narrow": ("bool", ())},
        {"y": ("float32", (1, 6, "h")), "z": ("float32", (1, 3))},
        {"twice": np.array([1, 1, 2], "float32"), "two": np.array([2])},
    )
    onnx.save(model.proto, tmp_path / "image.onnx")
    module = relaxtune.load(
        relaxtune.compile(tmp_path / "image.onnx", tmp_path / "out", target="llvm", samples=0).directory
    )

    def call(height: int, *, narrow: bool) -> dict[str, np.ndarray]:
        return module.run({"x": np.ones((1, 3, height), "float32"), "narrow": np.array(narrow)})

    assert call(4, narrow=True)["z"].shape == call(8, narrow=False)["z"].shape == (1, 3)
    with pytest.raises(PipelineError, match="axis 'height' has size 6, the graph takes multiples of 4"):
        call(6, narrow=False)
    with pytest.raises(PipelineError, match=r"do not fit together: an axis has size 2, expected 1$"):
        call(8, narrow=True)
