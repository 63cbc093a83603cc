"""Look-ups stay inside their tables, whichever operator makes them: every converter goes through one door."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import tvm
from onnx import defs
from tvm import tirx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.importer.converters import CONVERTERS
from relaxtune.pipeline.importer.nearest import stock_operators
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.pipeline.passes.keep_lookups_inside import keep_lookups_inside, lookups
from relaxtune.pipeline.passes.legalise_operators import legalise_operators
from tests.guardrails.one_node.forms import FORMS
from tests.guardrails.one_node.sweep import OPSET, draw_case, list_cases
from tests.pipeline.importer.converters.test_contrib_converters import floats, model_of
from tests.pipeline.passes.pass_cases import LLVM, state_of

IDS = np.array([[1, 0, 2]])
ROWS = 5
Inputs = list[tuple[str, np.ndarray] | None]


def embeddings(ids: np.ndarray) -> OnnxModel:
    narrow = ids.astype("int32")
    tables: Inputs = [(name, floats(ROWS, 8)) for name in ("words", "places", "kinds")]
    inputs: Inputs = [("ids", narrow), ("segments", narrow), *tables, ("g", floats(8)), ("b", floats(8)), None]
    return model_of("EmbedLayerNormalization", [*inputs, ("at", narrow)], {"y": ("float32", (1, 3, 8))})[0]


def rotary(domain: str) -> Callable[[np.ndarray], OnnxModel]:
    def made(ids: np.ndarray) -> OnnxModel:
        tables: Inputs = [("cos", floats(ROWS, 4)), ("sin", floats(ROWS, 4))]
        places: Inputs = [("at", ids)]
        inputs: Inputs = [("x", floats(1, 2, 3, 8)), *(places + tables if domain else tables + places)]
        return model_of("RotaryEmbedding", inputs, {"y": ("float32", (1, 2, 3, 8))}, domain=domain, opset=24)[0]

    return made


def grouped(ids: np.ndarray) -> OnnxModel:
    heads: Inputs = [(name, floats(1, 3, 16)) for name in ("q", "k", "v")]
    past: Inputs = [(name, floats(1, 1, 4, 16)) for name in ("past_k", "past_v")]
    counts: Inputs = [("counts", ids[0, :1].astype("int32")), ("total", np.array(7, "int32"))]
    tables: Inputs = [("cos", floats(ROWS, 8)), ("sin", floats(ROWS, 8)), ("at", ids)]
    cache = ("float32", (1, 1, 7, 16))
    outputs = {"y": ("float32", (1, 3, 16)), "k2": cache, "v2": cache}
    inputs = [*heads, *past, *counts, *tables]
    return model_of("GroupQueryAttention", inputs, outputs, num_heads=1, kv_num_heads=1, do_rotary=1)[0]


def quantised_rows(ids: np.ndarray) -> OnnxModel:
    inputs: Inputs = [("t", np.zeros((ROWS, 32), "uint8")), ("i", ids), ("s", floats(ROWS, 2))]
    given = {"bits": 8, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    shape = {"y": ("float32", (1, 3, 32))}
    return model_of("GatherBlockQuantized", inputs, shape, constants=frozenset("ts"), **given)[0]


def scattered_rows(ids: np.ndarray) -> OnnxModel:
    inputs: Inputs = [("cache", floats(1, 6, 4)), ("new", floats(1, 2, 4)), ("at", ids[:, 0])]
    return model_of("TensorScatter", inputs, {"y": ("float32", (1, 6, 4))}, domain="", opset=24)[0]


# Operators that read or write places that an input names, beside those of `FORMS`.
LOOKUPS: Mapping[tuple[str, str], Callable[[np.ndarray], OnnxModel]] = {
    ("", "RotaryEmbedding"): rotary(""),
    ("", "TensorScatter"): scattered_rows,
    ("com.microsoft", "EmbedLayerNormalization"): embeddings,
    ("com.microsoft", "GatherBlockQuantized"): quantised_rows,
    ("com.microsoft", "GroupQueryAttention"): grouped,
    ("com.microsoft", "RotaryEmbedding"): rotary("com.microsoft"),
}
# Operators that read places which follow from sizes alone, or that keep lengths within the sizes (recurrent layers).
# A new converter belongs here, in `FORMS` or in `LOOKUPS`.
NO_LOOKUPS = frozenset(
    {
        ".Attention", ".Constant", ".ConstantOfShape", ".ConvInteger", ".ConvTranspose", ".DFT", ".EyeLike", ".GRU",
        ".LSTM", ".QLinearConv", ".QLinearMatMul", ".RNN", ".Range", ".Resize", ".STFT",
        ".SimplifiedLayerNormalization",
        ".SpaceToDepth", "com.microsoft.Attention", "com.microsoft.BiasGelu", "com.microsoft.DequantizeLinear",
        "com.microsoft.DynamicQuantizeMatMul", "com.microsoft.FastGelu", "com.microsoft.FusedConv",
        "com.microsoft.FusedGemm", "com.microsoft.FusedMatMul", "com.microsoft.Gelu",
        "com.microsoft.MatMulIntegerToFloat", "com.microsoft.MatMulNBits", "com.microsoft.MultiHeadAttention",
        "com.microsoft.QAttention", "com.microsoft.QGemm", "com.microsoft.QLinearAdd", "com.microsoft.QLinearConcat",
        "com.microsoft.QLinearLeakyRelu", "com.microsoft.QLinearMul", "com.microsoft.QLinearSigmoid",
        "com.microsoft.QLinearSoftmax", "com.microsoft.QuantizeLinear", "com.microsoft.QuickGelu",
        "com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization",
    }
)  # fmt: skip


def functions_of(mod: tvm.ir.IRModule) -> list[tirx.PrimFunc]:
    return [function for _, function in mod.functions_items() if isinstance(function, tirx.PrimFunc)]


def test_every_converter_is_known_to_look_up_or_not() -> None:
    known = {("", operator) for operator in FORMS} | LOOKUPS.keys()
    assert {f"{domain}.{operator}" for domain, operator in CONVERTERS if (domain, operator) not in known} == NO_LOOKUPS


def through_the_door(model: OnnxModel) -> tuple[int, int]:
    """Return how many look-ups may leave their tensor before the door, and behind it."""
    with LLVM, tvm.transform.PassContext(opt_level=3):
        state = state_of(import_model(model))
        made = legalise_operators(state.graph.mod, state)
        kept = keep_lookups_inside(made, state)
    return tuple(sum(len(lookups(one)) for one in functions_of(mod)) for mod in (made, kept))  # type: ignore[return-value]


def takes_integers(operator: str) -> bool:
    """Return whether an operand of an operator, not its first, can be integers only."""
    schema = defs.get_schema(operator, OPSET)
    allowed = {one.type_param_str: set(one.allowed_type_strs) for one in schema.type_constraints}
    kinds = [allowed.get(one.type_str, {one.type_str}) for one in schema.inputs[1:]]
    return any(kind <= {"tensor(int32)", "tensor(int64)"} for kind in kinds)


def test_no_operator_looks_up_beside_the_door() -> None:
    own = {operator for domain, operator in CONVERTERS if not domain} | stock_operators()
    wanted = {operator for operator in FORMS if operator in own and takes_integers(operator)}
    cases = {(case.operator, case.form): case for case in list_cases() if case.operator in wanted}
    assert {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"} <= wanted
    open_before = set()
    for case in cases.values():
        before, behind = through_the_door(draw_case(case)[0])
        assert behind == 0, case.name
        if before:
            open_before.add(case.operator)
    # Those that TVM makes without a bound; `Gather` clips already.
    assert open_before == {"GatherElements", "GatherND", "ScatterElements", "ScatterND"}


@pytest.mark.parametrize("operator", LOOKUPS, ids=".".join)
def test_contrib_operators_look_up_through_the_door(operator: tuple[str, str]) -> None:
    model = LOOKUPS[operator](IDS)
    assert through_the_door(model)[1] == 0
    for target in (LLVM, tvm.target.Target("nvidia/nvidia-h100")):
        lowered = lower(import_model(model), target, LoweringOptions())
        assert [found for one in functions_of(lowered.mod) for found in lookups(one)] == []
