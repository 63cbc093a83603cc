"""ONNX Runtime beside ours: every optimisation on, on the CPU or with its CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime

from relaxtune.pipeline.bench.peers.callers import Caller, PeerError, PeerOrder

_PROVIDERS = {"llvm": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxRuntimePeer:
    """One session, which callers may use at the same time; its threads are theirs together."""

    def __init__(self, order: PeerOrder) -> None:
        """Load the model.

        Raises
        ------
        ImportError
            This ONNX Runtime has no provider for the device.
        PeerError
            The provider does not load.
        """
        provider = _PROVIDERS[order.kind]
        if provider not in onnxruntime.get_available_providers():
            raise ImportError(f"no {provider}", name="onnxruntime-gpu")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = order.threads * order.streams
        # Workers that spin between runs would take the cores from whatever is measured next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
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
        make = self._host_caller if self._order.kind == "llvm" else self._device_caller
        return [make(dict(inputs)) for _ in range(count)]

    def _host_caller(self, feed: dict[str, np.ndarray]) -> Caller:
        names, last = list(self._order.outputs), {}

        def run() -> None:
            last["outputs"] = self._session.run(names, feed)

        return Caller(run, lambda: dict(zip(names, last["outputs"], strict=True)))

    def _device_caller(self, feed: dict[str, np.ndarray]) -> Caller:
        names, kind = list(self._order.outputs), self._order.kind
        binding = self._session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, kind, 0))
        for name in names:
            binding.bind_output(name, kind, 0)
        # It returns when the outputs are there.
        return Caller(
            lambda: self._session.run_with_iobinding(binding),
            lambda: dict(zip(names, binding.copy_outputs_to_cpu(), strict=True)),
        )
