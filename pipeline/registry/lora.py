"""Merge a LoRA adapter into a model: `W + scale * B A` for each matrix that the adapter names.

The adapter is what PEFT writes: `adapter_model.safetensors` with matrices A `[rank, in]` and B `[out, rank]` named
`PATH.lora_A.weight` and `PATH.lora_B.weight`, and `adapter_config.json` beside it. PATH is the layer's place in the
PyTorch model. A weight of the graph is that layer's if its own name is PATH (`PATH.weight`), or if the MatMul or Gemm
that reads it has PATH as its scope (`/model/layers.0/q_proj/MatMul`). Either may have the longer prefix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import safetensors
from onnx import numpy_helper

from relaxtune.models.loading import make_model
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.pipeline.errors import ArtifactError

CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight")
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_SHOWN = 5


@dataclass(frozen=True)
class _Weight:
    """A matrix of the graph that matmuls read; `turned` where it is stored as PyTorch does, `[out, in]`."""

    name: str
    turned: bool
    layers: frozenset[str]


def merge_lora(model: OnnxModel, adapter: Path) -> OnnxModel:
    """Return the model with an adapter's changes added to its weights.

    The adapter is the safetensors file, or PEFT's folder with it.
    Raises `ArtifactError`: the adapter cannot be read, or holds more than A and B of matrices; or a layer has no weight
    of its own, of its shape, in the graph: the layers are named. Nothing is merged then.
    """
    changes = _read_changes(adapter)
    weights = _find_weights(model)
    chosen: dict[str, str] = {}
    problems = []
    for layer, change in changes.items():
        # One of the two names may have a longer prefix than the other.
        names = {name: f".{name}" for one in weights for name in one.layers}
        same = {name for name, dotted in names.items() if f".{layer}".endswith(dotted) or dotted.endswith(f".{layer}")}
        found = [one for one in weights if one.layers & same]
        if len(found) != 1:
            problems.append(
                f"{layer} is {len(found)} weights of matmuls" if found else f"{layer} is no matmul's weight"
            )
            continue
        (weight,) = found
        array = model.array(weight.name)
        shape = change.shape if weight.turned else change.shape[::-1]
        if array.dtype.name not in _FLOATS or array.shape != shape:
            problems.append(f"{layer}: {weight.name} is {array.dtype} {array.shape}, expected a float {shape}")
        elif weight.name in chosen:
            problems.append(f"{layer} and {chosen[weight.name]} are both {weight.name}")
        chosen[weight.name] = layer
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ArtifactError(
            f"adapter {adapter} does not fit model {model.name}: {'; '.join(problems[:_SHOWN])}{more}. Merge it in "
            "PyTorch (merge_and_unload), export that, and refit with --weights"
        )
    turned = {one.name: one.turned for one in weights}
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in chosen:
            change = changes[chosen[tensor.name]]
            array = model.array(tensor.name)
            merged = array.astype("float32") + (change if turned[tensor.name] else change.T)
            tensor.CopyFrom(numpy_helper.from_array(merged.astype(array.dtype), tensor.name))
    return make_model(model.name, proto, path=None, data_dir=model.data_dir, seed=model.seed, relations=model.relations)


def _find_weights(model: OnnxModel) -> list[_Weight]:
    """Return the matrices that MatMul and Gemm read as they are or turned, with the layers that they may be."""
    graph = model.proto.graph
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    origin = {name: (name, False) for name in matrices}
    found: dict[str, _Weight] = {}
    for node in graph.node:
        attributes = {one.name: one for one in node.attribute}
        if node.op_type == "Transpose" and node.input[0] in matrices:
            origin[node.output[0]] = (node.input[0], True)
        elif node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 and node.input[1] in origin:
            name, turned = origin[node.input[1]]
            if node.op_type == "Gemm" and "transB" in attributes:
                turned ^= bool(attributes["transB"].i)
            # A name such as `/model/layers.0/q_proj/MatMul` has the layer's place before the operator.
            scope, slash, _ = node.name.strip("/").rpartition("/")
            layers = {name.removesuffix(".weight"), *([scope.replace("/", ".")] if slash else ())}
            before = found.get(name, _Weight(name, turned, frozenset()))
            # A weight that two nodes read in two ways has no one layout: no layer is it.
            known = before.layers | layers if before.turned == turned else frozenset()
            found[name] = _Weight(name, turned, known)
    return list(found.values())


def _read_changes(adapter: Path) -> dict[str, np.ndarray]:
    """Return layer -> `scale * B A`, `[out, in]` in float32."""
    file = adapter / ADAPTER_FILE if adapter.is_dir() else adapter
    halves: dict[str, dict[str, np.ndarray]] = {}
    try:
        with safetensors.safe_open(file, framework="numpy") as stored:
            matched = {name: _TENSOR.fullmatch(name) for name in stored.keys()}  # noqa: SIM118
            others = [name for name, found in matched.items() if found is None]
            for name, found in matched.items():
                if found is not None:
                    halves.setdefault(found["layer"], {})[found["part"]] = stored.get_tensor(name).astype("float32")
    except (OSError, safetensors.SafetensorError, ValueError, TypeError) as e:
        raise ArtifactError(f"adapter {file} cannot be read: {e}; name the .safetensors file that PEFT wrote") from e
    if others or not halves:
        raise ArtifactError(
            f"adapter {file} holds {', '.join(others[:_SHOWN]) or 'nothing'}, expected lora_A and lora_B of matrices "
            "alone; merge it in PyTorch (merge_and_unload), and refit with --weights"
        )
    config = _read_config(file.with_name(CONFIG_FILE))
    changes = {}
    for layer, parts in halves.items():
        if parts.keys() != {"A", "B"} or parts["A"].ndim != 2 or parts["B"].shape[1:] != parts["A"].shape[:1]:
            shapes = ", ".join(f"lora_{part} {array.shape}" for part, array in sorted(parts.items()))
            raise ArtifactError(f"adapter {file}: {layer} has {shapes}; expected A [rank, in] and B [out, rank]")
        patterns = config.get("alpha_pattern") or {}
        own = [alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer)]
        alpha, rank = float(own[0] if own else config["lora_alpha"]), len(parts["A"])
        scale = np.float32(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
        changes[layer] = scale * (parts["B"] @ parts["A"])
    return changes


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ArtifactError(f"{file}, which has the adapter's lora_alpha, cannot be read: {e}; copy it there") from e
    alpha = config.get("lora_alpha") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(alpha, int | float) or config.get("use_dora"):
        raise ArtifactError(f"{file} is not of a plain LoRA adapter: expected a number lora_alpha and no use_dora")
    return config
