"""One case in a process of its own: prepare and check every arm, wait for the word, time them, and tell the result.

Started by `benchmarks.whole_models.bench_gpu` with its order as JSON on the command line. It writes events to stdout,
one JSON object a line: `preparing` an arm, `skipped` with the reason, `ready`, and after a line on stdin `result`. What
libraries print goes to stderr.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx
import torch

from benchmarks.gpu_arms import torch_models
from benchmarks.gpu_arms.arm import ArmUnavailableError, DeviceArm
from benchmarks.gpu_arms.cases import Case, Family, checked_model, find_cases, weights_of
from benchmarks.gpu_arms.comparison import Agreement, as_tensors, compare
from benchmarks.gpu_arms.order import GRAPH_ARM, INDUCTOR_ARM, ORT_ARM, OWN_ARM, Order
from benchmarks.gpu_arms.ort_arm import ort_arm
from benchmarks.gpu_arms.own_arm import own_arm
from benchmarks.gpu_arms.timing import time_arms
from benchmarks.gpu_arms.torch_arms import graph_arm, inductor_arm
from relaxtune.pipeline.tuning.measure.device_lock import DeviceLock
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.tolerances import Tolerance, model_tolerance

# Float16 arms against float32 over the same (rounded) weights.
ARM_TOLERANCE = model_tolerance("float16")
# Float32 against float32, but the zoo's float16 graph has its scalars (1/sqrt(D), sqrt(2)) rounded to float16.
REFERENCE_TOLERANCE = Tolerance(1e-3, 1e-3)
# Above this many weights ONNX Runtime on the CPU takes longer than it tells.
_CPU_CHECK_TOKENS = 256

Emit = Callable[[Mapping[str, object]], None]


@dataclass
class Prepared:
    """The arms that are ready and right, why others are not, and what was checked."""

    arms: dict[str, DeviceArm] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, object] = field(default_factory=dict)


def main() -> None:
    """Prepare, wait for a line on stdin, time, and write the result."""
    emit = _take_stdout()
    order = Order.from_json(sys.argv[1])
    (case,) = find_cases(order.case, order.cases)
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    prepared = prepare(case, order, emit)
    seconds = time.perf_counter() - started
    emit({"event": "ready", "arms": list(prepared.arms), "seconds": seconds})
    if not sys.stdin.readline():
        return
    timed = time_arms(prepared.arms, runs=order.runs, warmup=order.warmup) if prepared.arms else {}
    emit({"event": "result", "result": _result(case, order, prepared, timed, seconds)})


def prepare(case: Case, order: Order, emit: Emit) -> Prepared:
    """Return the arms of a case that gave the right result once, in the order of the request."""
    turn = DeviceLock(Path(order.lock))
    proto = case.proto()
    weights, inputs = weights_of(proto), case.inputs()
    with turn:
        expected = reference_outputs(case, weights, inputs)
    prepared = Prepared()
    if _is_quick_on_cpu(case):
        prepared.agreement["reference"] = asdict(_check_reference(case, proto, inputs, expected))
    module = torch_models.build(case, weights, inputs, device="cuda", dtype=torch.float16, masked=order.masked)
    tensors = torch_models.device_inputs(case, inputs, "cuda", torch.float16)
    makers: dict[str, Callable[[], DeviceArm]] = {
        OWN_ARM: lambda: own_arm(case, inputs, Path(order.artifact)),
        INDUCTOR_ARM: lambda: inductor_arm(module, tensors, turn),
        GRAPH_ARM: lambda: graph_arm(module, tensors),
        ORT_ARM: lambda: ort_arm(case, weights, inputs, masked=order.masked),
    }
    for name in order.arms:
        emit({"event": "preparing", "arm": name})
        began = time.perf_counter()
        try:
            arm = _made(makers[name], name, turn)
            with turn:
                agreement = checked(arm, expected)
        except ArmUnavailableError as error:
            prepared.skipped[name] = str(error)
        # The border of an arm: whatever goes wrong in it is told, and the others go on.
        except Exception as error:
            traceback.print_exc()
            prepared.skipped[name] = f"{type(error).__name__}: {_first_line(error)}"
        else:
            prepared.agreement[name] = {**asdict(agreement), "seconds_to_prepare": time.perf_counter() - began}
            if agreement.passed:
                prepared.arms[name] = arm
            else:
                prepared.skipped[name] = f"wrong result: {agreement.reason(ARM_TOLERANCE)}"
        if name in prepared.skipped:
            emit({"event": "skipped", "arm": name, "reason": prepared.skipped[name]})
    return prepared


def _made(make: Callable[[], DeviceArm], name: str, turn: DeviceLock) -> DeviceArm:
    # Inductor compiles on the CPU for a minute and takes the turn for its measurements itself.
    if name == INDUCTOR_ARM:
        return make()
    with turn:
        return make()


def checked(arm: DeviceArm, expected: Mapping[str, torch.Tensor]) -> Agreement:
    """Return how an arm's second run compares: its first may have been special (a capture, an allocation)."""
    arm.run()
    arm.run()
    return compare(expected, arm.outputs(), ARM_TOLERANCE)


def reference_outputs(
    case: Case, weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    """Return the outputs of the plain module in float32, TF32 off, on the GPU."""
    module = torch_models.build(case, weights, inputs, device="cuda", dtype=torch.float32, masked=True)
    tensors = torch_models.device_inputs(case, inputs, "cuda", torch.float32)
    expected = torch_models.outputs_of(module, module(*tensors))
    del module
    torch.cuda.empty_cache()
    return expected


def _check_reference(
    case: Case, proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], expected: Mapping[str, torch.Tensor]
) -> Agreement:
    """Return how the reference compares with ONNX Runtime on the CPU, in float32, on the zoo's own graph.

    Raises
    ------
    RuntimeError
        They disagree, so nothing could be said of the arms.
    """
    truth = as_tensors(Reference(checked_model(case, proto)).run(inputs))
    agreement = compare(truth, {name: tensor.cpu() for name, tensor in expected.items()}, REFERENCE_TOLERANCE)
    if not agreement.passed:
        raise RuntimeError(
            f"the float32 torch module of {case.name} disagrees with ONNX Runtime on the CPU: "
            f"{agreement.reason(REFERENCE_TOLERANCE)}"
        )
    return agreement


def _is_quick_on_cpu(case: Case) -> bool:
    large = case.family in {Family.LLAMA, Family.LLAMA_DECODE} and case.preset.config.hidden > 1024
    return not large and case.batch * (case.length or 1) <= _CPU_CHECK_TOKENS


def _result(
    case: Case, order: Order, prepared: Prepared, timed: Mapping[str, Mapping[str, object]], seconds: float
) -> dict[str, object]:
    return {
        "case": case.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "peers_honour_padding": order.masked,
        "runs": order.runs,
        "warmup": order.warmup,
        "prepare_seconds": round(seconds, 2),
        "tolerance": asdict(ARM_TOLERANCE),
        "agreement": prepared.agreement,
        "skipped": prepared.skipped,
        "arms": {name: {**timed[name], "notes": dict(arm.notes)} for name, arm in prepared.arms.items()},
    }


def _take_stdout() -> Emit:
    """Keep stdout for events; what else is printed goes to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: Mapping[str, object]) -> None:
        events.write(json.dumps(event, default=str) + "\n")
        events.flush()

    return emit


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


if __name__ == "__main__":
    main()
