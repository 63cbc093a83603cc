"""A small builder that writes ONNX graphs the way torch.onnx does: scoped node names, one node per tensor operation.

Every weight is drawn from its own generator, seeded by (seed, name): the prefill and the decode graph of a model share
their weights, and adding a layer changes no other weight.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import onnx
from onnx import TensorProto, helper

Dim = int | str

OPSET = 18
# The IR version that came with opset 18; older readers keep working.
IR_VERSION = 8
_CHUNK = 2**18


class Precision(StrEnum):
    """The dtype of weights and activations; norms and softmax are computed in fp32 in either."""

    FP32 = "fp32"
    FP16 = "fp16"

    @property
    def element_type(self) -> int:
        """ONNX's element type of weights and activations."""
        return int(TensorProto.FLOAT16 if self is Precision.FP16 else TensorProto.FLOAT)

    @property
    def mask_fill(self) -> float:
        """The value of a masked score: exp() of it is 0 in fp32, and two of them still add up without overflow."""
        return -1e4 if self is Precision.FP16 else -1e9


class GraphBuilder:
    """Collects nodes, weights, inputs and outputs of one graph."""

    def __init__(self, name: str, precision: Precision, seed: int, init_std: float) -> None:
        self.name = name
        self.precision = precision
        self._seed = seed
        self._init_std = init_std
        self._scopes: list[str] = []
        self._node_names: dict[str, int] = {}
        self._nodes: list[onnx.NodeProto] = []
        # Weights go straight into the model they end in: a copy of each would be gigabytes for the large presets.
        self._model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="relaxtune")
        self._model.opset_import.append(helper.make_opsetid("", OPSET))
        self._drawn: set[str] = set()
        # Weights that are being drawn: as many as there are threads, again for the sake of memory.
        self._pending: deque[tuple[TensorProto, Future[bytes]]] = deque()
        self._workers = os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="relaxtune-zoo")
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    @contextmanager
    def scope(self, *names: str) -> Iterator[None]:
        """Prefix the names of the nodes and weights made inside, as a module path does in torch."""
        self._scopes.extend(names)
        try:
            yield
        finally:
            del self._scopes[len(self._scopes) - len(names) :]

    def input(self, name: str, element_type: int, shape: Sequence[Dim]) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))
        return name

    def output(self, value: str, name: str, element_type: int, shape: Sequence[Dim]) -> None:
        """Declare `value` as the graph output `name`, renaming it where it is produced."""
        for node in self._nodes:
            node.output[:] = [name if out == value else out for out in node.output]
            node.input[:] = [name if inp == value else inp for inp in node.input]
        self._outputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))

    def op(self, op_type: str, *inputs: str, **attributes: int | float | str | Sequence[int]) -> str:
        """Add a node with one output and return that output's name."""
        return self.op_multi(op_type, 1, *inputs, **attributes)[0]

    def op_multi(
        self, op_type: str, outputs: int, *inputs: str, **attributes: int | float | str | Sequence[int]
    ) -> list[str]:
        """Add a node with several outputs and return their names."""
        base = "/" + "/".join([*self._scopes, op_type])
        count = self._node_names.get(base, 0)
        self._node_names[base] = count + 1
        name = base if count == 0 else f"{base}_{count}"
        produced = [f"{name}_output_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), produced, name=name, **attributes))
        return produced

    def const(self, value: np.ndarray | float | int | Sequence[int], element_type: int) -> str:
        """Return the name of an initializer with this value; equal constants share one."""
        dtype = helper.tensor_dtype_to_np_dtype(element_type)
        array = np.ascontiguousarray(np.asarray(value, dtype=dtype)).reshape(np.shape(value))
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = name
            self._store(name, array.tobytes(), array.shape, element_type)
        return self._constants[key]

    def int64(self, value: int | Sequence[int]) -> str:
        """Return the name of an int64 constant: a scalar for a number, a vector for a sequence."""
        return self.const(np.asarray(value, dtype=np.int64), TensorProto.INT64)

    def real(self, value: float) -> str:
        """Return the name of a scalar in the graph's precision."""
        return self.const(value, self.precision.element_type)

    def matrix(self, name: str, *shape: int, std: float | None = None) -> str:
        """Return a weight drawn from a normal distribution around 0, in the graph's precision."""
        return self._draw(name, shape, 0.0, self._init_std if std is None else std, self.precision.element_type)

    def bias(self, name: str, size: int, *, element_type: int | None = None) -> str:
        """Return a small bias that is not zero, so that a dropped bias changes the result."""
        return self._draw(name, (size,), 0.0, 0.02, element_type or self.precision.element_type)

    def gain(self, name: str, size: int, *, element_type: int | None = None) -> str:
        """Return a norm's gain: near 1 and not exactly 1."""
        return self._draw(name, (size,), 1.0, 0.05, element_type or self.precision.element_type)

    def build(self) -> onnx.ModelProto:
        """Return the model."""
        self._take_drawn(0)
        self._threads.shutdown()
        graph = self._model.graph
        graph.name = self.name
        graph.node.extend(self._nodes)
        graph.input.extend(self._inputs)
        graph.output.extend(self._outputs)
        return self._model

    def _draw(self, name: str, shape: tuple[int, ...], mean: float, std: float, element_type: int) -> str:
        full_name = ".".join([*self._scopes, name])
        if full_name not in self._drawn:
            self._drawn.add(full_name)
            words = np.frombuffer(hashlib.sha256(full_name.encode()).digest(), dtype=np.uint32)
            rng = np.random.default_rng([self._seed, *(int(word) for word in words)])
            tensor = self._store(full_name, b"", shape, element_type)
            dtype = helper.tensor_dtype_to_np_dtype(element_type)
            drawn = self._threads.submit(_normal_bytes, rng, math.prod(shape), mean, std, dtype)
            self._pending.append((tensor, drawn))
            self._take_drawn(self._workers)
        return full_name

    def _take_drawn(self, left: int) -> None:
        """Put weights into the model until no more than so many are being drawn."""
        while len(self._pending) > left:
            tensor, data = self._pending.popleft()
            tensor.raw_data = data.result()

    def _store(self, name: str, data: bytes, shape: tuple[int, ...], element_type: int) -> TensorProto:
        return self._model.graph.initializer.add(name=name, data_type=element_type, dims=shape, raw_data=data)


def _normal_bytes(rng: np.random.Generator, count: int, mean: float, std: float, dtype: np.dtype[np.generic]) -> bytes:
    """Return normal values as bytes, drawn in float32 through one small buffer that stays in the cache."""
    buffer = np.empty(min(count, _CHUNK), np.float32)
    chunks = []
    for start in range(0, count, _CHUNK):
        chunk = buffer[: min(_CHUNK, count - start)]
        rng.standard_normal(dtype=np.float32, out=chunk)
        chunk *= np.float32(std)
        chunk += np.float32(mean)
        chunks.append(chunk.astype(dtype, copy=False).tobytes())
    return b"".join(chunks)
