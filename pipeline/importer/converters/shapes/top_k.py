"""TopK without an order, as mixtures of experts pick theirs: sorted elements are as good, and TVM takes no other."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from relaxtune.pipeline.importer.converter_input import Converter, ConverterInput, constant_value, int_attribute


def convert_top_k(node: ConverterInput) -> tvm.ir.Expr | None:
    """Return the k greatest or least elements along an axis, sorted, and their places; TVM converts `sorted` itself.

    Raises
    ------
    ValueError
        k is not a constant.
    """
    if int_attribute(node, "sorted", 1):
        return None
    count = constant_value(node.input(1))
    if count is None:
        msg = "input 1 (k): expected a constant"
        raise ValueError(msg)
    return relax.op.topk(
        node.input(0),
        int(count.reshape(())),
        int_attribute(node, "axis", -1),
        ret_type="both",
        largest=bool(int_attribute(node, "largest", 1)),
        dtype="int64",
    )


TOP_K_CONVERTERS: Mapping[tuple[str, str], Converter] = {("", "TopK"): convert_top_k}
