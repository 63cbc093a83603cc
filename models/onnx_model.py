"""A checked ONNX model, its weights inline or in files beside it, their hash, and the element types of ONNX."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from relaxtune.models.errors import ExternalDataError, ModelFileError, UnsupportedModelError
from relaxtune.models.spec import AxisRelation, TensorSpec

# Protobuf refuses to write or read a message of 2 GiB; the margin is room for the graph itself.
PROTOBUF_LIMIT_BYTES = 2**31 - 16 * 2**20

#: Vectors of sizes are as long as ranks; a longer tensor is data, which says nothing about shapes.
SHAPE_ELEMENTS_MAX = 64

#: Kernels expect tensors to start at a multiple of it.
ALIGNMENT_BYTES = 64
# Of a file that is hashed; it stays in a core's cache.
_PIECE_BYTES = 1 << 18

# One table from ONNX element types to numpy's names; bfloat16 and the float8 family come from ml_dtypes.
_DTYPE_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
    onnx.TensorProto.FLOAT8E5M2: "float8_e5m2",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.BOOL: "bool",
}


def dtype_name(element_type: int, what: str) -> str:
    """Return numpy's name of an ONNX element type.

    Raises `UnsupportedModelError`: for strings, complex numbers and types a model's signature cannot have; `what` names
    the tensor.
    """
    name = _DTYPE_NAMES.get(element_type)
    if element_type == onnx.TensorProto.STRING:
        raise UnsupportedModelError(
            f"{what} holds text (STRING), which is not supported; make numbers of it before the model (tokenise), and "
            "export the model without that part"
        )
    if name is None:
        raise UnsupportedModelError(
            f"{what} has element type {element_type_name(element_type)}, which is not supported; expected one of "
            f"{', '.join(sorted(_DTYPE_NAMES.values()))}. Move the conversion out of the model."
        )
    return name


def element_type_name(element_type: int) -> str:
    """Return ONNX's name of an element type, or the number where it has none."""
    known = element_type in onnx.TensorProto.DataType.values()
    return str(onnx.TensorProto.DataType.Name(element_type)) if known else str(element_type)


def is_numeric(element_type: int) -> bool:
    """Return whether a tensor of this type has a payload of a known size: numbers or bool, not text."""
    if element_type == onnx.TensorProto.STRING:
        return False
    return element_type in set(helper.get_all_tensor_dtypes()) - {onnx.TensorProto.UNDEFINED}


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A checked ONNX model and the signature it has after its shapes were pinned.

    `proto` holds weights inline, unless the model was loaded from a file whose weights are external: then the large
    tensors stay references into `data_dir`, already checked for path and size, and are read one by one by `array`. A
    zoo model above protobuf's limit of 2 GiB is inline in memory; it cannot be turned into bytes, only written by
    `models.save_model`. `inline_proto()` always gives every weight in memory.

    `sha256` covers what is in `proto` (pinned shapes included) and every weight's bytes, inline or external, so the
    same model has one hash in either form. `seed` is that of a zoo model's weights, None for a file.
    `relations` are those of the symbolic axes of a file, as the file names them.
    """

    name: str
    proto: onnx.ModelProto = field(repr=False)
    path: Path | None
    sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    data_dir: Path | None = None
    seed: int | None = None
    relations: tuple[AxisRelation, ...] = ()

    @cached_property
    def _initializers(self) -> dict[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all the weights, inline or external."""
        return sum(tensor_bytes(tensor) for tensor in self.proto.graph.initializer)

    @property
    def fits_protobuf(self) -> bool:
        """Whether the model can be turned into bytes; if not, hand its path over (`models.save_model`)."""
        return self.weight_bytes < PROTOBUF_LIMIT_BYTES

    def array(self, name: str) -> np.ndarray:
        """Return one weight by name, read from the external file when it is there.

        Raises `ExternalDataError`: the external file changed since the model was loaded; `KeyError`: no initializer has
        this name.
        """
        return read_tensor(self._initializers[name], self.data_dir)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every weight with its name, one at a time in memory."""
        for name in self._initializers:
            yield name, self.array(name)

    def inline_proto(self) -> onnx.ModelProto:
        """Return the graph with every weight inline: `proto` itself, or a copy with the external weights read in."""
        if self.data_dir is None:
            return self.proto
        copy = onnx.ModelProto()
        copy.CopyFrom(self.proto)
        for tensor in copy.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                read_in(tensor, self.data_dir)
        return copy

    def serialize(self) -> bytes:
        """Return the whole model as bytes, weights included.

        Raises `ModelFileError`: the weights reach protobuf's limit of 2 GiB.
        """
        if not self.fits_protobuf:
            raise ModelFileError(
                f"model {self.name!r} has {self.weight_bytes / 2**30:.2f} GiB of weights and cannot be one protobuf "
                f"message (limit 2 GiB); write it with models.save_model(model, path) and hand the path over"
            )
        return bytes(self.inline_proto().SerializeToString())


def nested_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs in a node's attributes."""
    single = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return single + [graph for attribute in node.attribute for graph in attribute.graphs]


def list_graphs(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield a graph, or a function, and the graphs inside it."""
    yield graph
    for node in graph.node:
        for inner in nested_graphs(node):
            yield from list_graphs(inner)


def attribute_of(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return an integer attribute of a node."""
    return next((int(item.i) for item in node.attribute if item.name == name), default)


def result_of(node: onnx.NodeProto, feeds: Mapping[str, np.ndarray], opsets: Mapping[str, int]) -> np.ndarray:
    """Return the output of a node over arrays, as onnx's reference computes it.

    `opsets` are domain -> version. The reference raises every kind of exception for nodes that it does not know.
    """
    graph = helper.make_graph([node], "constants", [], [onnx.ValueInfoProto(name=node.output[0])])
    (result,) = ReferenceEvaluator(graph, opsets=dict(opsets)).run(None, dict(feeds))
    return np.asarray(result)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return how many bytes the payload of a tensor takes, from its dtype and dims alone."""
    count = 1
    for dim in tensor.dims:
        count *= dim
    a_byte = {
        onnx.TensorProto.INT2: 4,
        onnx.TensorProto.UINT2: 4,
        onnx.TensorProto.INT4: 2,
        onnx.TensorProto.UINT4: 2,
        onnx.TensorProto.FLOAT4E2M1: 2,
    }
    if tensor.data_type in a_byte:
        return -(-count // a_byte[tensor.data_type])
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def read_tensor(tensor: onnx.TensorProto, data_dir: Path | None) -> np.ndarray:
    """Return a tensor as an array, reading its external payload from `data_dir` where it has one.

    A payload in a file is read once, to memory that TVM can take as it is.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return np.asarray(numpy_helper.to_array(tensor))
    if data_dir is None:
        raise ExternalDataError(f"tensor {tensor.name!r} is external but its model has no folder to read it from")
    payload = _read_external(tensor, data_dir)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if payload.size == math.prod(tensor.dims) * dtype.itemsize and sys.byteorder == "little":
        return np.asarray(payload.view(dtype).reshape(tensor.dims))
    # Several elements share a byte.
    inline = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    inline.raw_data = payload.tobytes()
    return np.asarray(numpy_helper.to_array(inline))


def aligned_bytes(size: int) -> np.ndarray:
    """Return new memory that starts at a multiple of `ALIGNMENT_BYTES`."""
    memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size]


def _read_external(tensor: onnx.TensorProto, data_dir: Path) -> np.ndarray:
    payload = aligned_bytes(tensor_bytes(tensor))
    for _ in _external_pieces(tensor, data_dir, payload.data):
        pass
    return payload


def _external_pieces(tensor: onnx.TensorProto, data_dir: Path, piece: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of an external tensor, a piece at a time, all in the memory of `piece`.

    The place of the tensor was checked when the model was loaded.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    size = tensor_bytes(tensor)
    path = data_dir / entries["location"]
    done = 0
    try:
        with path.open("rb") as file:
            file.seek(int(entries.get("offset", "0")))
            while done < size and (count := file.readinto(piece[: size - done])):
                yield piece[:count]
                done += count
    except OSError as e:
        msg = f"external data of tensor {tensor.name!r} cannot be read from {path}: {e.strerror}"
        raise ExternalDataError(msg) from e
    if done < size:
        raise ExternalDataError(
            f"external data of tensor {tensor.name!r} in {path} ends early: expected {size} bytes, got {done}; "
            f"the file changed since the model was loaded, load it again"
        )


def read_in(tensor: onnx.TensorProto, data_dir: Path) -> None:
    """Make an external tensor an inline one."""
    tensor.raw_data = _read_external(tensor, data_dir).tobytes()
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def content_sha256(model: onnx.ModelProto, data_dir: Path | None) -> str:
    """Return the sha256 (hex) of the graph without its weights, then of every weight's name, dtype, dims and bytes."""
    skeleton = without_weights(model)
    digest = hashlib.sha256(skeleton.SerializeToString(deterministic=True))
    piece = memoryview(bytearray(_PIECE_BYTES))
    for tensor in sorted(model.graph.initializer, key=lambda t: str(t.name)):
        digest.update(f"\0{tensor.name}\0{tensor.data_type}\0{list(tensor.dims)}\0".encode())
        if tensor.data_location == onnx.TensorProto.EXTERNAL and data_dir is not None:
            for part in _external_pieces(tensor, data_dir, piece):
                digest.update(part)
        elif tensor.HasField("raw_data"):
            digest.update(tensor.raw_data)
        else:
            digest.update(np.ascontiguousarray(read_tensor(tensor, data_dir)).tobytes())
    return digest.hexdigest()


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model whose main graph has no initializers; the weights are never copied."""
    copy = onnx.ModelProto()
    for source, target, left_out in ((model, copy, "graph"), (model.graph, copy.graph, "initializer")):
        for descriptor, value in source.ListFields():
            if descriptor.name == left_out:
                continue
            if isinstance(value, int | str):
                setattr(target, descriptor.name, value)
            else:
                getattr(target, descriptor.name).extend(value)
    return copy


def light_copy(model: onnx.ModelProto, keeps: Callable[[onnx.TensorProto], bool]) -> onnx.ModelProto:
    """Return the model with typed inputs for the initializers that are not kept, so that no weight is copied."""
    light = without_weights(model)
    declared = {value.name for value in light.graph.input}
    for tensor in model.graph.initializer:
        if keeps(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in declared:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def is_short(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor is inline and no longer than vectors of sizes are."""
    return bool(tensor.data_location != onnx.TensorProto.EXTERNAL) and math.prod(tensor.dims) <= SHAPE_ELEMENTS_MAX
