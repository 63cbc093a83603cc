"""Files of a decoder as exporters split it, with the names that Optimum gives them.

::

    encoder_model.onnx              inputs -> last_hidden_state
    decoder_model.onnx              ids, encoder_hidden_states -> logits, present.N.{decoder, encoder}.{key, value}
    decoder_with_past_model.onnx    ids, past_key_values.N.{decoder, encoder}... -> logits, present.N.decoder...
    decoder_model_merged.onnx       both decoders, as the branches of an If on `use_cache_branch`

A decoder without an encoder has the same files, or `model.onnx` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import compose, helper, utils

from relaxtune.models.errors import ModelFileError
from relaxtune.models.external_data import check_external_data, inline_external_data
from relaxtune.models.files import read_proto
from relaxtune.models.hub.pooling import read_json
from relaxtune.models.onnx_model import list_graphs, nested_graphs

_HIDDEN = "encoder_hidden_states"
_CROSS = ".encoder."
# Of a model's folder, the first that says it.
_CONFIGURATIONS = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class DecoderFiles:
    """The files of a folder that generation needs."""

    step: Path  # With past, or with both branches.
    prompt: Path | None  # Without past; None where only the step's file can say it.
    encoder: Path | None

    @property
    def start(self) -> int | None:
        """The token that a decoder begins with, by the model's configuration."""
        files = [self.step.parent / name for name in _CONFIGURATIONS]
        found = [read_json(file).get("decoder_start_token_id") for file in files if file.is_file()]
        return next((token for token in found if isinstance(token, int)), None)


def find_files(place: Path) -> DecoderFiles | None:
    """Return the files of a folder, of several with one role the one with the shortest name; or a file alone.

    None where the place is neither: the name of a zoo model.

    Raises
    ------
    ModelFileError
        There is no decoder, or an encoder without the decoder that makes its keys and values.
    """
    if not place.is_dir():
        return DecoderFiles(place, None, None) if place.is_file() else None
    found: dict[str, Path] = {}
    for path in sorted(place.glob("*.onnx"), key=lambda path: len(path.name), reverse=True):
        role = "encoder" if "decoder" not in path.stem and "encoder" in path.stem else "prompt"
        found[next((part for part in ("with_past", "merged") if part in path.stem), role)] = path
    prompt, encoder = found.get("prompt"), found.get("encoder")
    step = found.get("with_past") or found.get("merged") or (None if encoder is not None else prompt)
    if step is None:
        raise ModelFileError(
            f"{place} has no decoder with past; expected decoder_with_past_model.onnx or decoder_model_merged.onnx, "
            f"as Optimum names them, got {', '.join(sorted(path.name for path in found.values())) or 'no .onnx file'}"
        )
    return DecoderFiles(step, None if prompt == step else prompt, encoder)


def branch_of(proto: onnx.ModelProto, *, past: bool) -> onnx.ModelProto | None:
    """Return one branch of a merged decoder as a model of its own; None where a model is no merged decoder."""
    (node, *others) = [node for node in proto.graph.node if node.op_type != "Constant"] or [onnx.NodeProto()]
    caches = {one.name for one in proto.graph.input if len(one.type.tensor_type.shape.dim) == 4}
    if others or node.op_type != "If" or not caches:
        return None
    first, second = nested_graphs(node)
    reading_first = len(caches & _names_read(first)) > len(caches & _names_read(second))
    branch = first if reading_first == past else second
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    graph = model.graph
    constants = [one for one in graph.node if one.op_type == "Constant"]
    del graph.node[:], graph.output[:], graph.value_info[:]
    graph.node.extend([*constants, *branch.node])
    graph.initializer.extend(branch.initializer)
    graph.value_info.extend(branch.value_info)
    for output, name in zip(branch.output, node.output, strict=True):
        axes = output.type.tensor_type.shape.dim
        if any(axis.HasField("dim_value") and axis.dim_value == 0 for axis in axes):
            continue  # It stands for an output of the other branch.
        if output.name != name:
            graph.node.append(helper.make_node("Identity", [output.name], [name]))
        graph.output.add().CopyFrom(output)
        graph.output[-1].name = name
    read = _names_read(graph) | {one.name for one in graph.output}
    for kept in (graph.input, graph.initializer):
        for one in [one for one in kept if one.name not in read]:
            kept.remove(one)
    return model


def read_decoder(path: Path) -> onnx.ModelProto:
    """Return the model of a file: of a merged decoder, the branch with past."""
    proto = read_proto(path)
    return branch_of(proto, past=True) or proto


def read_prompt(files: DecoderFiles) -> onnx.ModelProto | None:
    """Return the decoder without past; None where there is none."""
    if files.prompt is None:
        return branch_of(read_proto(files.step), past=False)
    proto, folder = read_proto(files.prompt), files.prompt.absolute().parent
    inline_external_data(proto, folder, check_external_data(proto, folder))
    return proto


def read_encoder(files: DecoderFiles) -> onnx.ModelProto:
    """Return the model from the encoder's inputs to all that the decoder's step needs of it, by the step's names.

    Raises
    ------
    ModelFileError
        No decoder without past makes keys and values of the encoder's output, or the files do not fit together.
    """
    assert files.encoder is not None
    encoder, step = read_proto(files.encoder), read_decoder(files.step)
    made = [one.name for one in encoder.graph.output]
    needed = [one.name for one in step.graph.input if _CROSS in one.name or one.name == _HIDDEN]
    if set(needed) <= set(made):
        return encoder
    source, prompt = files.prompt or files.step, read_prompt(files) or step
    outputs = {name: name.replace("past_key_values", "present") for name in needed if name != _HIDDEN}
    missing = set(outputs.values()) - {one.name for one in prompt.graph.output}
    if missing or _HIDDEN not in {one.name for one in prompt.graph.input}:
        raise ModelFileError(
            f"{source} does not make the keys and values of the encoder's output; expected the decoder without past "
            f"(decoder_model.onnx), with the input {_HIDDEN} and the output {min(missing, default='present...')}"
        )
    cross = _cross(prompt, list(outputs.values()))
    cross = compose.add_prefix(cross, "cross/")
    cross.ir_version = encoder.ir_version = max(cross.ir_version, encoder.ir_version)
    try:
        model = compose.merge_models(encoder, cross, [(made[0], f"cross/{_HIDDEN}")])
    except ValueError as e:
        raise ModelFileError(f"{files.encoder.name} and {source.name} do not fit together: {e}") from e
    versions = {one.domain: one for one in model.opset_import}
    del model.opset_import[:]
    model.opset_import.extend(versions.values())
    present = {f"cross/{made}": name for name, made in outputs.items()}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [present.get(name, name) for name in names]
    del model.graph.value_info[:]
    # An encoder of sound knows its length; all else is inferred again.
    length = encoder.graph.output[0].type.tensor_type.shape.dim[1]
    for one in model.graph.output:
        one.name = present.get(one.name, one.name)
        for place, axis in enumerate(one.type.tensor_type.shape.dim):
            axis.CopyFrom(length if place == 2 else onnx.TensorShapeProto.Dimension())
    if _HIDDEN in needed:
        model.graph.node.append(helper.make_node("Identity", [made[0]], [_HIDDEN]))
        model.graph.output.add().CopyFrom(encoder.graph.output[0])
        model.graph.output[-1].name = _HIDDEN
    return model


def _cross(prompt: onnx.ModelProto, outputs: list[str]) -> onnx.ModelProto:
    """Return the part of a decoder without past that computes outputs of the encoder's alone."""
    cross = utils.Extractor(prompt).extract_model([_HIDDEN], outputs)
    zero = helper.make_tensor("zero", onnx.TensorProto.INT64, [1], [0])
    ids = {one.name for one in prompt.graph.input} - {_HIDDEN}
    for name in sorted(ids & _names_read(cross.graph)):
        # Only its batch is read: the shape of keys is often taken from the tokens.
        cross.graph.initializer.append(helper.make_tensor(f"{name}/1", onnx.TensorProto.INT64, [1], [1]))
        made_of = [
            helper.make_node("Shape", [_HIDDEN], [f"{name}/batch"], end=1),
            helper.make_node("Concat", [f"{name}/batch", f"{name}/1"], [f"{name}/shape"], axis=0),
            helper.make_node("ConstantOfShape", [f"{name}/shape"], [name], value=zero),
        ]
        nodes = [*made_of, *cross.graph.node]
        del cross.graph.node[:]
        cross.graph.node.extend(nodes)
    return cross


def _names_read(graph: onnx.GraphProto) -> set[str]:
    return {name for one in list_graphs(graph) for node in one.node for name in node.input}
