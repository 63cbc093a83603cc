"""Artifacts with shape buckets: routing, padding that was tried, what is refused, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import load_model
from relaxtune.models.buckets import Side
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.artifact.calls.bucket_routing import BucketCount, RouteStatistics
from relaxtune.pipeline.artifact.directory import load_manifest, record_padding
from relaxtune.pipeline.artifact.export import share_weights
from relaxtune.pipeline.artifact.manifest import parse_manifest
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import ArtifactError, PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.reference import Reference
from tests.unoptimised import UNOPTIMISED_TEXT


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("buckets") / "bert"
    result = compile_model(
        ModelRequest("bert-tiny", target=UNOPTIMISED_TEXT, buckets={"sequence": (8, 16)}), out, samples=1
    )
    assert result.validation is not None
    assert result.validation.passed
    return out


def test_padding_of_bert_is_allowed_and_weights_are_stored_once(bert: Path) -> None:
    manifest = load_manifest(bert)
    assert manifest.buckets is not None
    (padding,) = manifest.buckets.padding
    assert (padding.axis, padding.side) == ("sequence", Side.RIGHT)
    assert padding.cases >= 8
    assert sorted(manifest.files) == ["bucket-0.so", "bucket-1.so", "model.so", "params.safetensors"]
    # All shapes read the same packed matrices; a table of positions is cut to the size of a bucket.
    small, large = (set(entry.weights) for entry in manifest.buckets.entries)
    assert len(small & set(manifest.weights)) > 10
    assert (small & large) <= set(manifest.weights)


@pytest.mark.slow
def test_an_axis_without_smaller_calls_shows_nothing_and_is_not_padded(tmp_path: Path) -> None:
    buckets = {"batch": (1,), "sequence": (8,)}
    compile_model(ModelRequest("bert-tiny", target=UNOPTIMISED_TEXT, buckets=buckets), tmp_path / "bert", samples=1)
    found = load_manifest(tmp_path / "bert").buckets
    assert found is not None
    batch, sequence = found.padding
    assert (batch.axis, batch.side, batch.cases) == ("batch", None, 0)
    assert batch.reason == "no call is smaller than its buckets"
    assert (sequence.side, sequence.cases > 0) == (Side.RIGHT, True)


def test_every_route_agrees_with_onnx_runtime_and_is_counted(bert: Path) -> None:
    module = Module.load(bert)
    model = load_model("bert-tiny", shapes={"input_ids": (1, "sequence")})
    reference = Reference(model)
    for sequence in (8, 5, 16, 9, 17, 40):
        inputs = random_inputs(model, seed=sequence, dims={"sequence": sequence})
        for name, want in reference.run(inputs).items():
            np.testing.assert_allclose(module.run(inputs)[name], want, rtol=1e-4, atol=1e-4)
    counted = module.statistics
    # Two runs of each, one an output.
    assert [(b.name, b.exact, b.padded) for b in counted.buckets] == [("sequence=8", 2, 2), ("sequence=16", 2, 2)]
    assert (counted.hits, counted.slow_path) == (8, 4)
    assert counted.padding_waste == pytest.approx(1 - (8 + 5 + 16 + 9) / (2 * 8 + 2 * 16))
    assert 'relaxtune_calls_total{model="bert-tiny",bucket="sequence=8",how="padded"} 2\n' in module.statistics_text()


def test_counts_as_prometheus_reads_them_have_an_alarm_where_calls_fit_no_bucket() -> None:
    within = RouteStatistics((BucketCount("n=4", 50, 40),), slow_path=10, given=3, computed=4)
    lines = within.to_prometheus('a "quoted" model').splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    of = 'model="a \\"quoted\\" model"'
    assert samples == {
        f'relaxtune_calls_total{{{of},bucket="n=4",how="exact"}}': "50",
        f'relaxtune_calls_total{{{of},bucket="n=4",how="padded"}}': "40",
        f'relaxtune_calls_total{{{of},bucket="",how="symbolic"}}': "10",
        f"relaxtune_padding_ratio{{{of}}}": "0.250000",
        f"relaxtune_sizes_alarm{{{of}}}": "0",
    }
    assert sum(line.startswith("# TYPE") for line in lines) == sum(line.startswith("# HELP") for line in lines) == 3
    alarm = 'relaxtune_sizes_alarm{model="m"} 1\n'
    assert alarm in replace(within, slow_path=11).to_prometheus("m")
    # Too few calls to say, and an artifact without buckets.
    assert alarm not in RouteStatistics((BucketCount("n=4", 1, 0),), slow_path=9).to_prometheus("m")
    assert alarm not in RouteStatistics(slow_path=1000).to_prometheus("m")


def test_tensors_on_the_device_go_to_a_bucket_of_their_very_size_only(bert: Path) -> None:
    module = Module.load(bert)
    model = load_model("bert-tiny", shapes={"input_ids": (1, "sequence")})
    for sequence in (16, 15):
        inputs = random_inputs(model, seed=0, dims={"sequence": sequence})
        got = module.run_device(module.to_device(inputs))
        assert got[0].shape[1] == sequence
    assert module.statistics.hits == 1
    assert module.statistics.slow_path == 1


def test_what_was_not_tried_takes_the_slow_path(bert: Path, tmp_path: Path) -> None:
    manifest = load_manifest(bert)
    assert manifest.buckets is not None
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bert.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    record_padding(copy, ())
    module = Module.load(copy)
    model = load_model("bert-tiny", shapes={"input_ids": (1, "sequence")})
    module.run(random_inputs(model, seed=0, dims={"sequence": 15}))
    module.run(random_inputs(model, seed=0, dims={"sequence": 16}))
    assert (module.statistics.hits, module.statistics.slow_path) == (1, 1)


def test_the_manifest_comes_back_as_it_was_written(bert: Path) -> None:
    manifest = load_manifest(bert)
    assert parse_manifest(manifest.to_json(), "text") == manifest


def test_a_bucket_that_is_missing_is_named(bert: Path) -> None:
    with pytest.raises(PipelineError, match="has 2 buckets, got number 7"):
        Module.load(bert).bucket_module(7)


def test_an_artifact_without_buckets_counts_nothing_and_takes_no_padding(tmp_path: Path) -> None:
    compile_model(ModelRequest(write_mean(tmp_path), target=UNOPTIMISED_TEXT), tmp_path / "plain", samples=0)
    assert Module.load(tmp_path / "plain").statistics.hits == 0
    with pytest.raises(ArtifactError, match="no shape buckets"):
        record_padding(tmp_path / "plain", ())


@pytest.mark.slow
def test_causal_right_padding_and_repeated_rows_of_gpt2_are_allowed(tmp_path: Path) -> None:
    request = ModelRequest("gpt2-tiny", target=UNOPTIMISED_TEXT, buckets={"batch": (1, 2), "sequence": (8,)})
    result = compile_model(request, tmp_path / "gpt2", samples=1)
    assert result.validation is not None
    assert result.validation.passed
    buckets = load_manifest(tmp_path / "gpt2").buckets
    assert buckets is not None
    assert buckets.sides == {"batch": Side.RIGHT, "sequence": Side.RIGHT}


@pytest.mark.slow
def test_the_cache_of_a_decode_step_is_padded_before(tmp_path: Path) -> None:
    request = ModelRequest("gpt2-tiny-decode", target=UNOPTIMISED_TEXT, buckets={"past_sequence": (8,)})
    result = compile_model(request, tmp_path / "step", samples=1)
    assert result.validation is not None
    assert result.validation.passed
    buckets = load_manifest(tmp_path / "step").buckets
    assert buckets is not None
    assert buckets.sides == {"past_sequence": Side.LEFT}


def write_graph(folder: Path, nodes: list[onnx.NodeProto]) -> Path:
    """Write a graph from x to y, both [batch, sequence]; `axes` is 1."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence"]) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], [onnx.numpy_helper.from_array(np.array([1]), "axes")])
    path = folder / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def write_mean(folder: Path) -> Path:
    """Write a graph that takes the mean over its symbolic axis: padding it with anything changes the answer."""
    mean = helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=1)
    return write_graph(folder, [mean, helper.make_node("Sub", ["x", "mean"], ["y"])])


def test_a_graph_that_padding_changes_is_never_padded(tmp_path: Path) -> None:
    request = ModelRequest(write_mean(tmp_path), target=UNOPTIMISED_TEXT, buckets={"sequence": (8,)})
    result = compile_model(request, tmp_path / "mean", samples=2)
    assert result.validation is not None
    assert result.validation.passed
    buckets = load_manifest(tmp_path / "mean").buckets
    assert buckets is not None
    (padding,) = buckets.padding
    assert padding.side is None
    assert "on the right" in padding.reason
    assert "on the left" in padding.reason
    module = Module.load(tmp_path / "mean")
    x = np.arange(10, dtype="float32").reshape(2, 5)
    np.testing.assert_allclose(module.run({"x": x})["y"], x - x.mean(axis=1, keepdims=True), rtol=1e-6)
    assert module.statistics.slow_path == 1


def test_a_maximum_of_what_is_positive_is_not_padded(tmp_path: Path) -> None:
    """Padded with zeros it is right for every input drawn: what the padding holds reaches the answer all the same."""
    steps = [
        helper.make_node("Abs", ["x"], ["size"]),
        helper.make_node("ReduceMax", ["size", "axes"], ["top"], keepdims=1),
        helper.make_node("Div", ["x", "top"], ["y"]),
    ]
    request = ModelRequest(write_graph(tmp_path, steps), target=UNOPTIMISED_TEXT, buckets={"sequence": (8,)})
    compile_model(request, tmp_path / "top", samples=1)
    buckets = load_manifest(tmp_path / "top").buckets
    assert buckets is not None
    (padding,) = buckets.padding
    assert padding.side is None
    assert "with other values in the padding" in padding.reason


@pytest.mark.parametrize(("shape", "axis"), [((0, 5), "batch"), ((2, 0), "sequence")])
def test_call_without_rows_is_refused_by_the_name_of_its_axis(
    tmp_path: Path, shape: tuple[int, int], axis: str
) -> None:
    request = ModelRequest(write_mean(tmp_path), target=UNOPTIMISED_TEXT, buckets={"batch": (4,)})
    compile_model(request, tmp_path / "mean", samples=0)
    with pytest.raises(PipelineError, match=f"axis '{axis}' has size 0 \\(from 'x'\\), expected 1 or more"):
        Module.load(tmp_path / "mean").run({"x": np.zeros(shape, "float32")})


def test_call_with_a_row_that_hides_all_places_is_not_padded(bert: Path) -> None:
    """Such a row is a mean over all places: padded, over those of the padding too."""
    module = Module.load(bert)
    model = load_model("bert-tiny", shapes={"input_ids": (1, "sequence")})
    inputs = random_inputs(model, seed=3, dims={"sequence": 5})
    inputs["attention_mask"][:] = 0
    got = module.run(inputs)
    for name, want in Reference(model).run(inputs).items():
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-4)
    assert (module.statistics.hits, module.statistics.slow_path) == (0, 1)


def test_weights_of_shapes_are_shared_when_equal_and_named_apart_when_not() -> None:
    a, b = np.arange(4.0), np.arange(3.0)
    stored = {"a": a}
    names = share_weights(stored, {"a": a.copy(), "other": a.copy(), "b": b}, "sequence=8")
    assert names == ("a", "a", "sequence=8/b")
    assert share_weights(stored, {"b": b.copy(), "a": a + 1}, "sequence=16") == ("sequence=8/b", "sequence=16/a")
    assert set(stored) == {"a", "sequence=8/b", "sequence=16/a"}
