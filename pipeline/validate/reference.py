"""ONNX Runtime as the reference for results, and as the peer for speed.

The two uses want different sessions:

- *Reference*: graph optimisations at ORT_ENABLE_BASIC, which keep the meaning of every operator (constant folding, dead
  code). The higher levels fuse into kernels that approximate (Gelu, LayerNorm in one pass), and their error would be
  charged to the module under test. Half-precision graphs are first rewritten to float32: ONNX Runtime's CPU has few
  float16 kernels and puts casts around the others, so its own float16 result depends on which operators those are. The
  float32 result is what every float16 implementation approximates, and the tolerances are made for it. Nor does it
  round the activations of 4-bit matmuls to 8 bits, where the graph only allows it (accuracy_level). Of an artifact
  with quantised weights the reference has the same ones: what quantisation costs is drift (`pipeline.validate.drift`),
  and the tolerance stays one that finds a wrong kernel.
- *Peer*: every optimisation on, the graph as given; what a user would run instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from relaxtune.models import OnnxModel
from relaxtune.models.checks import names_read
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.precision.graph_dtypes import computes_in_half, rounds_to_integers
from relaxtune.pipeline.precision.onnx_weights import with_quantised_weights
from relaxtune.pipeline.precision.recorded import PolicyEntry
from relaxtune.pipeline.validate.array_comparison import Movement, movement
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.upcast import (
    ROUNDED_TYPES,
    upcast_to_float32,
    with_exact_activations,
    without_bfloat16,
)

# ONNX Runtime's errors have no base class below Exception.
_ORT_ERRORS = (
    state.EPFail,
    state.Fail,
    state.InvalidArgument,
    state.InvalidGraph,
    state.InvalidProtobuf,
    state.NoModel,
    state.NotImplemented,
    state.RuntimeException,
)

_CPU = "CPUExecutionProvider"
_PROVIDERS = {"llvm": _CPU, "cuda": "CUDAExecutionProvider"}
# Answers of graphs with quantisers whose floats are rounded otherwise.
_NUDGES_OF_QUANTISERS = 4
# Weights of this size and more are handed over as they lie; a smaller constant may be a shape, which the graph needs.
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


class Reference:
    """The original model under ONNX Runtime on the CPU, computing in float32 or better."""

    def __init__(self, model: OnnxModel, threads: int | None = None, *, policy: PolicyEntry | None = None) -> None:
        """Load the model as given, or with the weights that a policy has quantised replaced by what they stand for.

        Raises
        ------
        PipelineError
            ONNX Runtime does not accept it.
        """
        bits = None if policy is None else policy.weight_bits
        self.quantised = policy.name if policy is not None and bits is not None else None
        if policy is not None and bits is not None:
            model = with_quantised_weights(model, policy.quantised_nodes, bits, policy.group_size or 0)
        self.upcast = computes_in_half(model)
        self._given, self._threads = model, threads
        self._model = model.name
        self._names = [spec.name for spec in model.outputs]
        self._known: list[tuple[Mapping[str, np.ndarray], dict[str, np.ndarray]]] = []
        self._loaded: tuple[onnx.ModelProto, onnxruntime.InferenceSession] | None = None
        self._load()

    @property
    def description(self) -> str:
        """What the reference was, for reports."""
        how = ", half precision rewritten to float32" if self.upcast else ""
        weights = f", weights quantised as {self.quantised} does" if self.quantised else ""
        return f"onnxruntime {onnxruntime.__version__}, CPU, basic graph optimisations{how}{weights}"

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name; those of a half-precision graph are float32.

        Raises
        ------
        PipelineError
            ONNX Runtime does not compute the model on these inputs.
        """
        for known, outputs in self._known:
            if known.keys() == inputs.keys() and all(np.array_equal(known[name], inputs[name]) for name in known):
                return dict(outputs)
        feeds = {name: without_bfloat16(array) for name, array in inputs.items()}
        return dict(zip(self._names, run_session(self._load()[1], self._names, feeds, self._model), strict=True))

    def remember(self, samples: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Compute samples now, for later calls of `run`, and let the model go: it is loaded again if it is needed."""
        self._known = [(sample, self.run(sample)) for sample in samples]
        self._loaded = None

    def moves(self, inputs: Mapping[str, np.ndarray], roundoff: float, tolerance: Tolerance) -> dict[str, Movement]:
        """Return how far each float output moves when ONNX Runtime rounds otherwise.

        Asked with every float weight, constant and input changed by `roundoff` of itself, up or down at random, and
        with all graph optimisations on. A graph with quantisers is changed four times: few values lie beside a tie, and
        one answer may hold none of them.

        Parameters
        ----------
        inputs : mapping of str to array
            As of `run`.
        roundoff : float
            The unit roundoff of the dtype that the artifact stores its tensors in.
        tolerance : Tolerance
            What an output may be off by elsewhere; `Movement.apart` counts what moves by more.
        """
        proto, _ = self._load()
        level = onnxruntime.GraphOptimizationLevel
        ties = rounds_to_integers(self._given)
        expected = self.run(inputs)
        found = {name: Movement(ties=ties) for name, array in expected.items() if array.dtype.kind == "f"}
        for seed in (None, *range(_NUDGES_OF_QUANTISERS if ties else 1)):
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = level.ORT_ENABLE_ALL if seed is None else level.ORT_ENABLE_BASIC
            graph, fed = (proto, inputs) if seed is None else self._rounded(inputs, roundoff, seed)
            session = _session(graph, self._model, options, self._threads)
            plain = {name: without_bfloat16(array) for name, array in fed.items()}
            values = run_session(session, self._names, plain, self._model)
            for name, value in zip(self._names, values, strict=True):
                if name in found:
                    found[name] = found[name].joined(movement(expected[name], value, tolerance, ties=ties))
        return found

    def _rounded(
        self, inputs: Mapping[str, np.ndarray], roundoff: float, seed: int
    ) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """Return the graph and inputs with every float changed by `roundoff` of itself, up or down at random."""
        draw = np.random.default_rng(seed)
        rounded = onnx.ModelProto()
        rounded.CopyFrom(self._load()[0])
        constants = [a for node in rounded.graph.node if node.op_type == "Constant" for a in node.attribute]
        for tensor in [*rounded.graph.initializer, *(a.t for a in constants if a.name == "value")]:
            if tensor.data_type in ROUNDED_TYPES:
                tensor.CopyFrom(
                    onnx.numpy_helper.from_array(
                        _nudged(onnx.numpy_helper.to_array(tensor), roundoff, draw), tensor.name
                    )
                )
        for attribute in constants:
            if attribute.name == "value_float":
                attribute.f = float(_nudged(np.asarray(attribute.f, np.float32), roundoff, draw))
        return rounded, {name: _nudged(without_bfloat16(array), roundoff, draw) for name, array in inputs.items()}

    def _load(self) -> tuple[onnx.ModelProto, onnxruntime.InferenceSession]:
        """Return the graph that is computed, and its session."""
        if self._loaded is None:
            given = self._given.inline_proto()
            proto = with_exact_activations(upcast_to_float32(given) if self.upcast else given)
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            # It computes beside a compilation: workers that spin take that one's cores.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self._loaded = proto, _session(proto, self._model, options, self._threads)
        return self._loaded

    def accepts(self, inputs: Mapping[str, np.ndarray]) -> bool:
        """Whether ONNX Runtime computes the model on inputs at all; it refuses sizes that the graph is not made for."""
        try:
            self.run(inputs)
        except PipelineError:
            return False
        return True


def _nudged(array: np.ndarray, roundoff: float, draw: np.random.Generator) -> np.ndarray:
    """Return an array whose floats are changed by `roundoff` of themselves, up or down at random."""
    if array.dtype.kind != "f":
        return np.asarray(array)
    signs = draw.integers(0, 2, array.shape) * 2.0 - 1.0
    return np.asarray(array * (1.0 + max(roundoff, float(np.finfo(array.dtype).eps)) * signs), array.dtype)


def run_session(
    session: onnxruntime.InferenceSession, names: Sequence[str], feeds: Mapping[str, np.ndarray], model: str
) -> list[np.ndarray]:
    """Return what ONNX Runtime computes for a model; its errors, which have no common base, as ours.

    Raises
    ------
    PipelineError
        ONNX Runtime does not compute the model on these inputs.
    """
    try:
        return list(session.run(names, feeds))
    except _ORT_ERRORS as e:
        shapes = ", ".join(f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in feeds.items())
        raise PipelineError(
            f"ONNX Runtime {onnxruntime.__version__} does not compute the model {model!r} on inputs of these sizes: "
            f"{shapes}. It says: {_last_line(e)} Sizes that do not fit together are the usual cause: "
            "`relaxtune inspect` lists what the axes must be, --shape fixes them"
        ) from e


def _last_line(error: Exception) -> str:
    """Return what ONNX Runtime says last, as a sentence and without its codes."""
    line = str(error).strip().splitlines()[-1]
    return line.rpartition("Status Message: ")[2].rpartition(" : ")[2].rstrip(".") + "."


def peer_provider(kind: str) -> str | None:
    """Return ONNX Runtime's provider for a target's kind of device, None where the one installed has none."""
    provider = _PROVIDERS.get(kind)
    return provider if provider in onnxruntime.get_available_providers() else None


def peer_session(model: OnnxModel, threads: int, provider: str = _CPU) -> onnxruntime.InferenceSession:
    """Return a session with every optimisation on; on the CPU it computes with `threads` threads.

    Raises
    ------
    PipelineError
        ONNX Runtime does not accept the model.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Workers that spin between runs would take the cores from whatever is measured next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return _session(model.inline_proto(), model.name, options, threads, provider)


def longest_reduction(model: OnnxModel) -> int:
    """Return how many products the longest sum over a weight adds up; 0 without matmuls or convolutions of weights."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.proto.graph.initializer}
    longest = 0
    for node in model.proto.graph.node:
        shape = shapes.get(node.input[1], ()) if len(node.input) > 1 else ()
        if node.op_type == "MatMul" and len(shape) >= 2:
            longest = max(longest, shape[-2])
        elif node.op_type == "Gemm" and len(shape) == 2:
            turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            longest = max(longest, shape[1 if turned else 0])
        elif node.op_type == "Conv" and len(shape) > 2:
            longest = max(longest, int(np.prod(shape[1:])))
    return longest


def _session(
    proto: onnx.ModelProto,
    name: str,
    options: onnxruntime.SessionOptions,
    threads: int | None,
    provider: str = _CPU,
) -> onnxruntime.InferenceSession:
    if threads is not None:
        options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        return _Session(proto, options, provider)
    except (*_ORT_ERRORS, RuntimeError, ValueError) as e:
        raise PipelineError(
            f"ONNX Runtime {onnxruntime.__version__} does not load the model {name!r}: {_last_line(e)} It is the "
            "reference for results; check the graph with `python -m onnx.checker`"
        ) from e


class _Session(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session that reads large weights where they lie; it holds them."""

    def __init__(self, proto: onnx.ModelProto, options: onnxruntime.SessionOptions, provider: str) -> None:
        self._split = _SplitGraph.of(proto)
        weights = self._split.weights
        options.add_external_initializers(list(weights), list(weights.values()))
        super().__init__(self._split.graph.SerializeToString(), options, providers=[provider])


class _SplitGraph:
    """A graph and, apart from it, its large weights; sessions on one graph share them while one of them lives."""

    _living: ClassVar[WeakValueDictionary[int, _SplitGraph]] = WeakValueDictionary()

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto  # held, since its identity is what it is found by
        self.graph, self.weights = _without_weights(proto)

    @classmethod
    def of(cls, proto: onnx.ModelProto) -> _SplitGraph:
        found = cls._living.get(id(proto))
        if found is None:
            found = cls._living[id(proto)] = cls(proto)
        return found


def _without_weights(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnxruntime.OrtValue]]:
    """Return the graph with its large weights as external ones, and these: ONNX Runtime takes them as they lie.

    A graph handed over as bytes is copied several times, weights included, and has at most 2 GiB. Weights that no node
    reads (quantising leaves the floats behind) stay as they are: ONNX Runtime does not find them any more.
    """
    graph, weights = onnx.ModelProto(), {}
    read = {name for node in proto.graph.node for name in names_read(node)}
    for descriptor, value in proto.ListFields():
        if descriptor.name != "graph":
            _copy_field(graph, descriptor.name, value)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            _copy_field(graph.graph, descriptor.name, value)
    for tensor in proto.graph.initializer:
        shared = tensor.data_type in _SHARED_TYPES and len(tensor.raw_data) >= _LARGE_BYTES
        if not (shared and tensor.name in read):
            graph.graph.initializer.add().CopyFrom(tensor)
            continue
        array = onnx.numpy_helper.to_array(tensor)
        weights[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        stub = graph.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        stub.data_location = onnx.TensorProto.EXTERNAL
        for key, text in (("location", "weights"), ("offset", "0"), ("length", str(array.nbytes))):
            stub.external_data.add(key=key, value=text)
    return graph, weights


def _copy_field(message: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    field = getattr(message, name)
    if hasattr(field, "extend"):
        field.extend(value)
    elif hasattr(field, "CopyFrom"):
        field.CopyFrom(value)
    else:
        setattr(message, name, value)
