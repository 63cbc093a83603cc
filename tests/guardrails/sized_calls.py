"""What becomes of a random graph with symbolic axes: compiled as the product does, then called with five sizes.

ONNX Runtime, its optimisations off, is the oracle of every call. What it computes, the artifact computes or refuses
with an error of ours; what it refuses, the artifact refuses. Sizes lie at a graph's limit, one beyond, and below.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.errors import ModelError
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.validation import sample_inputs
from tests.guardrails.graph_judge import Outcome, Status, judge, line
from tests.guardrails.sized_drawing import SizedDrawing, size_of
from tests.guardrails.sized_graphs import draw_sized

Feeds = dict[str, np.ndarray]
_WINDOWS = frozenset({"Conv", "MaxPool", "AveragePool"})
_OTHERS = (1, 2, 3, 5)
_UNBOUNDED = (2, 7, 8, 15, 16, 17, 33)
_CALLS = 5


@dataclass(frozen=True)
class Call:
    """Inputs of a call, and its sizes in words."""

    feeds: Feeds
    words: str


@dataclass(frozen=True)
class SizedPlan:
    """Graphs with symbolic axes, each compiled once and called often."""

    def attempt(self, seed: int) -> Outcome:
        """Return what becomes of the graph of a seed."""
        logging.disable(logging.WARNING)
        drawing, outputs = draw_sized(seed)
        name = f"sizes{seed}"
        proto = drawing.proto(name, outputs)
        try:
            session = _session(proto)
        except Exception as e:  # ONNX Runtime's errors have no common base
            return Outcome(seed, Status.INVALID, line(e), name)
        calls = list(list_calls(drawing, np.random.default_rng([seed, 43])))
        wanted = [_answer(session, call.feeds) for call in calls]
        if all(isinstance(one, str) for one in wanted):
            return Outcome(seed, Status.INVALID, str(wanted[0]), name)
        with tempfile.TemporaryDirectory(prefix="relaxtune-sizes-") as folder:
            path = Path(folder) / f"{name}.onnx"
            onnx.save(proto, path)
            try:
                model = load_model(path)
                compile_model(ModelRequest(str(path), target="llvm"), Path(folder) / "made", samples=0)
            except (PipelineError, ModelError) as e:
                cause = str(e).partition("Cause: ")[2] or str(e)
                return Outcome(seed, Status.REFUSED, cause.splitlines()[0][:150], name)
            except Exception as e:  # whatever comes out where ONNX Runtime answers is a finding
                return Outcome(seed, Status.CRASHED, line(e), name)
            drawn = _answer(session, sample_inputs(model, samples=1, seed=seed)[0])
            if isinstance(drawn, str):
                return Outcome(seed, Status.CRASHED, f"sizes drawn for validation are refused: {drawn}", name)
            module = Module.load(Path(folder) / "made", threads=1)
            status, reason = _judge_calls(module, model, calls, wanted, drawing.dtype)
            return Outcome(seed, status, reason, name)


def _session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options)


def _answer(session: ort.InferenceSession, feeds: Feeds) -> list[np.ndarray] | str:
    try:
        return list(session.run(None, feeds))
    except Exception as e:  # as above
        return line(e)


def _judge_calls(
    module: Module, model: OnnxModel, calls: list[Call], wanted: list[list[np.ndarray] | str], dtype: str
) -> tuple[Status, str]:
    """Return the worst of what became of the calls; RIGHT names the calls of ours that were refused."""
    refused, unstable = [], ""
    for call, answer in zip(calls, wanted, strict=True):
        try:
            outputs = module.run(call.feeds)
        except PipelineError as e:
            if not isinstance(answer, str):
                refused.append(f"{call.words}: {line(e)}")
            continue
        except Exception as e:  # whatever else a call raises is a finding
            return Status.CRASHED, f"{call.words}: {line(e)}"
        if isinstance(answer, str):
            return Status.WRONG, f"{call.words}: answered where ONNX Runtime says {answer}"
        got = [outputs[spec.name] for spec in model.outputs]
        status, reason = judge(model, call.feeds, answer, got, coarse=dtype == "float16")
        if status is Status.WRONG:
            return status, f"{call.words}: {reason}"
        unstable = unstable or (f"{call.words}: {reason}" if status is Status.UNSTABLE else "")
    if unstable:
        return Status.UNSTABLE, unstable
    return (Status.REFUSED, f"call {refused[0]}") if refused else (Status.RIGHT, "")


def list_calls(drawing: SizedDrawing, rng: np.random.Generator) -> Iterator[Call]:
    """Yield calls: at the limit, one beyond it, the least sizes, and some between; one with an index behind a table."""
    names = list(dict.fromkeys(name for _, shape in drawing.inputs.values() for size in shape
                               if not isinstance(size, int) for name in size.names))  # fmt: skip
    for number in range(_CALLS):
        sizes = _sizes(drawing, names, number, rng)
        yield Call(drawing.feeds(sizes, rng), _words(sizes))
    if drawing.ids:
        yield Call(drawing.feeds(sizes, rng, beyond=True), f"{_words(sizes)}, an index behind the table")


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _sizes(drawing: SizedDrawing, names: list[str], number: int, rng: np.random.Generator) -> dict[str, int]:
    least = {name: drawing.least.get(name, 1) for name in names}
    if number == 0:
        windows = any(node.op_type in _WINDOWS for node in drawing.nodes)
        return {name: max(1, size - int(not windows)) for name, size in least.items()}
    sizes = {name: max(least[name], int(rng.choice(_OTHERS if name != "n" else _UNBOUNDED))) for name in names}
    bounds = [(size, most) for size, most in drawing.limits if not any(name.startswith("?") for name in size.names)]
    if not bounds:
        return sizes
    moving = [name for name in bounds[0][0].names if name in sizes]
    name = "n" if "n" in moving else moving[0]
    for other in set(names) - {name}:
        sizes[other] = max(least[other], int(rng.integers(1, 4)))
    fits = [at for at in range(1, 65) if all(size_of(size, {**sizes, name: at}) <= most for size, most in bounds)]
    largest = max(fits, default=1)
    sizes[name] = (largest, largest + 1, largest, largest + int(rng.choice((2, 9, 100))))[number - 1]
    if number == 3:
        sizes[name] = int(rng.integers(min(least[name], largest), largest + 1))
    return sizes
