"""The two ways from a case to its outputs: our import and compilation for LLVM, and stock TVM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

from benchmarks.node_tests.cases import NodeCase
from relaxtune.models.checks import check_graph, check_signature
from relaxtune.models.inference import check_and_infer
from relaxtune.models.loading import make_model
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.artifact.compile import compile_module
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweringOptions, lower
from relaxtune.schedules.targets import resolve_target


class Arm(StrEnum):
    """Who imports and compiles."""

    OWN = "relaxtune"
    STOCK = "stock"


class Stage(StrEnum):
    """How far a case came."""

    PASSED = "passed"
    NO_TENSORS = "no tensors"
    LOAD = "load"
    IMPORT = "import"
    COMPILE = "compile"
    RUN = "run"
    MISMATCH = "mismatch"
    CRASH = "crash"


@dataclass(frozen=True)
class Outcome:
    """The stage that a case failed at, or `PASSED`, and the error's text."""

    stage: Stage
    error: str = ""


class _StageError(Exception):
    def __init__(self, stage: Stage, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.stage = stage


def run_case(case: NodeCase, arm: Arm) -> Outcome:
    """Return how a case ends in one arm."""
    if case.inputs is None or case.outputs is None or any(item.dtype == object for item in case.inputs.values()):
        return Outcome(Stage.NO_TENSORS, "an input or output is a sequence, an optional or text")
    try:
        got = _RUNNERS[arm](case, case.inputs)
        with _stage(Stage.MISMATCH):
            _check(got, case)
    except _StageError as error:
        return Outcome(error.stage, str(error))
    return Outcome(Stage.PASSED)


def _run_own(case: NodeCase, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    target = resolve_target("llvm")
    proto = onnx.ModelProto()
    proto.CopyFrom(case.proto)
    with _stage(Stage.LOAD):
        # All of `load_model`'s checks but that of the opset: the newest cases are ahead of ONNX Runtime.
        check_signature(proto)
        check_graph(proto)
        check_and_infer(proto)
        model = make_model(case.name, proto, path=None, data_dir=None)
    with _stage(Stage.IMPORT):
        graph = import_model(model)
    with _stage(Stage.COMPILE):
        lowered = lower(graph, target.target, LoweringOptions(embed_weights=True))
        executable = compile_module(lowered, (), target).executable
    with _stage(Stage.RUN):
        machine = relax.VirtualMachine(executable, tvm.cpu())
        return _call(machine, [feeds[spec.name] for spec in graph.inputs])


def _run_stock(case: NodeCase, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    with _stage(Stage.IMPORT):
        mod = from_onnx(case.proto, keep_params_in_input=False)
    with _stage(Stage.COMPILE):
        executable = tvm.compile(mod, target="llvm")
    with _stage(Stage.RUN):
        machine = relax.VirtualMachine(executable, tvm.cpu())
        weights = {tensor.name for tensor in case.proto.graph.initializer}
        return _call(machine, [feeds[value.name] for value in case.proto.graph.input if value.name not in weights])


_RUNNERS: Mapping[Arm, Callable[[NodeCase, Mapping[str, np.ndarray]], list[np.ndarray]]] = {
    Arm.OWN: _run_own,
    Arm.STOCK: _run_stock,
}


def _call(machine: relax.VirtualMachine, arrays: list[np.ndarray]) -> list[np.ndarray]:
    result = machine["main"](*[tvm.runtime.tensor(np.array(array, order="C")) for array in arrays])
    items = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [np.asarray(item.numpy()).astype(numpy_dtype(str(item.dtype)), copy=False) for item in items]


def _check(got: list[np.ndarray], case: NodeCase) -> None:
    """Compare as ONNX's own runner does, shapes and dtypes included.

    Raises
    ------
    AssertionError
        An output is not as expected.
    """
    assert case.outputs is not None
    if len(got) < len(case.outputs):
        msg = f"expected {len(case.outputs)} outputs, got {len(got)}"
        raise AssertionError(msg)
    for index, (value, want) in enumerate(zip(got, case.outputs, strict=False)):
        if (value.shape, value.dtype) != (want.shape, want.dtype):
            msg = f"output {index}: expected {want.dtype}{want.shape}, got {value.dtype}{value.shape}"
            raise AssertionError(msg)
        if value.dtype.kind not in "biufc":
            value, want = value.astype("float32"), want.astype("float32")
        np.testing.assert_allclose(value, want, rtol=case.rtol, atol=case.atol, equal_nan=True)


@contextmanager
def _stage(stage: Stage) -> Iterator[None]:
    """Note which stage an error comes from: TVM raises every kind of exception."""
    try:
        yield
    except _StageError:
        raise
    except Exception as error:
        raise _StageError(stage, error) from error
