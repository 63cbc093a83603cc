"""Encoder-decoders as Optimum exports them: an encoder, a decoder without past, one with past, or both in one `If`."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx
import torch
import transformers as tf
from onnx import TensorProto, helper

from tests.export.names import default_opset
from tests.export.recipes import BATCH, Axes, Tensors
from tests.export.sequence_to_sequence import features, text_inputs

_FIRST, _PAST = 3, 4
_OPSET = default_opset("optimum")


def export_files(model: torch.nn.Module, folder: Path, *, merged: bool = False, exporter: str = "torchscript") -> Path:
    """Write the files of a model, and the start of its decoder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sound = model.main_input_name == "input_features"
    inputs = features(model) if sound else text_inputs(model)
    with torch.no_grad():
        hidden = model.get_encoder()(**inputs).last_hidden_state
    axes: Axes = {name: {0: "batch_size"} | ({} if sound else {1: "encoder_length"}) for name in inputs}
    _write(model, folder / "encoder_model.onnx", exporter, inputs, axes, ["last_hidden_state"], lambda **given: (
        model.get_encoder()(**given).last_hidden_state,
    ))  # fmt: skip
    mask = {} if sound else {"encoder_attention_mask": inputs["attention_mask"]}
    ids = torch.randint(2, 100, (BATCH, _FIRST))
    of_mask: Axes = {name: {0: "batch_size", 1: "encoder_length"} for name in mask}
    first = {**mask, "input_ids": ids, "encoder_hidden_states": hidden}
    axes = {
        **of_mask,
        "input_ids": {0: "batch_size", 1: "decoder_length"},
        "encoder_hidden_states": {0: "batch_size", 1: "encoder_length"},
    }

    def prompt(**given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = model(
            encoder_outputs=(given["encoder_hidden_states"],), attention_mask=given.get("encoder_attention_mask"),
            decoder_input_ids=given["input_ids"], use_cache=True,
        )  # fmt: skip
        return (
            result.logits,
            *_tensors(result.past_key_values, "decoder"),
            *_tensors(result.past_key_values, "encoder"),
        )

    layers = model.config.decoder_layers if hasattr(model.config, "decoder_layers") else model.config.num_decoder_layers
    names = {side: [f"{side}.{part}" for part in ("key", "value")] for side in ("decoder", "encoder")}
    every = {side: [f"{layer}.{one}" for layer in range(layers) for one in names[side]] for side in names}
    outputs = ["logits", *(f"present.{one}" for side in every for one in every[side])]
    plain = folder / "decoder_model.onnx"
    _write(model, plain, exporter, first, axes, outputs, prompt)
    with torch.no_grad():
        _, *caches = prompt(**{**first, "input_ids": torch.randint(2, 100, (BATCH, _PAST))})
    past = {
        f"past_key_values.{one}": tensor
        for one, tensor in zip(every["decoder"] + every["encoder"], caches, strict=True)
    }
    axes = {
        **of_mask,
        "input_ids": {0: "batch_size"},
        **{f"past_key_values.{one}": {0: "batch_size", 2: "past_decoder_length"} for one in every["decoder"]},
        **{f"past_key_values.{one}": {0: "batch_size", 2: "encoder_length"} for one in every["encoder"]},
    }

    def step(**given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, cross = tf.DynamicCache(), tf.DynamicCache()
        for layer in range(layers):
            for cache, side in ((own, "decoder"), (cross, "encoder")):
                cache.update(*(given[f"past_key_values.{layer}.{side}.{part}"] for part in ("key", "value")), layer)
        keys = given["past_key_values.0.encoder.key"]
        answer = keys.transpose(1, 2).reshape(keys.shape[0], keys.shape[2], -1)
        result = model(
            encoder_outputs=(answer,), attention_mask=given.get("encoder_attention_mask"),
            decoder_input_ids=given["input_ids"], past_key_values=tf.EncoderDecoderCache(own, cross), use_cache=True,
        )  # fmt: skip
        return (result.logits, *_tensors(result.past_key_values, "decoder"))

    cached = folder / "decoder_with_past_model.onnx"
    given = {**mask, "input_ids": ids[:, :1], **past}
    _write(model, cached, exporter, given, axes, ["logits", *(f"present.{one}" for one in every["decoder"])], step)
    if merged:
        _merge(plain, cached, folder / "decoder_model_merged.onnx")
    (folder / "config.json").write_text(json.dumps({"decoder_start_token_id": model.config.decoder_start_token_id}))
    return folder


def _tensors(caches: tf.EncoderDecoderCache, side: str) -> list[torch.Tensor]:
    cache = caches.self_attention_cache if side == "decoder" else caches.cross_attention_cache
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


class _Called(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, call: Callable[..., tuple[torch.Tensor, ...]], names: list[str]) -> None:
        super().__init__()
        self.model, self.call, self.names = model, call, names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.call(**dict(zip(self.names, tensors, strict=True)))


def _write(
    model: torch.nn.Module,
    path: Path,
    exporter: str,
    inputs: Tensors,
    axes: Axes,
    outputs: list[str],
    call: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    dynamo = exporter == "dynamo"
    with warnings.catch_warnings(), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Called(model, call, list(inputs)).eval(), tuple(inputs.values()), str(path), input_names=list(inputs),
            output_names=outputs, opset_version=18 if dynamo else _OPSET, dynamo=dynamo, external_data=False,
            verbose=False,
            **({"dynamic_shapes": (tuple(axes[name] for name in inputs),)} if dynamo else {"dynamic_axes": axes}),
        )  # fmt: skip


def _merge(plain: Path, cached: Path, path: Path) -> None:
    """Write both decoders as the branches of an `If`, as Optimum does: outputs that one of them lacks are empty."""
    first, second = onnx.load(plain), onnx.load(cached)
    inputs = {one.name: one for model in (second, first) for one in model.graph.input}
    lacking = [one for one in first.graph.output if one.name not in {other.name for other in second.graph.output}]
    for one in lacking:
        empty = helper.make_tensor(f"{one.name}_empty", TensorProto.FLOAT, [0, 1, 1, 1], [])
        second.graph.node.append(helper.make_node("Constant", [], [one.name], value=empty))
        second.graph.output.append(helper.make_tensor_value_info(one.name, TensorProto.FLOAT, [0, 1, 1, 1]))
    order = [one.name for one in first.graph.output]
    branches = {}
    for name, model in (("then_branch", second), ("else_branch", first)):
        by_name = {one.name: one for one in model.graph.output}
        branches[name] = helper.make_graph(
            model.graph.node, name, [], [by_name[one] for one in order], model.graph.initializer
        )
    choice = helper.make_node("If", ["use_cache_branch"], order, **branches)
    use = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graph = helper.make_graph([choice], "merged", [*inputs.values(), use], list(first.graph.output))
    onnx.save(helper.make_model(graph, opset_imports=first.opset_import, ir_version=first.ir_version), path)
