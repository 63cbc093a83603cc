"""ONNX Runtime's arm: the fused contrib graph on the CUDA provider, IO binding, CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnxruntime
import torch

from benchmarks.gpu_arms.arm import ArmUnavailableError, DeviceArm
from benchmarks.gpu_arms.cases import Case
from benchmarks.gpu_arms.order import ORT_ARM
from benchmarks.gpu_arms.ort_graphs import NoFusedGraphError, fused_graph
from relaxtune.pipeline.bench.measure import measure

_PROVIDER = "CUDAExecutionProvider"
_TORCH_DTYPES = {"tensor(float16)": torch.float16, "tensor(int32)": torch.int32}
_NUMPY_DTYPES = {torch.float16: np.float16, torch.int32: np.int32}
# The first run allocates, the second captures.
_WARMUP = 3
_TRIAL_RUNS = 30
# Below this many tokens ONNX Runtime leaves flash attention aside, by its own default; read when a session is made.
_FLASH_MINIMUM = "ORT_MIN_SEQ_LEN_FLASH_ATTENTION_PACKED_QKV"
_FORMS = {"attention as it chooses": None, "flash attention at any length": "0"}


def ort_arm(
    case: Case, weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], *, masked: bool
) -> DeviceArm:
    """Return ONNX Runtime's arm, inputs and outputs bound to the device, in the faster of its forms of attention.

    Raises
    ------
    ArmUnavailableError
        This onnxruntime has no CUDA provider, the provider does not load, or no fused graph is written for the case.
    """
    if _PROVIDER not in onnxruntime.get_available_providers():
        raise ArmUnavailableError(
            f"onnxruntime {onnxruntime.__version__} has no CUDA provider; install onnxruntime-gpu"
        )
    try:
        graph = fused_graph(case, weights, dtype="float16", masked=masked)
    except NoFusedGraphError as error:
        raise ArmUnavailableError(str(error)) from error
    forms: dict[str, DeviceArm] = {}
    medians: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, minimum in _FORMS.items():
        try:
            forms[name] = _bound_arm(_session(graph, minimum), inputs)
            medians[name] = _median_ms(forms[name])
        # The border of a form: ONNX Runtime's errors have no base class, and the other form may do.
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    if not medians:
        raise ArmUnavailableError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    fastest = min(medians, key=lambda name: medians[name])
    notes = {
        "onnxruntime": onnxruntime.__version__,
        "graph": "contrib operators",
        "form": fastest,
        "trial_median_ms": medians,
        "failed_forms": failed,
    }
    return replace(forms[fastest], notes=notes)


@dataclass(frozen=True)
class _Session:
    session: onnxruntime.InferenceSession
    stream: torch.cuda.Stream


def _session(graph: bytes, flash_minimum: str | None) -> _Session:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    stream = torch.cuda.Stream()
    provider = {"device_id": "0", "enable_cuda_graph": "1", "user_compute_stream": str(stream.cuda_stream)}
    with _environment(_FLASH_MINIMUM, flash_minimum):
        session = onnxruntime.InferenceSession(graph, options, providers=[(_PROVIDER, provider)])
    if _PROVIDER not in session.get_providers():
        raise ArmUnavailableError(
            f"onnxruntime {onnxruntime.__version__} could not load its CUDA provider; are the nvidia/*/lib folders "
            "beside torch on LD_LIBRARY_PATH?"
        )
    return _Session(session, stream)


def _bound_arm(made: _Session, inputs: Mapping[str, np.ndarray]) -> DeviceArm:
    session, stream = made.session, made.stream
    binding = session.io_binding()
    bound, results = {}, {}
    for value in session.get_inputs():
        tensor = torch.from_numpy(inputs[value.name]).to("cuda", _TORCH_DTYPES[value.type]).contiguous()
        bound[value.name] = tensor
        binding.bind_input(value.name, "cuda", 0, _NUMPY_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    for value in session.get_outputs():
        tensor = torch.full(value.shape, float("nan"), dtype=_TORCH_DTYPES[value.type], device="cuda")
        results[value.name] = tensor
        binding.bind_output(value.name, "cuda", 0, _NUMPY_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    # What was bound was written on torch's stream.
    torch.cuda.synchronize()

    def launch() -> None:
        session.run_with_iobinding(binding, options)

    for _ in range(_WARMUP):
        launch()
    stream.synchronize()
    return DeviceArm(
        launch,
        stream.synchronize,
        lambda: {name: tensor.clone() for name, tensor in results.items()},
        stream=stream.cuda_stream,
        # The session has only their addresses.
        holds=(bound, made),
    )


def _median_ms(arm: DeviceArm) -> float:
    return measure({ORT_ARM: arm.run}, runs=_TRIAL_RUNS).arm(ORT_ARM).median_ms


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set a variable of this process for a while; None leaves it as it is."""
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
