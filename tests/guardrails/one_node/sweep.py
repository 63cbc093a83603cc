"""Graphs of one node: each operator by each type it is defined for, and by each edge of a shape.

Seeds number the cases; a case is the same for its seed as long as the list of forms is. ONNX Runtime or ONNX's own
evaluator says what is right.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from relaxtune.models import ModelError, OnnxModel
from relaxtune.models.loading import make_model
from relaxtune.pipeline.errors import ImportFailedError, UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import lower
from tests.guardrails.graph_judge import Arrays, Outcome, Status, distance, line
from tests.guardrails.one_node.forms import BINARY, FORMS, UNARY, Form, Node
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered
from tests.unoptimised import LLVM

OPSET = 24
# By what ONNX calls them.
DTYPES: Mapping[str, np.dtype] = {
    "float": np.dtype("float32"),
    "double": np.dtype("float64"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{name: np.dtype(name) for name in ("bool", "float16")},
}
# Shares of an element's size and its tensor's that rounding accounts for.
TOLERANCES = {"float64": 1e-11, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
# ONNX Runtime and ONNX's evaluator compute these in float32, or read an attribute so: off by so many times as much.
_IN_FLOAT32, _ROUGH = ("Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Selu"), 1e4
# The shape of the first input, and what a symbolic first axis is when the graph runs.
EDGES: Mapping[str, tuple[int, ...]] = {
    "plain": (2, 3, 4),
    "special": (),
    "row": (5,),
    "matrix": (3, 2),
    "scalar": (),
    "ones": (1, 1, 1),
    "none": (2, 0, 3),
    "none last": (3, 0),
    "symbolic": (7, 3),
    "symbolic one": (1, 3, 4),
    "symbolic none": (0, 3, 4),
    "image": (2, 4, 5, 5),
}
# Of integers, those that know what to do with the least and the largest.
_OF_ALL_INTEGERS = frozenset(
    {*UNARY, *BINARY, "ArgMax", "ArgMin", "Cast", "Clip", "Mod", "ReduceMax", "ReduceMin", "TopK", "Where"}
) - {"Pow", "Shrink", "Div", "Mean"}
_REDUCING = ("Einsum", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "OneHot")
# Shapes by which all types are drawn; the rest are drawn for two of them.
_ALL_TYPES, _SOME = ("plain", "image", "special"), ("float32", "int64", "bool")


@dataclass(frozen=True)
class Case:
    """A graph of one node."""

    operator: str
    form: str
    dtype: str
    edge: str

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.operator, self.form, self.dtype, self.edge)))


@functools.cache
def list_cases() -> tuple[Case, ...]:
    """Return every case whose operator takes the type and the shape."""
    found = []
    for operator, forms in sorted(FORMS.items()):
        dtypes = _dtypes_of(operator)
        some = [name for name in _SOME if name in dtypes] or list(dtypes)[:1]
        for form_name, form in forms.items():
            for edge in EDGES:
                cases = [Case(operator, form_name, dtype, edge) for dtype in (dtypes if edge in _ALL_TYPES else some)]
                fit = [case for case in cases if _has_meaning(case) and _node_of(case, form) is not None]
                # Images are for operators that take nothing else.
                if edge != "image" or not any(case.form == form_name and case.operator == operator for case in found):
                    found += fit
    return tuple(found)


def _has_meaning(case: Case) -> bool:
    """Return whether ONNX says what a case gives, and we say that we give it."""
    reduces = case.operator.startswith(("Reduce", "Arg", "DynamicQ")) or case.operator in _REDUCING
    match case.edge:
        case "special":
            integer = "int" in case.dtype
            # A scattered maximum keeps or loses a NaN, as ONNX Runtime's does, which has no bfloat16; ONNX's evaluator
            # takes an infinity from itself.
            lost = case.dtype == "bfloat16" and case.operator in ("ScatterElements", "ReduceLogSumExp")
            held = not lost and "Quantize" not in case.operator
            return held and case.operator in (_OF_ALL_INTEGERS if integer else FORMS)
        case "scalar":
            return not (reduces and case.form != "all")
    return not (case.operator == "ReduceLogSumExp" and "int" in case.dtype)


def _dtypes_of(operator: str) -> dict[str, np.dtype]:
    """Return the types of an operator's first input by name."""
    schema = defs.get_schema(operator, OPSET)
    kind = schema.inputs[0].type_str
    allowed = next((one.allowed_type_strs for one in schema.type_constraints if one.type_param_str == kind), [kind])
    return {dtype.name: dtype for name, dtype in DTYPES.items() if f"tensor({name})" in allowed}


def _node_of(case: Case, form: Form) -> Node | None:
    """Return the node and what it reads, None where its form does not take the shape."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    dtype = next(dtype for dtype in DTYPES.values() if dtype.name == case.dtype)

    def draw(*shape: int) -> np.ndarray:
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(dtype)
        if dtype.kind in "iu":
            return (rng.integers(1, 6, shape) * (rng.choice((-1, 1), shape) if dtype.kind == "i" else 1)).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    x = draw(*EDGES[case.edge])
    if case.edge == "special":
        x = _special(dtype)
    return form(Node(x, draw))


def _special(dtype: np.dtype) -> np.ndarray:
    """Return the numbers of a type on which functions differ."""
    if dtype.kind == "b":
        return np.array([True, False])
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return np.array([bounds.min, bounds.max, 0, 1, 2, 3], dtype)
    return np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 30, -30, 1e-3], dtype)


def draw_case(case: Case) -> tuple[OnnxModel, dict[str, np.ndarray]]:
    """Return the model of a case and what it is fed."""
    node = _node_of(case, FORMS[case.operator][case.form])
    assert node is not None
    feeds = {"x": node.x, **node.feeds}
    outputs = [f"y{number}" for number in range(node.outputs)]
    symbolic = case.edge.startswith("symbolic")

    def value(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        axes: list[int | str] = list(array.shape)
        if symbolic and array.ndim >= node.x.ndim and array.shape[-node.x.ndim] == node.shape[0]:
            axes[-node.x.ndim] = "batch"
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), axes)

    graph = helper.make_graph(
        [helper.make_node(case.operator, node.operands, outputs, name="node", **node.attributes)],
        "one",
        [value(*item) for item in feeds.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in node.constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    for output in proto.graph.output:
        # Operators that are functions have no inference of their own.
        if not output.type.tensor_type.elem_type:
            output.CopyFrom(
                helper.make_tensor_value_info(output.name, proto.graph.input[0].type.tensor_type.elem_type, None)
            )
    return make_model(case.name, proto, path=None, data_dir=None), feeds


@dataclass(frozen=True)
class OneNode:
    """How graphs of one node are tried: seeds are places in `list_cases()`."""

    def attempt(self, seed: int) -> Outcome:
        """Draw a graph of one node, lower and run it, and compare."""
        case = list_cases()[seed]
        try:
            model, feeds = draw_case(case)
        except (onnx.shape_inference.InferenceError, ModelError) as e:
            return Outcome(seed, Status.INVALID, line(e), case.name)
        answers = [answer for answer in (_by_runtime(model, feeds), _by_definition(model, feeds)) if answer]
        if not answers:
            return Outcome(seed, Status.INVALID, "neither ONNX Runtime nor ONNX's evaluator has an answer", case.name)
        try:
            got = run_lowered(lower(import_model(model), LLVM), feeds, UNOPTIMISED)
        except (ImportFailedError, UsageError) as e:
            cause = str(e).partition("Cause: ")[2] or str(e)
            return Outcome(seed, Status.REFUSED, cause.splitlines()[0][:150], case.name)
        except Exception as e:  # whatever comes out where there is an answer is a finding
            return Outcome(seed, Status.CRASHED, line(e), case.name)
        off = min(_apart(got, answer) for answer in answers) / (_ROUGH if case.operator in _IN_FLOAT32 else 1)
        if off <= 1:
            return Outcome(seed, Status.RIGHT, "", case.name)
        shown = f"off by {off:.3g} of the tolerance: {_shown(got)}, expected {_shown(answers[0])}"
        return Outcome(seed, Status.WRONG, shown, case.name)


def _apart(got: Arrays, wanted: Arrays) -> float:
    """Return the largest difference, by the tolerance of each type; of integers and truth values none is allowed."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return np.inf
        if one.dtype.kind in "iub":
            worst = max(worst, 0.0 if np.array_equal(one, other) else np.inf)
        else:
            worst = max(worst, distance([one], [other]) / TOLERANCES[one.dtype.name])
    return worst


def _shown(arrays: Arrays) -> str:
    return "; ".join(f"{one.dtype}{list(one.shape)} {one.ravel()[:6].tolist()}" for one in arrays)


def _by_runtime(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> Arrays | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return list(ort.InferenceSession(model.serialize(), options).run(None, dict(feeds)))
    except Exception:  # its errors have no common base; a type that it has no kernel for is one of them
        return None


def _by_definition(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> Arrays | None:
    try:
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(model.proto).run(None, dict(feeds))
    except Exception:  # whatever its NumPy raises
        return None
    # Its NumPy adds up 32 bits in 64.
    dtypes = [spec.dtype for spec in model.outputs]
    return [
        one.astype(dtype) if "int" in dtype else one for one, dtype in zip(map(np.asarray, found), dtypes, strict=True)
    ]
