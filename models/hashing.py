"""The content hash of a model: the same for inline and external weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx

from relaxtune.models.onnx_model import read_external_bytes, read_tensor


def content_sha256(model: onnx.ModelProto, data_dir: Path | None) -> str:
    """Return the sha256 (hex) of the graph without its weights, then of every weight's name, dtype, dims and bytes."""
    skeleton = without_weights(model)
    digest = hashlib.sha256(skeleton.SerializeToString(deterministic=True))
    for tensor in sorted(model.graph.initializer, key=lambda t: str(t.name)):
        digest.update(f"\0{tensor.name}\0{tensor.data_type}\0{list(tensor.dims)}\0".encode())
        if tensor.data_location == onnx.TensorProto.EXTERNAL and data_dir is not None:
            digest.update(read_external_bytes(tensor, data_dir))
        elif tensor.HasField("raw_data"):
            digest.update(tensor.raw_data)
        else:
            digest.update(np.ascontiguousarray(read_tensor(tensor, data_dir)).tobytes())
    return digest.hexdigest()


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model whose main graph has no initializers; the weights are never copied."""
    copy = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name == "graph":
            continue
        if isinstance(value, int | str):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).extend(value)
    for field, value in model.graph.ListFields():
        if field.name == "initializer":
            continue
        if isinstance(value, str):
            setattr(copy.graph, field.name, value)
        else:
            getattr(copy.graph, field.name).extend(value)
    return copy
