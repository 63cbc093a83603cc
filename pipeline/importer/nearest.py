"""Supported operators, and the nearest of them to a node that is not."""

from __future__ import annotations

import difflib
import functools

import onnx
from onnx import defs
from tvm.relax.frontend.onnx import onnx_frontend

from relaxtune.pipeline.importer.converters import CONVERTERS

# TVM's one table goes by name alone; its contrib operators must not serve in another domain.
_CONTRIB = frozenset({"BiasGelu", "EmbedLayerNormalization", "FastGelu", "SkipLayerNormalization"})
# Converted outside of the table.
_ELSEWHERE = frozenset({"If", "Loop", "Scan"})
_MIN_SIMILARITY = 0.7
# The main domain of ONNX and ONNX Runtime's own.
_DOMAINS = ("", "com.microsoft")


def nearest_supported(node: onnx.NodeProto, reason: str) -> str:
    """Return the nearest thing that is supported: another form, another domain, or an operator of a like name.

    Parameters
    ----------
    reason : str
        Why the node is not supported; "no converter", or what its converter said.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    if reason != "no converter":
        return f"{label(domain, node.op_type)} in another form: see the reason"
    names = supported_operators()
    for other in _DOMAINS:
        if other != domain and (other, node.op_type) in names:
            return label(other, node.op_type)
    if domain == "" and defs.has(node.op_type) and _has_function(node.op_type):
        return f"the operators that ONNX defines {node.op_type} by (its function body), written in its place"
    by_name = {name: key for key in sorted(names) for name in [key[1]]}
    close = difflib.get_close_matches(node.op_type, by_name, n=1, cutoff=_MIN_SIMILARITY)
    return label(*by_name[close[0]]) if close else "standard operators (domain ai.onnx) that compute the same"


@functools.cache
def supported_operators() -> frozenset[tuple[str, str]]:
    """Return (domain, operator) of everything that has a converter, ours or TVM's."""
    return frozenset(CONVERTERS) | {("", name) for name in stock_operators()}


def stock_operators() -> frozenset[str]:
    """Return the operators of the main ONNX domain that TVM's frontend converts."""
    return (frozenset(onnx_frontend._get_convert_map()) - _CONTRIB) | _ELSEWHERE


def label(domain: str, operator: str) -> str:
    """Return an operator as messages call it."""
    return f"{domain or 'ai.onnx'}.{operator}"


def _has_function(operator: str) -> bool:
    schema = defs.get_schema(operator)
    return bool(schema.has_function or schema.has_context_dependent_function)
