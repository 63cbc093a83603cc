"""ONNX Runtime as the reference for results, and as the peer for speed.

The two uses want different sessions:

- *Reference*: graph optimisations at ORT_ENABLE_BASIC, which keep the meaning of every operator (constant folding, dead
  code). The higher levels fuse into kernels that approximate (Gelu, LayerNorm in one pass), and their error would be
  charged to the module under test. Half-precision graphs are first rewritten to float32: ONNX Runtime's CPU has few
  float16 kernels and puts casts around the others, so its own float16 result depends on which operators those are. The
  float32 result is what every float16 implementation approximates, and the tolerances are made for it. Nor does it
  round the activations of 4-bit matmuls to 8 bits, where the graph only allows it (accuracy_level), or saturate sums of
  8-bit products, as it does on some processors (`pipeline.validate.exact_integers`). Of an artifact
  with quantised weights the reference has the same ones: what quantisation costs is drift (`pipeline.validate.drift`),
  and the tolerance stays one that finds a wrong kernel.
- *Peer*: every optimisation on, the graph as given; what a user would run instead.

Both run in a process of their own (`pipeline.onnx_runtime`). A reference whose graph ends ONNX Runtime is loaded
without graph optimisations; so is one whose optimisations alter the results, where an artifact disagrees with it.
A peer is left out, since its latency would mean nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from relaxtune.models import OnnxModel
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.onnx_runtime.process import onnx_runtime
from relaxtune.pipeline.onnx_runtime.requests import CPU, Level, Settings
from relaxtune.pipeline.onnx_runtime.session import OnnxRuntimeSession
from relaxtune.pipeline.precision.graph_dtypes import computes_in_half, rounds_to_integers
from relaxtune.pipeline.precision.onnx_weights import with_quantised_weights
from relaxtune.pipeline.precision.policy import PolicyEntry
from relaxtune.pipeline.validate.array_comparison import Movement, compare_arrays, movement
from relaxtune.pipeline.validate.exact_integers import with_unsigned_weights
from relaxtune.pipeline.validate.tolerances import Tolerance
from relaxtune.pipeline.validate.upcast import (
    ROUNDED_TYPES,
    upcast_to_float32,
    with_exact_activations,
    without_bfloat16,
)

logger = logging.getLogger(__name__)

_PROVIDERS = {"llvm": CPU, "cuda": "CUDAExecutionProvider"}
# Operators whose floats after the first input are no values that are rounded. A scale of 2 that is rounded makes 19 of
# 10 places; a power of 2 that is rounded is NaN of each number below 0.
_EXACT_FLOATS = frozenset({"Resize", "Upsample", "Range", "Pow"})
# Answers of graphs with quantisers whose floats are rounded otherwise.
_NUDGES_OF_QUANTISERS = 4


class Reference:
    """The original model under ONNX Runtime on the CPU, computing in float32 or better."""

    def __init__(self, model: OnnxModel, threads: int | None = None, *, policy: PolicyEntry | None = None) -> None:
        """Load the model as given, or with the weights that a policy has quantised replaced by what they stand for.

        Raises `PipelineError`: ONNX Runtime does not accept it.
        """
        quantises = policy is not None and policy.rewrites
        self.quantised = policy.name if policy is not None and quantises else None
        model = with_quantised_weights(model, policy)
        self.upcast = computes_in_half(model)
        self._given = model
        self._model = model.name
        self._names = [spec.name for spec in model.outputs]
        self._known: list[tuple[Mapping[str, np.ndarray], dict[str, np.ndarray]]] = []
        self._loaded: tuple[onnx.ModelProto, OnnxRuntimeSession] | None = None
        # It computes during a compilation: workers that spin take that one's cores.
        entries = (("session.intra_op.allow_spinning", "0"),)
        self._settings = Settings(Level.BASIC, threads, entries)
        self._fell_back: str | None = None
        self._load()

    @property
    def description(self) -> str:
        """The reference in words, for reports."""
        how = ", half precision rewritten to float32" if self.upcast else ""
        weights = f", weights quantised as {self.quantised} does" if self.quantised else ""
        level = "basic graph optimisations"
        if self._fell_back is not None:
            level = f"no graph optimisations (with them, {self._fell_back.rstrip('.')})"
        return f"onnxruntime {onnx_runtime().description().version}, CPU, {level}{how}{weights}"

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name; those of a half-precision graph are float32.

        Raises `PipelineError`: ONNX Runtime does not compute the model on these inputs.
        """
        for known, outputs in self._known:
            if known.keys() == inputs.keys() and all(np.array_equal(known[name], inputs[name]) for name in known):
                return dict(outputs)
        session = self._load()[1]
        values = session.run(self._names, _feeds(inputs))
        self._keep_settings(session)
        return dict(zip(self._names, values, strict=True))

    def remember(self, samples: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Compute samples now, for later calls of `run`, and let the model go: it is loaded again if it is needed."""
        self._known = [(sample, self.run(sample)) for sample in samples]
        if self._loaded is not None:
            self._loaded[1].close()
        self._loaded = None

    def drop_wrong_optimisations(self, samples: Sequence[Mapping[str, np.ndarray]], tolerance: Tolerance) -> bool:
        """Return whether the results differ from those without graph optimisations, which `run` then gives from now on.

        ONNX Runtime 1.30 merges a Pad by zeros into a MaxPool that pads by the least number, as an example.

        `samples`: inputs, as of `run`. `tolerance`: the largest difference that rounding explains.
        """
        if self._settings.level is Level.NONE:
            return False
        optimised = [self.run(sample) for sample in samples]
        plain = replace(self._settings, level=Level.NONE)
        try:
            with OnnxRuntimeSession(self._load()[0], self._model, plain) as session:
                literal = [session.run(self._names, _feeds(sample)) for sample in samples]
        except PipelineError as error:
            logger.info("the reference keeps its graph optimisations: %s", error)
            return False
        for got, values in zip(optimised, literal, strict=True):
            for name, value in zip(self._names, values, strict=True):
                compared = compare_arrays(value, got[name], tolerance)
                if not compared.passed:
                    self._settings, self._known, self._loaded = plain, [], None
                    self._fell_back = f"output {name!r} differs: {compared.reason}"
                    logger.warning(
                        "the model %s runs in ONNX Runtime %s without graph optimisations: with them, %s",
                        self._model,
                        onnx_runtime().description().version,
                        self._fell_back,
                    )
                    return True
        return False

    def moves(self, inputs: Mapping[str, np.ndarray], roundoff: float, tolerance: Tolerance) -> dict[str, Movement]:
        """Return how far each float output moves when ONNX Runtime rounds otherwise.

        Asked with every float weight, constant and input changed by `roundoff` of itself, up or down at random, and
        with all graph optimisations on, unless these are wrong. A graph with quantisers is changed four times: few
        values lie beside a tie, and one answer may hold none of them.

        `roundoff` is the unit roundoff of the dtype that the artifact stores its tensors in. `tolerance` is that of an
        output elsewhere; `Movement.apart` counts what moves by more.
        """
        proto, _ = self._load()
        ties = rounds_to_integers(self._given)
        expected = self.run(inputs)
        found = {name: Movement(ties=ties) for name, array in expected.items() if array.dtype.kind == "f"}
        optimised = () if self._settings.level is Level.NONE else (None,)
        for seed in (*optimised, *range(_NUDGES_OF_QUANTISERS if ties else 1)):
            settings = Settings(Level.ALL if seed is None else self._settings.level, self._settings.threads)
            graph, fed = (proto, inputs) if seed is None else self._rounded(inputs, roundoff, seed)
            try:
                with OnnxRuntimeSession(graph, self._model, settings) as session:
                    values = session.run(self._names, _feeds(fed))
            except PipelineError as error:
                # A float that decides a size: the graph fits together with that number alone.
                logger.info("a trial of the outputs' own change is skipped: %s", error)
                continue
            for name, value in zip(self._names, values, strict=True):
                if name in found and value.shape == expected[name].shape:
                    found[name] = found[name].joined(movement(expected[name], value, tolerance, ties=ties))
        return found

    def _rounded(
        self, inputs: Mapping[str, np.ndarray], roundoff: float, seed: int
    ) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """Return the graph and inputs with every float changed by `roundoff` of itself, up or down at random."""
        draw = np.random.default_rng(seed)
        rounded = onnx.ModelProto()
        rounded.CopyFrom(self._load()[0])
        exact = {name for node in rounded.graph.node if node.op_type in _EXACT_FLOATS for name in node.input[1:]}
        nodes = [one for one in rounded.graph.node if one.op_type == "Constant" and not exact.intersection(one.output)]
        constants = [attribute for node in nodes for attribute in node.attribute]
        for tensor in [*rounded.graph.initializer, *(a.t for a in constants if a.name == "value")]:
            if tensor.data_type in ROUNDED_TYPES and tensor.name not in exact:
                tensor.CopyFrom(
                    onnx.numpy_helper.from_array(
                        _nudged(onnx.numpy_helper.to_array(tensor), roundoff, draw), tensor.name
                    )
                )
        for attribute in constants:
            if attribute.name == "value_float":
                attribute.f = float(_nudged(np.asarray(attribute.f, np.float32), roundoff, draw))
        return rounded, {name: _nudged(without_bfloat16(array), roundoff, draw) for name, array in inputs.items()}

    def _load(self) -> tuple[onnx.ModelProto, OnnxRuntimeSession]:
        """Return the graph that is computed, and its session."""
        if self._loaded is None:
            given = self._given.inline_proto()
            proto = with_exact_activations(upcast_to_float32(given) if self.upcast else given)
            proto = with_unsigned_weights(proto)
            self._loaded = proto, OnnxRuntimeSession(proto, self._model, self._settings)
            self._keep_settings(self._loaded[1])
        return self._loaded

    def _keep_settings(self, session: OnnxRuntimeSession) -> None:
        """Load it next time as it could be loaded this time."""
        self._settings = session.settings
        self._fell_back = self._fell_back or session.fell_back

    def accepts(self, inputs: Mapping[str, np.ndarray]) -> bool:
        """Whether ONNX Runtime computes the model on inputs at all; it refuses sizes that the graph is not made for."""
        try:
            self.run(inputs)
        except PipelineError:
            return False
        return True


def _feeds(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: without_bfloat16(array) for name, array in inputs.items()}


def _nudged(array: np.ndarray, roundoff: float, draw: np.random.Generator) -> np.ndarray:
    """Return an array whose floats are changed by `roundoff` of themselves, up or down at random.

    None becomes infinite: of the least number, which masks add, every output would be NaN.
    """
    if array.dtype.kind != "f":
        return np.asarray(array)
    signs = draw.integers(0, 2, array.shape) * 2.0 - 1.0
    limits = np.finfo(array.dtype)
    with np.errstate(over="ignore"):
        changed = np.asarray(array * (1.0 + max(roundoff, float(limits.eps)) * signs), array.dtype)
    return np.where(np.isfinite(array), np.clip(changed, limits.min, limits.max), array)


def peer_provider(kind: str) -> str | None:
    """Return ONNX Runtime's provider for a target's kind of device, None where the one installed has none."""
    provider = _PROVIDERS.get(kind)
    return provider if provider in onnx_runtime().description().providers else None


def peer_session(model: OnnxModel, threads: int, provider: str = CPU) -> OnnxRuntimeSession:
    """Return a session with every optimisation on; on the CPU it computes with `threads` threads.

    Raises `PipelineError`: ONNX Runtime does not accept the model, or ends while it loads it.
    """
    # Workers that spin between runs would take the cores from whatever is measured next.
    entries = (("session.force_spinning_stop", "1"),)
    settings = Settings(Level.ALL, threads, entries, provider)
    return OnnxRuntimeSession(model.inline_proto(), model.name, settings, falls_back=False)


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
