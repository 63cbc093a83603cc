"""`ImportedGraph`: what the importer hands to the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm

from relaxtune.models import OnnxModel, TensorSpec
from relaxtune.models.spec import Generation


@dataclass(frozen=True)
class ImportedGraph:
    """An ONNX graph as a Relax module, with the way back to its ONNX nodes."""

    name: str  # Short model name (zoo name or file stem).
    model: OnnxModel  # The ONNX model as the user gave it: the reference that validation runs, not the normalised one.
    # IRModule with one Relax function `main`; its parameters are the ONNX inputs in order, weights are constants.
    mod: tvm.ir.IRModule
    # Signature in ONNX order: names, NumPy dtype names, static sizes or symbol names. `main` returns a tensor for one
    # output and a tuple for several.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Relax binding name (the `name_hint` of a variable bound in `main`) -> names of the ONNX nodes it computes.
    source_map: Mapping[str, tuple[str, ...]]
    source_sha256: str  # Content hash of the ONNX model, weights included.
    generation: Generation | None = None  # Of a decoder that was made a step of generation; inputs are that step's.
