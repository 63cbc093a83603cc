"""TensorRT (10 and 11) beside ours: a strongly typed engine of the graph, built for the sizes of the inputs.

https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/python-api-docs.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorrt as trt
from cuda.bindings import runtime as cudart

from relaxtune.pipeline.bench.peers.callers import Caller, PeerError, PeerOrder


class TensorRtPeer:
    """One engine; each caller has an execution context, a stream and buffers of its own."""

    def __init__(self, order: PeerOrder) -> None:
        """Remember the order: an engine is built for the sizes of its first inputs."""
        self._order = order
        self._logger = trt.Logger(trt.Logger.WARNING)

    @property
    def version(self) -> str:
        """The library's version."""
        return str(trt.__version__)

    def callers(self, inputs: Mapping[str, np.ndarray], count: int) -> list[Caller]:
        """Return callers of an engine that is built for exactly these sizes."""
        engine = trt.Runtime(self._logger).deserialize_cuda_engine(self._plan(inputs))
        if engine is None:
            raise PeerError("TensorRT does not load the engine that it built; its log says why")
        return [_caller(engine, inputs, self._order.outputs) for _ in range(count)]

    def _plan(self, inputs: Mapping[str, np.ndarray]) -> Any:
        builder = trt.Builder(self._logger)
        # As the graph's dtypes say; TensorRT 11 knows nothing else and ignores the flag.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, self._logger)
        # It finds weights beside the file, which `parse` of bytes does not.
        if not parser.parse_from_file(self._order.model):
            raise PeerError(f"TensorRT does not parse the model: {parser.get_error(0).desc()}")
        config = builder.create_builder_config()
        if not self._order.tf32:
            config.clear_flag(trt.BuilderFlag.TF32)
        profile = builder.create_optimization_profile()
        for name, array in inputs.items():
            profile.set_shape(name, array.shape, array.shape, array.shape)
        config.add_optimization_profile(profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise PeerError("TensorRT does not build an engine of the model; its log says why")
        return plan


def _caller(engine: Any, inputs: Mapping[str, np.ndarray], names: tuple[str, ...]) -> Caller:
    context = engine.create_execution_context()
    stream = _cuda(cudart.cudaStreamCreate())
    for name, array in inputs.items():
        # An array of no axes has one place.
        data = np.ascontiguousarray(array)
        context.set_input_shape(name, array.shape)
        pointer = _cuda(cudart.cudaMalloc(max(1, data.nbytes)))
        to_device = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        _cuda(cudart.cudaMemcpy(pointer, data.ctypes.data, data.nbytes, to_device))
        context.set_tensor_address(name, int(pointer))
    buffers: dict[str, tuple[np.ndarray, int]] = {}
    for name in names:
        host = np.empty(tuple(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name)))
        buffers[name] = host, int(_cuda(cudart.cudaMalloc(max(1, host.nbytes))))
        context.set_tensor_address(name, buffers[name][1])

    def run() -> None:
        if not context.execute_async_v3(int(stream)):
            raise PeerError("TensorRT does not run the engine; its log says why")
        _cuda(cudart.cudaStreamSynchronize(stream))

    def outputs() -> dict[str, np.ndarray]:
        for host, pointer in buffers.values():
            from_device = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
            _cuda(cudart.cudaMemcpy(host.ctypes.data, pointer, host.nbytes, from_device))
        return {name: host for name, (host, _) in buffers.items()}

    return Caller(run, outputs)


def _cuda(returned: tuple[Any, ...]) -> Any:
    """Return what a call of CUDA's runtime returned.

    Raises
    ------
    PeerError
        It failed.
    """
    status, *values = returned
    if status != cudart.cudaError_t.cudaSuccess:
        raise PeerError(f"CUDA says {status.name}")
    return values[0] if values else None
