"""What becomes of a random graph: lowered or compiled, run, and compared with ONNX Runtime."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto
from onnx.numpy_helper import to_array
from onnx.reference import ReferenceEvaluator

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.runtime import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.errors import ImportFailedError, UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from tests.guardrails.drawing import Drawn
from tests.guardrails.graph_cases import draw_graph
from tests.guardrails.near_misses import PATTERNS, draw_near_miss
from tests.pipeline.passes.pass_cases import UNOPTIMISED, run_lowered

Arrays = Sequence[np.ndarray]


class Status(StrEnum):
    """What became of a graph."""

    RIGHT = "right"
    WRONG = "wrong"
    CRASHED = "crashed"
    # The importer, or a precision, said no.
    REFUSED = "refused"
    # ONNX Runtime's own answer moves as far when it does not optimise, or when the input moves by an ulp.
    UNSTABLE = "unstable"
    # ONNX Runtime refuses the graph: the drawing is at fault.
    INVALID = "invalid"
    # For a device that is not here.
    COMPILED = "compiled"


# Operators whose result depends on the order of a sum, or on how a function is approximated.
ROUNDING = frozenset(
    {
        "Celu",
        "Div",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "Gemm",
        "GroupNormalization",
        "LayerNormalization",
        "Log",
        "LogSoftmax",
        "MatMul",
        "Pow",
        "ReduceL2",
        "ReduceMean",
        "ReduceSum",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "Sqrt",
        "Tanh",
    }
)
FAULTS = (Status.WRONG, Status.CRASHED)


@dataclass(frozen=True)
class Outcome:
    """What became of a graph, and why."""

    seed: int
    status: Status
    reason: str = ""
    name: str = ""


@dataclass(frozen=True)
class Plan:
    """How graphs are tried.

    Attributes
    ----------
    near_misses
        Near misses of patterns instead of graphs of random steps.
    target
        Whose passes run. Without `compiled`, kernels are evaluated on this CPU, without schedules.
    compiled
        Whether kernels are compiled as the product does, and run where the device is here.
    """

    near_misses: bool = False
    target: str = "llvm"
    compiled: bool = False

    def draw(self, seed: int) -> Drawn:
        """Return the graph of a seed and one input."""
        return (draw_near_miss if self.near_misses else draw_graph)(seed)

    def precision(self, seed: int) -> str | None:
        """Return the precision asked for: fp16 for a quarter of near misses, three quarters where a GPU's."""
        if not self.near_misses:
            return None
        place = seed // len(PATTERNS) % 4
        return "fp16" if (place != 3 if self.target.startswith("cuda") else place == 3) else None


def try_graph(seed: int, plan: Plan) -> Outcome:
    """Draw a graph, compile and run it, and compare."""
    logging.disable(logging.WARNING)
    model, feeds = plan.draw(seed)
    precision = plan.precision(seed)
    wanted = _wanted(model, feeds)
    if isinstance(wanted, str):
        return Outcome(seed, Status.INVALID, wanted, model.name)
    try:
        got = _run(model, feeds, plan, precision)
    except (ImportFailedError, UsageError) as e:
        cause = str(e).partition("Cause: ")[2] or str(e)
        return Outcome(seed, Status.REFUSED, cause.splitlines()[0][:150], model.name)
    except Exception as e:  # whatever comes out where ONNX Runtime answers is a finding
        return Outcome(seed, Status.CRASHED, _line(e), model.name)
    if got is None:
        return Outcome(seed, Status.COMPILED, "", model.name)
    halves = precision is not None or any(_rounds(node) for node in model.proto.graph.node)
    difference = _difference(got, wanted, halves)
    if not difference or any(not _difference(got, other, halves) for other in _other_answers(model, feeds)):
        return Outcome(seed, Status.RIGHT, "", model.name)
    status = Status.UNSTABLE if _moves(model, feeds, wanted, halves) else Status.WRONG
    return Outcome(seed, status, difference, model.name)


def _run(model: OnnxModel, feeds: Mapping[str, np.ndarray], plan: Plan, precision: str | None) -> Arrays | None:
    target = resolve_target(plan.target)
    lowered = lower(import_model(model), target.target, LoweringOptions(precision=precision))
    return _run_compiled(lowered, feeds, target) if plan.compiled else run_lowered(lowered, feeds, UNOPTIMISED)


def _run_compiled(lowered: LoweredModule, feeds: Mapping[str, np.ndarray], target: ResolvedTarget) -> Arrays | None:
    environment = detect_environment(target)
    choices = select_kernels(lowered, extract_tasks([lowered]), database=None, target=target, environment=environment)
    compiled = compile_module(lowered, choices, target)
    if environment.device_name == UNKNOWN_DEVICE:
        return None
    with tempfile.TemporaryDirectory(prefix="relaxtune-graphs-") as folder:
        write_artifact(compiled, Path(folder) / "artifact")
        outputs = Module.load(Path(folder) / "artifact", threads=1 if target.kind == "llvm" else None).run(feeds)
    return [outputs[spec.name] for spec in lowered.graph.model.outputs]


def _reference(model: OnnxModel, feeds: Mapping[str, np.ndarray], *, optimised: bool) -> Arrays:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(ort.InferenceSession(model.serialize(), options).run(None, dict(feeds)))


def _wanted(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> Arrays | str:
    """Return ONNX Runtime's answer, or why there is none; its optimiser breaks a graph in a thousand."""
    for optimised in (True, False):
        try:
            return _reference(model, feeds, optimised=optimised)
        except Exception as e:  # ONNX Runtime's errors have no common base
            reason = _line(e)
    return reason


def _other_answers(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> Iterator[Arrays]:
    """Yield the answers beside ONNX Runtime's that are right too.

    Its optimiser saturates some 8-bit matmuls. Its reductions keep a NaN or lose it by its place, and it rounds no
    float16 step on a CPU. ONNX's own evaluator defines what is right.
    """
    yield _reference(model, feeds, optimised=False)
    # It does not know the operators of ONNX Runtime's own domain.
    with contextlib.suppress(NotImplementedError):
        yield _by_definition(model, feeds)


def _by_definition(model: OnnxModel, feeds: Mapping[str, np.ndarray], step: float = 0.0, seed: int = 0) -> Arrays:
    """Return the answer of ONNX's own evaluator, what a node rounds changed by so much of itself, up or down."""
    rng = np.random.default_rng(seed)
    graph = model.proto.graph
    opsets = {one.domain: one.version for one in model.proto.opset_import}
    known = {"": np.zeros(0), **feeds, **{one.name: to_array(one) for one in graph.initializer}}
    with np.errstate(all="ignore"):
        for node in graph.node:
            found = ReferenceEvaluator(node, opsets=opsets).run(None, {name: known[name] for name in node.input})
            for name, array in zip(node.output, found, strict=True):
                known[name] = _nudged(array, step, rng) if step and node.op_type in ROUNDING else array
    return [known[one.name] for one in graph.output]


def _nudged(array: np.ndarray, step: float, rng: np.random.Generator) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    return (array * (1 + step * rng.choice((-1, 1), array.shape))).astype(array.dtype)


def _moves(model: OnnxModel, feeds: Mapping[str, np.ndarray], wanted: Arrays, halves: bool) -> bool:
    """Return whether the answer is another one without ONNX Runtime's optimiser, by ONNX's own, or an ulp away.

    The ulp is the inputs', or what nodes round: a tie of two sums goes by the order in which they are added up.
    """
    others = list(_other_answers(model, feeds))
    rng = np.random.default_rng(0)
    step = 2.0**-11 if halves else 2.0**-22
    for seed in range(4):
        nudged = {name: _nudged(array, step, rng) for name, array in feeds.items()}
        others.append(_reference(model, nudged, optimised=True))
        with contextlib.suppress(NotImplementedError):
            others.append(_by_definition(model, feeds, step, seed))
    return any(_difference(other, wanted, halves) for other in others)


def _difference(got: Arrays, wanted: Arrays, halves: bool) -> str:
    """Return how two answers differ by more than rounding does, "" where they do not."""
    limit = 2e-2 if halves else 1e-3
    for one, other in zip(got, wanted, strict=True):
        if one.shape != other.shape:
            return f"expected shape {other.shape}, got {one.shape}"
        finite = other[np.isfinite(other)]
        size = max(1.0, float(np.sqrt(np.mean(finite.astype("float64") ** 2)))) if finite.size else 1.0
        if not np.allclose(one, other, rtol=limit, atol=limit * size, equal_nan=True):
            with np.errstate(all="ignore"):
                apart = np.abs(one.astype("float64") - other)
            largest = float(np.nanmax(apart, initial=0.0))
            lost = f"NaN {np.isnan(one).sum()} of {np.isnan(other).sum()}"
            return f"largest difference {largest:.3g}, RMS {size:.3g}, {lost}"
    return ""


def _rounds(node: NodeProto) -> bool:
    return any(one.name == "to" and one.i == TensorProto.FLOAT16 for one in node.attribute)


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:200] if lines else ''}"
