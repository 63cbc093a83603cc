"""Models of the zoo, lowered once for all tests of a process, and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from tvm import relax
from tvm_ffi import StructuralKey

from relaxtune.models import OnnxModel
from relaxtune.pipeline.importer import ImportedGraph, import_model
from relaxtune.pipeline.passes import LoweredModule, lower
from relaxtune.pipeline.passes.module import PassReport
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.pass_cases import LLVM, compiled, feeds_of, run_compiled, small_model

FP32_TOLERANCE = 2e-5


@cache
def model_of(name: str) -> OnnxModel:
    return small_model(name)


@cache
def graph_of_zoo(name: str) -> ImportedGraph:
    return import_model(model_of(name))


@cache
def lowered_of(name: str) -> LoweredModule:
    return lower(graph_of_zoo(name), LLVM)


@cache
def reference_of(name: str) -> tuple[Mapping[str, np.ndarray], list[np.ndarray]]:
    """Return a model's inputs, and what ONNX Runtime makes of them."""
    feeds = feeds_of(model_of(name))
    return feeds, run_reference(model_of(name), feeds)


# Most passes leave most models as they are: equal modules are compiled once.
_MACHINES: dict[StructuralKey, relax.VirtualMachine] = {}


def run_lowered(lowered: LoweredModule, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    key = StructuralKey(lowered.mod)
    if key not in _MACHINES:
        _MACHINES[key] = compiled(lowered)
    return run_compiled(_MACHINES[key], lowered, feeds)


def report_of(lowered: LoweredModule, name: str) -> PassReport:
    return next(report for report in lowered.reports if report.name == name)
