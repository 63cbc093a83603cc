"""ONNX to Relax: normalise the ONNX graph, convert it node by node, keep the way back to the nodes."""

from __future__ import annotations

from relaxtune.pipeline.importer.graph import ImportedGraph
from relaxtune.pipeline.importer.importer import import_model
from relaxtune.pipeline.importer.normalise import NormalisedGraph, normalise

__all__ = ["ImportedGraph", "NormalisedGraph", "import_model", "normalise"]
