"""ONNX Runtime's arm: the fused contrib graph on the CUDA provider, IO binding, CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime
import torch

from benchmarks.gpu_arms.arm import ArmUnavailableError, DeviceArm
from benchmarks.gpu_arms.cases import Case
from benchmarks.gpu_arms.ort_graphs import NoFusedGraphError, fused_graph

_PROVIDER = "CUDAExecutionProvider"
_TORCH_DTYPES = {"tensor(float16)": torch.float16, "tensor(int32)": torch.int32}
_NUMPY_DTYPES = {torch.float16: np.float16, torch.int32: np.int32}
# The first run allocates, the second captures.
_WARMUP = 3


def ort_arm(
    case: Case, weights: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray], *, masked: bool
) -> DeviceArm:
    """Return ONNX Runtime's arm, inputs and outputs bound to the device.

    Raises
    ------
    ArmUnavailableError
        This onnxruntime has no CUDA provider, the provider does not load, or no fused graph is written for the case.
    """
    version = onnxruntime.__version__
    if _PROVIDER not in onnxruntime.get_available_providers():
        raise ArmUnavailableError(f"onnxruntime {version} has no CUDA provider; install onnxruntime-gpu")
    try:
        graph = fused_graph(case, weights, dtype="float16", masked=masked)
    except NoFusedGraphError as error:
        raise ArmUnavailableError(str(error)) from error
    stream = torch.cuda.Stream()
    session = onnxruntime.InferenceSession(
        graph, _session_options(), providers=[(_PROVIDER, _provider_options(stream))]
    )
    if _PROVIDER not in session.get_providers():
        raise ArmUnavailableError(
            f"onnxruntime {version} could not load its CUDA provider; are the nvidia/*/lib folders beside torch on "
            "LD_LIBRARY_PATH?"
        )
    binding = session.io_binding()
    bound = {}
    for value in session.get_inputs():
        tensor = torch.from_numpy(inputs[value.name]).to("cuda", _TORCH_DTYPES[value.type]).contiguous()
        bound[value.name] = tensor
        binding.bind_input(value.name, "cuda", 0, _NUMPY_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    results = {}
    for value in session.get_outputs():
        tensor = torch.full(value.shape, float("nan"), dtype=_TORCH_DTYPES[value.type], device="cuda")
        results[value.name] = tensor
        binding.bind_output(value.name, "cuda", 0, _NUMPY_DTYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    # What binding wrote was written on torch's stream.
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
        notes={"onnxruntime": version, "graph": "contrib operators", "inputs": sorted(bound)},
        # The session has only their addresses.
        holds=(bound, stream),
    )


def _session_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    return options


def _provider_options(stream: torch.cuda.Stream) -> dict[str, str]:
    return {"device_id": "0", "enable_cuda_graph": "1", "user_compute_stream": str(stream.cuda_stream)}
