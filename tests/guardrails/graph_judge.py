"""What becomes of a random graph: lowered or compiled, run, and compared with ONNX Runtime."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, helper
from onnx.numpy_helper import to_array
from onnx.reference import ReferenceEvaluator

from relaxtune.models import OnnxModel
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.artifact.export import write_artifact
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.choose.selection import select_kernels
from relaxtune.pipeline.environment import UNKNOWN_DEVICE, detect_environment
from relaxtune.pipeline.errors import ImportFailedError, UsageError
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, LoweringOptions, lower
from relaxtune.pipeline.tasks.extract import extract_tasks
from relaxtune.pipeline.validate.exact_integers import with_unsigned_weights
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
    # The answer moves as far when nodes round in another way, or when the input moves by an ulp.
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
# Those of them that add up: terms that cancel leave a result far smaller than what rounding them makes of it.
SUMMING = frozenset(
    {"Gemm", "GroupNormalization", "LayerNormalization", "LogSoftmax", "MatMul", "ReduceMean", "ReduceSum", "Softmax"}
)
# Shares of an element's size that rounding accounts for, of float32 (measured: 4e-7 in 99 of 100) and of float16.
FINE, COARSE = 1e-5, 2e-2
HALF_STEP = 2.0**-11
# An answer may be off by so many times what rounding in another way moves it: orders of a sum, approximations.
ROUNDINGS = 4
FAULTS = (Status.WRONG, Status.CRASHED)
# ONNX's evaluator knows no operators of ONNX Runtime's own domain, and takes Unsqueeze of no old opset.
_NOT_EVALUATED = (NotImplementedError, TypeError)


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

    def attempt(self, seed: int) -> Outcome:
        """Return what becomes of the graph of a seed."""
        return try_graph(seed, self)


def try_graph(seed: int, plan: Plan) -> Outcome:
    """Draw a graph, compile and run it, and compare."""
    logging.disable(logging.WARNING)
    model, feeds = plan.draw(seed)
    precision = plan.precision(seed)
    wanted = wanted_of(model, feeds)
    if isinstance(wanted, str):
        return Outcome(seed, Status.INVALID, wanted, model.name)
    try:
        got = _run(model, feeds, plan, precision)
    except (ImportFailedError, UsageError) as e:
        cause = str(e).partition("Cause: ")[2] or str(e)
        return Outcome(seed, Status.REFUSED, cause.splitlines()[0][:150], model.name)
    except Exception as e:  # whatever comes out where ONNX Runtime answers is a finding
        return Outcome(seed, Status.CRASHED, line(e), model.name)
    if got is None:
        return Outcome(seed, Status.COMPILED, "", model.name)
    status, reason = judge(model, feeds, wanted, got, coarse=precision is not None)
    return Outcome(seed, status, reason, model.name)


def judge(
    model: OnnxModel, feeds: Mapping[str, np.ndarray], wanted: Arrays, got: Arrays, *, coarse: bool = False
) -> tuple[Status, str]:
    """Return whether an answer is right, wrong, or one of a graph that is unstable, and how far it is off.

    Right is what is within a few roundings of an answer that is right. Where it is not, the graph is computed again
    with every rounding going another way: an answer is wrong when it is off by many times what that moves it.

    Parameters
    ----------
    wanted
        ONNX Runtime's answer.
    coarse
        Whether the answer was computed in half precision, and ONNX Runtime's was not.
    """
    off = distance(got, wanted)
    others = _other_answers(model, feeds)
    while off > (COARSE if coarse else FINE):
        other = next(others, None)
        if other is None:
            break
        off = min(off, distance(got, other))
    else:
        return Status.RIGHT, ""
    moved = _moved(model, feeds, wanted, coarse)
    found = f"off by {off:.3g} of its size, rounding moves it by {moved:.3g}{_lost(got, wanted)}"
    if off > ROUNDINGS * moved:
        return Status.WRONG, found
    return (Status.UNSTABLE, found) if off > COARSE else (Status.RIGHT, "")


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
    exact = with_unsigned_weights(model.inline_proto())
    return list(ort.InferenceSession(exact.SerializeToString(), options).run(None, dict(feeds)))


def wanted_of(
    model: OnnxModel, feeds: Mapping[str, np.ndarray], *, optimised: Sequence[bool] = (True, False)
) -> Arrays | str:
    """Return ONNX Runtime's answer, or why there is none; its optimiser breaks a graph in a thousand."""
    for one in optimised:
        try:
            return _reference(model, feeds, optimised=one)
        except Exception as e:  # ONNX Runtime's errors have no common base
            reason = line(e)
    return reason


def _other_answers(model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> Iterator[Arrays]:
    """Yield the answers beside ONNX Runtime's that are right too.

    Its optimiser saturates some 8-bit matmuls. Its reductions keep a NaN or lose it by its place, and it rounds no
    float16 step on a CPU. ONNX's own evaluator defines what is right.
    """
    unoptimised = wanted_of(model, feeds, optimised=(False,))
    if not isinstance(unoptimised, str):
        yield unoptimised
    with contextlib.suppress(*_NOT_EVALUATED):
        yield _defined(model, feeds)


def _defined(model: OnnxModel, feeds: Mapping[str, np.ndarray], step: float = 0.0, seed: int = 0) -> Arrays:
    known = by_definition(model, feeds, step, seed)
    return [known[one.name] for one in model.proto.graph.output]


def by_definition(
    model: OnnxModel, feeds: Mapping[str, np.ndarray], step: float = 0.0, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return every tensor by ONNX's own evaluator, what a node rounds changed by so much of itself, up or down.

    So are the terms of sums.
    """
    rng = np.random.default_rng(seed)
    graph = model.proto.graph
    opsets = {one.domain: one.version for one in model.proto.opset_import}
    known = {"": np.zeros(0), **feeds, **{one.name: to_array(one) for one in graph.initializer}}
    with np.errstate(all="ignore"):
        for node in _executed(graph.node, known):
            given = {name: known[name] for name in node.input}
            if step and node.op_type in SUMMING:
                given = {name: _nudged(array, step, rng) for name, array in given.items()}
            found = ReferenceEvaluator(node, opsets=opsets).run(None, given)
            for name, array in zip(node.output, found, strict=True):
                half = array.dtype == np.float16
                rounds = step and (half or node.op_type in ROUNDING)
                known[name] = _nudged(array, HALF_STEP if half else step, rng) if rounds else array
    return known


def _executed(nodes: Iterable[NodeProto], known: Mapping[str, np.ndarray]) -> Iterator[NodeProto]:
    """Yield nodes in order; in place of an If those of its branch, and an Identity that writes its result."""
    for node in nodes:
        if node.op_type != "If":
            yield node
            continue
        chosen = "then_branch" if known[node.input[0]].item() else "else_branch"
        (branch,) = (one.g for one in node.attribute if one.name == chosen)
        yield from branch.node
        for inner, outer in zip(branch.output, node.output, strict=True):
            yield helper.make_node("Identity", [inner.name], [outer])


def _nudged(array: np.ndarray, step: float, rng: np.random.Generator) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    changed = (array * (1 + step * rng.choice((-1, 1), array.shape))).astype(array.dtype)
    # The least number, which masks add, stays a number: an infinity would move the answer by everything.
    limits = np.finfo(array.dtype)
    return np.where(np.isfinite(array), np.clip(changed, limits.min, limits.max), array)


def _moved(model: OnnxModel, feeds: Mapping[str, np.ndarray], wanted: Arrays, coarse: bool) -> float:
    """Return how far the answer moves when the inputs, and what nodes round, are rounded in another way.

    A tie of two sums goes by the order in which they are added up.
    """
    step = HALF_STEP if coarse else 2.0**-22
    rng = np.random.default_rng(0)
    apart = []
    with contextlib.suppress(*_NOT_EVALUATED):
        defined = _defined(model, feeds)
        apart += [distance(_defined(model, feeds, step, seed), defined) for seed in range(4)]
    for _ in range(4):
        nudged = {name: _nudged(array, step, rng) for name, array in feeds.items()}
        answer = wanted_of(model, nudged)
        if not isinstance(answer, str):
            apart.append(distance(answer, wanted))
    return max(apart, default=0.0)


def distance(got: Arrays, wanted: Arrays) -> float:
    """Return the largest difference of two answers, as a share of an element and of its tensor; infinite for NaN."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        if one.shape != other.shape:
            return np.inf
        finite = other[np.isfinite(other)]
        size = max(1.0, float(np.sqrt(np.mean(finite.astype("float64") ** 2)))) if finite.size else 1.0
        with np.errstate(all="ignore"):
            apart = np.abs(one.astype("float64") - other) / (size + np.abs(other.astype("float64")))
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        worst = max(worst, float(np.where(same, 0.0, np.nan_to_num(apart, nan=np.inf)).max(initial=0.0)))
    return worst


def _lost(got: Arrays, wanted: Arrays) -> str:
    """Return what a number does not say of two answers: other shapes, other elements that are NaN."""
    shapes, others = [one.shape for one in got], [one.shape for one in wanted]
    if shapes != others:
        return f"; expected shapes {others}, got {shapes}"
    counts = [(int(np.isnan(one).sum()), int(np.isnan(other).sum())) for one, other in zip(got, wanted, strict=True)]
    return "".join(f"; {one} NaN, expected {other}" for one, other in counts if one != other)


def line(error: Exception) -> str:
    """Return the last line of what an error says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip()[:200] if lines else ''}"
