"""ONNX Runtime beside ours: every optimisation on, on the CPU or with its CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from relaxtune.pipeline.bench.peers.callers import Caller, PeerError, PeerOrder
from relaxtune.pipeline.onnx_runtime.calls import device_call, host_call

_PROVIDERS = {"llvm": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxRuntimePeer:
    """One session, which callers may use at the same time; its threads are theirs together."""

    def __init__(self, order: PeerOrder) -> None:
        """Load the model.

        Raises `ImportError`: this ONNX Runtime has no provider for the device; `PeerError`: the provider does not load.
        """
        provider = _PROVIDERS[order.kind]
        if provider not in onnxruntime.get_available_providers():
            raise ImportError(f"no {provider}", name="onnxruntime-gpu")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = order.threads * order.streams
        # Workers that spin between runs would take the cores from whatever is measured next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # Right before fast: on x86 without VNNI, sums of 8-bit products saturate otherwise.
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.log_severity_level = 3
        tf32 = {"use_tf32": str(int(order.tf32))} if order.kind == "cuda" else {}
        self._session = onnxruntime.InferenceSession(order.model, options, providers=[(provider, tf32)])
        if provider not in self._session.get_providers():
            raise PeerError(
                f"ONNX Runtime's {provider} does not load on this machine; its CUDA and cuDNN must be found"
            )
        self._order = order

    @property
    def version(self) -> str:
        """The library's version."""
        return str(onnxruntime.__version__)

    def callers(self, inputs: Mapping[str, np.ndarray], count: int) -> list[Caller]:
        """Return callers; on a GPU, inputs and outputs stay there."""
        names, kind = self._order.outputs, self._order.kind
        if kind == "llvm":
            return [Caller(*host_call(self._session, names, inputs)) for _ in range(count)]
        return [Caller(*device_call(self._session, names, inputs, kind)) for _ in range(count)]
