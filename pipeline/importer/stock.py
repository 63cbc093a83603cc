"""Which operators TVM's own ONNX frontend converts."""

from __future__ import annotations

from tvm.relax.frontend.onnx import onnx_frontend

# TVM's one table goes by name alone; its contrib operators must not serve in another domain.
_CONTRIB = frozenset({"BiasGelu", "EmbedLayerNormalization", "FastGelu", "SkipLayerNormalization"})
# Converted outside of the table.
_ELSEWHERE = frozenset({"If"})


def stock_operators() -> frozenset[str]:
    """Return the operators of the main ONNX domain that TVM's frontend converts."""
    return (frozenset(onnx_frontend._get_convert_map()) - _CONTRIB) | _ELSEWHERE
