"""Run fuzzed cases through an artifact and ONNX Runtime, and compare; and record what a few of them give."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import numpy as np

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import InputKind, describe_inputs
from relaxtune.pipeline.artifact.module import Module
from relaxtune.pipeline.jobs.compile_and_tune import compile_model
from relaxtune.pipeline.passes.module import LoweringOptions
from relaxtune.pipeline.prepare import ModelRequest
from relaxtune.pipeline.validate.array_comparison import STILL, Movement, compare_arrays
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.tolerances import Tolerance, storage_roundoff
from tests.guardrails.fuzz_cases import FuzzCase, Fuzzed, make_inputs

# float32, summed in another order: as for a whole model, see `pipeline.validate.tolerances`.
TOLERANCE = Tolerance(1e-4, 1e-4)
# Activations rounded to float16 in every layer of a tiny model.
HALF_TOLERANCE = Tolerance(3e-2, 3e-2)


@dataclass(frozen=True)
class Subject:
    """An artifact, the model it was made of, and the reference."""

    fuzzed: Fuzzed
    model: OnnxModel
    module: Module
    reference: Reference
    tolerance: Tolerance = TOLERANCE


@dataclass(frozen=True)
class Mismatch:
    """A case whose output differs, or that could not be run, and how."""

    case: FuzzCase
    output: str
    reason: str


def make_subject(fuzzed: Fuzzed, folder: Path, target: str = "llvm", precision: str | None = None) -> Subject:
    """Compile a model with symbolic axes, untuned."""
    lowering = LoweringOptions(precision=precision)
    request = ModelRequest(fuzzed.model, shapes=fuzzed.shapes, target=target, lowering=lowering)
    compile_model(request, folder, samples=0)
    model = load_model(fuzzed.model, shapes=fuzzed.shapes)
    tolerance = TOLERANCE if precision is None else HALF_TOLERANCE
    return Subject(fuzzed, model, Module.load(folder), Reference(model), tolerance)


def run_cases(subject: Subject, cases: Iterable[FuzzCase]) -> tuple[list[Mismatch], float]:
    """Return what differs, and the seconds it took."""
    started = time.perf_counter()
    found = [mismatch for case in cases for mismatch in run_case(subject, case)]
    return found, time.perf_counter() - started


def run_case(subject: Subject, case: FuzzCase) -> list[Mismatch]:
    """Return the outputs of a case that differ from ONNX Runtime's.

    Of float32, by more than ONNX Runtime's own move when it rounds otherwise, as in validation: scores of large keys
    are ties, and a rounding decides which value is taken.
    """
    inputs = make_inputs(case, subject.fuzzed, subject.model)
    expected = subject.reference.run(inputs)
    try:
        got = subject.module.run(inputs)
    except Exception as e:  # whatever the module raises where ONNX Runtime answers is a finding
        return [Mismatch(case, "", f"{type(e).__name__}: {e}")]
    found = []
    moves: dict[str, Movement] = {}
    for name, wanted in expected.items():
        if got[name].shape != wanted.shape:
            found.append(Mismatch(case, name, f"expected shape {wanted.shape}, got {got[name].shape}"))
            continue
        for place in _compared(subject, case, name, inputs):
            comparison = compare_arrays(wanted[place], got[name][place], subject.tolerance)
            if not comparison.passed and subject.tolerance is TOLERANCE:
                moves = moves or subject.reference.moves(inputs, storage_roundoff("float32", None), TOLERANCE)
                comparison = compare_arrays(wanted[place], got[name][place], TOLERANCE, moves=moves.get(name, STILL))
            if not comparison.passed:
                found.append(Mismatch(case, name, comparison.reason))
    return found


def _compared(
    subject: Subject, case: FuzzCase, name: str, inputs: Mapping[str, np.ndarray]
) -> list[tuple[slice | np.ndarray | EllipsisType, ...]]:
    """Return the parts of an output, each of which must be right beside its own size.

    In half precision attention is one kernel: tokens that see no key have no meaning there. A cache is what was given
    and what the call adds: a given one of zeros says nothing of the size of the added values.
    """
    if subject.tolerance is TOLERANCE:
        return [(...,)]
    if name.startswith("present."):
        return [np.s_[:, :, : case.length], np.s_[:, :, case.length :]]
    if subject.fuzzed.causal:
        (mask,) = (inputs[rule.name] for rule in describe_inputs(subject.model) if rule.kind is InputKind.MASK)
        return [(np.cumsum(mask, axis=1) > 0,)]
    return [(...,)]


def summarise(array: np.ndarray) -> dict[str, object]:
    """Return what a golden case keeps of an output: shape, how many are finite, sums, and values at fixed places."""
    finite = np.isfinite(array)
    values = np.where(finite, array, 0).astype(np.float64)
    places = np.linspace(0, array.size - 1, 6).astype(int)
    return {
        "shape": list(array.shape),
        "finite": int(finite.sum()),
        "rms": float(f"{np.sqrt(np.mean(values**2)):.7g}"),
        "values": [float(f"{values.flat[place]:.7g}") for place in places],
    }
