"""A graph as ONNX Runtime's process takes it: its large weights lie apart, where all sessions on it read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import onnx

from relaxtune.models.checks import names_read
from relaxtune.models.onnx_model import without_weights
from relaxtune.pipeline.onnx_runtime.process import onnx_runtime
from relaxtune.pipeline.onnx_runtime.shared_arrays import SharedArrays

# Weights of this size and more lie apart; a smaller constant may be a shape, which the graph needs.
_LARGE_BYTES = 4096
_SHARED_TYPES = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
    }
)


class SplitGraph:
    """A graph and, apart from it, its large weights; sessions on one graph share them while one of them lives.

    `graph` is the graph without them, as bytes; `weights` are for another process to read, by the number `weights_key`.
    """

    _living: ClassVar[WeakValueDictionary[int, SplitGraph]] = WeakValueDictionary()

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto  # held, since its identity is what it is found by
        graph = without_weights(proto)
        self.weights = SharedArrays(_large_weights(proto, graph))
        self.graph = graph.SerializeToString()
        self.weights_key = onnx_runtime().next_number()

    @classmethod
    def of(cls, proto: onnx.ModelProto) -> SplitGraph:
        """Return the one of a graph that lives, or a new one."""
        found = cls._living.get(id(proto))
        if found is None:
            found = cls._living[id(proto)] = cls(proto)
        return found


def _large_weights(proto: onnx.ModelProto, graph: onnx.ModelProto) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the large weights of a model, and add all weights to a graph: these as external ones, small ones whole.

    A graph handed over as bytes is copied several times, weights included, and has at most 2 GiB. Weights that no node
    reads (quantising leaves the floats behind) stay in it: ONNX Runtime does not find them any more.
    """
    read = {name for node in proto.graph.node for name in names_read(node)}
    for tensor in proto.graph.initializer:
        shared = tensor.data_type in _SHARED_TYPES and len(tensor.raw_data) >= _LARGE_BYTES
        if not (shared and tensor.name in read):
            graph.graph.initializer.add().CopyFrom(tensor)
            continue
        array = onnx.numpy_helper.to_array(tensor)
        yield tensor.name, array
        stub = graph.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        stub.data_location = onnx.TensorProto.EXTERNAL
        for key, text in (("location", "weights"), ("offset", "0"), ("length", str(array.nbytes))):
            stub.external_data.add(key=key, value=text)
