"""A decoder in several files: without past beside with past, and both as the branches of one `If`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from relaxtune.models import load_model
from relaxtune.models.decoder_files import branch_of, find_files, read_prompt
from relaxtune.models.errors import ModelFileError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.onnx_runtime.prompts import takes_prompts
from relaxtune.pipeline.prepare import ModelRequest, import_request
from tests.pipeline.generation.test_step import HEADS, WIDTH, layer
from tests.pipeline.importer.onnx_cases import make_model
from tests.unoptimised import UNOPTIMISED_TEXT


def without_past(*, scale: float = 1.0) -> onnx.ModelProto:
    """Return the layer of a prompt; with another scale it is the prompt of another model."""
    model = layer().proto
    nodes = [node for node in model.graph.node if node.op_type != "Concat"]
    nodes.insert(3, helper.make_node("Mul", ["query", "scale"], ["present"]))
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    outputs = {"logits": ("float32", ("batch", "new", 16)), "present": ("float32", ("batch", HEADS, "new", WIDTH))}
    scales = {"scale": np.array(scale, np.float32)}
    return make_model(nodes, {"ids": ("int64", ("batch", "new"))}, outputs, weights | scales).proto


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose tokens and caches are called as exporters call them."""
    names = {"ids": "input_ids", "past": "past_key_values.0.key", "present": "present.0.key"}
    for node in model.graph.node:
        for kept in (node.input, node.output):
            kept[:] = [names.get(name, name) for name in kept]
    for one in (*model.graph.input, *model.graph.output):
        one.name = names.get(one.name, one.name)
    return model


def merged(first: onnx.ModelProto, cached: onnx.ModelProto) -> onnx.ModelProto:
    outputs = [one.name for one in first.graph.output]
    branches = {
        name: helper.make_graph(one.graph.node, name, [], one.graph.output, one.graph.initializer)
        for name, one in (("then_branch", cached), ("else_branch", first))
    }
    choice = helper.make_node("If", ["use_cache_branch"], outputs, **branches)
    use = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graph = helper.make_graph([choice], "merged", [*cached.graph.input, use], cached.graph.output)
    return helper.make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version)


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a decoder with past, a folder with a merged decoder that contains it, and the file in the folder."""
    first, cached = renamed(without_past()), renamed(layer().proto)
    alone, both = tmp_path / "with_past.onnx", tmp_path / "merged"
    both.mkdir()
    onnx.save(cached, alone)
    onnx.save(merged(first, cached), both / "decoder_model_merged.onnx")
    return alone, both, both / "decoder_model_merged.onnx"


def test_merged_decoder_is_read_by_its_branch_with_past(sources: tuple[Path, Path, Path]) -> None:
    models = [import_request(ModelRequest(source, generate=True)).model for source in sources]
    assert models[0].inputs == models[1].inputs == models[2].inputs
    assert [spec.name for spec in load_model(sources[2]).inputs] == ["input_ids", "past_key_values.0.key"]


@pytest.mark.slow
def test_merged_decoder_generates_by_its_branch_with_past(sources: tuple[Path, Path, Path], tmp_path: Path) -> None:
    tokens = []
    for number, source in enumerate(sources):
        request = ModelRequest(source, target=UNOPTIMISED_TEXT, generate=True, max_length=64)
        made = compile_model(request, tmp_path / f"artifact-{number}", samples=1)
        assert made.validation is not None
        assert made.validation.passed
        tokens.append(list(relaxtune_tokens(made.directory)))
    assert tokens[0] == tokens[1] == tokens[2]


def relaxtune_tokens(directory: Path) -> list[int]:
    from relaxtune import load

    return list(load(directory).generate([3, 1, 4, 1, 5], max_new_tokens=20))


@pytest.mark.parametrize(("scale", "right"), [(1.0, True), (2.0, False)])
def test_step_takes_prompts_where_it_agrees_with_the_decoder_without_past(
    tmp_path: Path, scale: float, right: bool
) -> None:
    # A hidden place in the future would be one reason to differ; another scale is another.
    onnx.save(renamed(without_past(scale=scale)), tmp_path / "decoder_model.onnx")
    onnx.save(renamed(layer().proto), tmp_path / "decoder_with_past_model.onnx")
    files = find_files(tmp_path)
    assert files is not None
    assert files.step.name == "decoder_with_past_model.onnx"
    prompt = read_prompt(files)
    assert prompt is not None
    assert takes_prompts(load_model(files.step), prompt) is right
    shape = import_request(ModelRequest(tmp_path, generate=True)).model.inputs[0].shape
    assert shape == ("batch", "new" if right else 1)


def test_model_without_branches_is_no_merged_decoder() -> None:
    assert branch_of(layer().proto, past=True) is None


def test_folder_without_a_decoder_with_past_is_refused(tmp_path: Path) -> None:
    onnx.save(renamed(without_past()), tmp_path / "encoder_model.onnx")
    onnx.save(renamed(without_past()), tmp_path / "decoder_model.onnx")
    with pytest.raises(ModelFileError, match=r"expected decoder_with_past_model.onnx or decoder_model_merged.onnx"):
        find_files(tmp_path)
