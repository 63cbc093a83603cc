"""An artifact takes other weights without being compiled: the bits of a compilation from them, or a named obstacle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from safetensors.numpy import save_file

from relaxtune.pipeline.artifact.directory import hash_file, load_manifest, verify_artifact
from relaxtune.pipeline.artifact.manifest import MANIFEST_FILE, MODULE_FILE
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.cli.app import main
from relaxtune.pipeline.errors import ArtifactError, UsageError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.registry.lora import ADAPTER_FILE, CONFIG_FILE
from relaxtune.pipeline.registry.refit import refit_artifact
from tests.pipeline.importer.onnx_cases import make_model
from tests.unoptimised import UNOPTIMISED_TEXT

WIDTH = 32


def network(
    path: Path, seed: int, *, rows: int | str = 2, scale: float = 0.5, last: str = "Relu", alike: bool = False
) -> Path:
    """Write two layers with a scale between them; the biases are all ones where they are alike."""
    rng = np.random.default_rng(seed)
    biases = [np.ones(WIDTH, "float32") if alike else rng.standard_normal(WIDTH).astype("float32") for _ in range(2)]
    constants = {
        "w0": rng.standard_normal((WIDTH, WIDTH)).astype("float32"),
        "b0": biases[0],
        "w1": rng.standard_normal((WIDTH, WIDTH)).astype("float32"),
        "b1": biases[1],
        "scale": np.array(scale, "float32"),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("Add", ["a", "b0"], ["b"], name="first_bias"),
        helper.make_node("Mul", ["b", "scale"], ["c"], name="scaled"),
        helper.make_node("MatMul", ["c", "w1"], ["d"], name="second"),
        helper.make_node("Add", ["d", "b1"], ["e"], name="second_bias"),
        helper.make_node(last, ["e"], ["y"], name="last"),
    ]
    spec = ("float32", (rows, WIDTH))
    onnx.save(make_model(nodes, {"x": spec}, {"y": spec}, constants).proto, path)
    return path


def compiled(source: Path, out: Path, **asked: object) -> Path:
    lowering = asked.pop("lowering", LoweringOptions())
    assert isinstance(lowering, LoweringOptions)
    request = ModelRequest(source, target=UNOPTIMISED_TEXT, lowering=lowering, **asked)  # type: ignore[arg-type]
    return compile_model(request, out, samples=0).directory


def outputs(artifact: Path, rows: int = 2) -> Mapping[str, np.ndarray]:
    x = np.random.default_rng(9).standard_normal((rows, WIDTH)).astype("float32")
    return Module.load(artifact).run({"x": x})


@pytest.mark.parametrize("precision", [None, "fp16", "w4a16"])
def test_a_refit_has_the_bits_of_a_compilation(tmp_path: Path, precision: str | None) -> None:
    """Biases that were all alike are no exception: trained ones take their place."""
    old, new = network(tmp_path / "old.onnx", 0, alike=True), network(tmp_path / "new.onnx", 1)
    lowering = LoweringOptions(precision)
    first = compiled(old, tmp_path / "first", lowering=lowering)
    expected = compiled(new, tmp_path / "expected", lowering=lowering)
    code = hash_file(first / MODULE_FILE)
    done = refit_artifact(first, new, tmp_path / "refit")
    assert done.validation is not None
    assert done.validation.passed
    assert outputs(done.directory)["y"].tobytes() == outputs(expected)["y"].tobytes()
    assert outputs(done.directory)["y"].tobytes() != outputs(first)["y"].tobytes()
    made, compiled_one = verify_artifact(done.directory), load_manifest(expected)
    assert made.files[MODULE_FILE] == code
    assert made.validation is not None
    for field in ("model", "source", "model_sha256", "policy", "memory", "recipe"):
        assert getattr(made, field) == getattr(compiled_one, field), field
    assert [one.kernel_hash for one in made.kernels] == [one.kernel_hash for one in compiled_one.kernels]
    assert set(done.changed) == set(made.weights)


@pytest.mark.slow
def test_each_shape_bucket_takes_the_new_weights(tmp_path: Path) -> None:
    old, new = network(tmp_path / "old.onnx", 0, rows="n"), network(tmp_path / "new.onnx", 1, rows="n")
    first = compiled(old, tmp_path / "first", buckets={"n": (2, 4)})
    expected = compiled(new, tmp_path / "expected", buckets={"n": (2, 4)})
    refit_artifact(first, new, samples=1)
    for rows in (2, 3, 4):
        assert outputs(first, rows)["y"].tobytes() == outputs(expected, rows)["y"].tobytes()
    assert load_manifest(first).buckets.entries[0].recipe is not None


def test_a_lora_adapter_is_merged_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = network(tmp_path / "old.onnx", 0)
    first = compiled(old, tmp_path / "first")
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype("float32") for shape in ((4, WIDTH), (WIDTH, 4)))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.w1.lora_A.weight": a, "base_model.model.w1.lora_B.weight": b}, adapter / ADAPTER_FILE)
    (adapter / CONFIG_FILE).write_text(json.dumps({"lora_alpha": 8}))
    out = tmp_path / "tuned"
    with pytest.raises(SystemExit, match="0"):
        main(["artifact", "refit", str(first), "--lora", str(adapter), "--out", str(out), "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    assert (len(told["changed"]), len(told["same"]), told["validation_passed"]) == (1, 3, True)
    expected = compiled(tmp_path / "tuned.merged.onnx", tmp_path / "expected")
    assert outputs(out)["y"].tobytes() == outputs(expected)["y"].tobytes() != outputs(first)["y"].tobytes()
    with pytest.raises(SystemExit, match="0"):
        main(["validate", str(out), "--samples", "1"])
    with pytest.raises(UsageError, match="has an adapter in it already; name the model without it"):
        refit_artifact(out, out=out, lora=adapter)
    with pytest.raises(UsageError, match="refit needs other weights"):
        refit_artifact(first)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refit")
    return compiled(network(folder / "old.onnx", 0), folder / "first")


def _scaled(folder: Path) -> Path:
    return network(folder / "new.onnx", 1, scale=0.25)


def _other_graph(folder: Path) -> Path:
    return network(folder / "new.onnx", 1, last="Tanh")


def _other_input(folder: Path) -> Path:
    return _renamed(network(folder / "new.onnx", 1))


def _renamed(path: Path) -> Path:
    model = onnx.load(path)
    model.graph.output[0].name = model.graph.node[-1].output[0] = "z"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scaled, r"do not fit .*: kernel \w+ is made otherwise \(ONNX nodes .*scaled.*; initialisers .*scale\[\]"),
        (_other_graph, r"kernel \w+ (is not in the artifact|is made otherwise) \(ONNX nodes .*last"),
        (_other_input, r"another graph than artifact .*: expected x: float32\[2x32\] -> y: .*, got .* -> z: "),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    first: Path, tmp_path: Path, change: Callable[[Path], Path], said: str
) -> None:
    with pytest.raises(ArtifactError, match=said):
        refit_artifact(first, change(tmp_path), tmp_path / "refit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.onnx"]


def test_weights_inside_the_code_are_named(tmp_path: Path) -> None:
    old, new = network(tmp_path / "old.onnx", 0), network(tmp_path / "new.onnx", 1)
    embedded = compiled(old, tmp_path / "first", lowering=LoweringOptions(embed_weights=True))
    said = r"constant \S+ is part of the code \(ONNX nodes .*first.*initialisers w0\[32x32\].*--embed-weights"
    with pytest.raises(ArtifactError, match=said):
        refit_artifact(embedded, new)


def test_an_artifact_without_a_recipe_says_so(first: Path, tmp_path: Path) -> None:
    older = shutil.copytree(first, tmp_path / "older")
    (older / MANIFEST_FILE).write_text(replace(load_manifest(first), recipe=None).to_json())
    with pytest.raises(ArtifactError, match=r"has no recipe for other weights: relaxtune .* compile the model once"):
        refit_artifact(older, "bert-tiny")


def test_the_command_refits_in_place_and_keeps_what_fails_validation_aside(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, place = network(tmp_path / "new.onnx", 1), shutil.copytree(first, tmp_path / "place")

    def call(*words: object, code: int) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in ("artifact", "refit", place, "--weights", new, "--format", "json", *words)])
        written = capsys.readouterr()
        assert int(ended.value.code or 0) == code, written.err
        return written.out if code == 0 else written.err

    told = json.loads(call("--samples", 1, code=0))
    assert told["validation_passed"] is True
    assert told["same"] == []
    assert json.loads(call("--samples", 0, code=0))["changed"] == []

    wrong = compiled(network(tmp_path / "wrong.onnx", 0, last="Tanh"), tmp_path / "wrong")
    shutil.copyfile(wrong / MODULE_FILE, place / MODULE_FILE)
    manifest = load_manifest(place)
    lying = manifest.with_files({**manifest.files, MODULE_FILE: hash_file(place / MODULE_FILE)})
    (place / MANIFEST_FILE).write_text(lying.to_json())
    before = hash_file(place / MANIFEST_FILE)
    call("--samples", 1, code=3)
    assert hash_file(place / MANIFEST_FILE) == before
    assert load_manifest(tmp_path / "place.rejected").validation["passed"] is False
