"""`calibrate`: ranges of the tensors that a model's matmuls read, from samples that ONNX Runtime computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from relaxtune.models import OnnxModel
from relaxtune.models.spec import TensorSpec, numpy_dtype, shape_text
from relaxtune.pipeline.errors import PipelineError, UsageError
from relaxtune.pipeline.onnx_runtime.requests import Level, Settings
from relaxtune.pipeline.onnx_runtime.session import OnnxRuntimeSession
from relaxtune.pipeline.precision.calibration import CalibrationRecord, Method, TensorRange, graph_key
from relaxtune.pipeline.precision.graph_dtypes import computes_in_half
from relaxtune.pipeline.precision.onnx_weights import MatmulWeights, label_of
from relaxtune.pipeline.validate.upcast import upcast_to_float32, without_bfloat16
from relaxtune.schedules.functions.float8 import FLOAT8_MAX, float8_array

Sample = Mapping[str, np.ndarray]

_BINS = 2048
_PERCENTILE = 0.9999
# Shares of the largest element that the methods "mse" and "entropy" try as limits.
_TRIED = np.linspace(0.05, 1.0, 96)
# Bytes of the tensors that one run returns for histograms, at most, if there are several.
_CHUNK_BYTES = 256 << 20
# Inputs of a text -> attributes of an encoding of the package tokenizers.
_TEXT_INPUTS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
_TOKENS_MAX = 512


def calibrate_model(model: OnnxModel, samples: Sequence[Sample], method: Method = Method.MAX) -> CalibrationRecord:
    """Return the ranges of the tensors that matmuls by constant matrices read.

    The first run of each sample finds the largest elements inside the graph. The other methods need histograms: the
    tensors come in chunks of 256 MB, and each chunk takes one more run of each sample.
    Raises `UsageError`: there is no sample, a sample does not fit, or no matmul has a constant matrix; `PipelineError`:
    ONNX Runtime does not compute a sample, or a tensor is not finite.
    """
    if not samples:
        raise UsageError(f"no sample to calibrate {model.name!r} with; give one call's inputs at least")
    digest = hashlib.sha256()
    fed = [_checked(model, sample, number, digest) for number, sample in enumerate(samples, 1)]
    tensors = _tensors(model)
    largest, counts = _largest(model, tensors, fed)
    if method is Method.MAX:
        ranges = {name: TensorRange(largest[name], largest[name], 0.0) for name in tensors}
    else:
        ranges = {
            name: _range(counted, largest[name], method)
            for chunk in _chunks(tensors, counts)
            for name, counted in _histograms(model, chunk, largest, fed).items()
        }
    return CalibrationRecord(graph_key(model), digest.hexdigest(), method.value, len(samples), ranges)


def samples_of_texts(model: OnnxModel, texts: Sequence[str], tokenizer: Any) -> list[Sample]:
    """Return the inputs of calls for texts: one text a call, or as many as a fixed batch has.

    Tokens are cut at a fixed length, at the tokenizer's limit, or at 512; only fixed lengths are padded.
    Raises `UsageError`: the model has inputs that no text gives.
    """
    specs = {spec.name: spec for spec in model.inputs}
    if not specs.keys() <= _TEXT_INPUTS.keys() or len(specs["input_ids"].shape if "input_ids" in specs else ()) != 2:
        raise UsageError(
            f"model {model.name!r} has inputs {', '.join(specs)}; texts give {', '.join(_TEXT_INPUTS)} [batch, tokens] "
            "only: record calls as .npz files (relaxtune.CallRecorder) and give them by --data"
        )
    batch, length = specs["input_ids"].shape
    own = (tokenizer.truncation or {}).get("max_length")
    pad = (tokenizer.padding or {}).get("pad_id", 0)
    tokenizer.no_padding()
    tokenizer.enable_truncation(length if isinstance(length, int) else min(own or _TOKENS_MAX, _TOKENS_MAX))
    rows = batch if isinstance(batch, int) else 1
    encodings = [one for one in tokenizer.encode_batch(list(texts)) if one.ids]
    samples: list[Sample] = []
    for first in range(0, len(encodings), rows):
        part = [encodings[number % len(encodings)] for number in range(first, first + rows)]
        width = length if isinstance(length, int) else max(len(one.ids) for one in part)
        arrays = {
            name: np.full((rows, width), pad if name == "input_ids" else 0, spec.dtype) for name, spec in specs.items()
        }
        for name, array in arrays.items():
            for row, one in zip(array, part, strict=True):
                row[: len(one.ids)] = getattr(one, _TEXT_INPUTS[name])
        samples.append(arrays)
    return samples


def _checked(model: OnnxModel, sample: Sample, number: int, digest: Any) -> dict[str, np.ndarray]:
    """Return a sample as ONNX Runtime takes it, and hash it."""
    names = [spec.name for spec in model.inputs]
    where = f"sample {number} for {model.name!r}"
    for problem, wrong in (("lacks", set(names) - sample.keys()), ("has unknown", sample.keys() - set(names))):
        if wrong:
            raise UsageError(f"{where} {problem} inputs {', '.join(sorted(wrong))}; expected arrays {', '.join(names)}")
    for spec in model.inputs:
        array = sample[spec.name]
        _check_array(spec, array, where)
        digest.update(f"\0{spec.name}\0{array.dtype}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return {spec.name: without_bfloat16(sample[spec.name].astype(numpy_dtype(spec.dtype))) for spec in model.inputs}


def _check_array(spec: TensorSpec, array: np.ndarray, where: str) -> None:
    wanted = numpy_dtype(spec.dtype)
    fits = array.ndim == len(spec.shape) and all(
        not isinstance(size, int) or size == got for size, got in zip(spec.shape, array.shape, strict=True)
    )
    if not fits or array.size == 0:
        raise UsageError(
            f"{where}: input {spec.name!r} has shape {shape_text(array.shape)}, expected {shape_text(spec.shape)} and "
            "one element at least; pin other sizes with --shape or --dim"
        )
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise UsageError(f"{where}: input {spec.name!r} is {array.dtype}, expected {spec.dtype}; convert the array")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise UsageError(f"{where}: input {spec.name!r} has NaN; remove the sample, or repair its data")


def _tensors(model: OnnxModel) -> list[str]:
    """Return what matmuls by constant matrices read, in the order of the graph.

    Raises `UsageError`: there is nothing.
    """
    weights, constants = MatmulWeights(model), {tensor.name for tensor in model.proto.graph.initializer}
    found = dict.fromkeys(
        node.input[0]
        for node in model.proto.graph.node
        if weights.shape(label_of(node)) is not None and node.input[0] not in constants
    )
    if not found:
        raise UsageError(
            f"model {model.name!r} has no MatMul or Gemm by a constant matrix: there is nothing to calibrate; 8-bit "
            "precisions would leave it as it is"
        )
    return list(found)


def _session(model: OnnxModel, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> OnnxRuntimeSession:
    """Return a session of the float graph, with more nodes and other outputs."""
    given = model.inline_proto()
    proto = onnx.ModelProto()
    proto.CopyFrom(upcast_to_float32(given) if computes_in_half(model) else given)
    proto.graph.node.extend(nodes)
    del proto.graph.output[:]
    # ONNX Runtime infers the types of outputs that do not tell theirs.
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return OnnxRuntimeSession(proto, model.name, Settings(Level.BASIC))


def _largest(
    model: OnnxModel, tensors: Sequence[str], samples: Sequence[Sample]
) -> tuple[dict[str, float], dict[str, int]]:
    """Return the size of the largest element of each tensor, and the most elements that it has in a sample."""
    nodes, outputs = [], []
    for number, name in enumerate(tensors):
        sizes, *made = (f"calibration__{number}_{what}" for what in ("sizes", "largest", "sum", "count"))
        nodes += [
            helper.make_node("Abs", [name], [sizes]),
            helper.make_node("ReduceMax", [sizes], [made[0]], keepdims=0),
            helper.make_node("ReduceSum", [sizes], [made[1]], keepdims=0),
            helper.make_node("Size", [name], [made[2]]),
        ]
        outputs += made
    largest, counts = dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, 0)
    with _session(model, nodes, outputs) as session:
        for number, sample in enumerate(samples, 1):
            values = session.run(outputs, sample)
            for name, most, total, count in zip(tensors, values[::3], values[1::3], values[2::3], strict=True):
                if not np.isfinite(most) or np.isnan(total):
                    raise PipelineError(
                        f"sample {number}: tensor {name!r} of {model.name!r} has infinite elements or NaN, so it has "
                        "no range; remove the sample, or validate the model on it first"
                    )
                largest[name], counts[name] = max(largest[name], float(most)), max(counts[name], int(count))
    return largest, counts


def _chunks(tensors: Sequence[str], counts: Mapping[str, int]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for name in tensors:
        if chunk and 4 * (sum(counts[one] for one in chunk) + counts[name]) > _CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(name)
    yield chunk


def _histograms(
    model: OnnxModel, tensors: Sequence[str], largest: Mapping[str, float], samples: Sequence[Sample]
) -> dict[str, np.ndarray]:
    """Return how many elements of each tensor have sizes in each of `_BINS` equal bins up to the largest."""
    found = {name: np.zeros(_BINS, np.int64) for name in tensors}
    with _session(model, [], tensors) as session:
        for sample in samples:
            for name, value in zip(tensors, session.run(tensors, sample), strict=True):
                found[name] += np.histogram(np.abs(value), _BINS, (0.0, largest[name] or 1.0))[0]
    return found


def _range(counted: np.ndarray, largest: float, method: Method) -> TensorRange:
    """Return the range that a method finds in a histogram of sizes."""
    if largest == 0:
        return TensorRange(0.0, 0.0, 0.0)
    middles = (np.arange(_BINS) + 0.5) / _BINS  # in units of the largest
    if method is Method.PERCENTILE:
        bins = int(np.searchsorted(np.cumsum(counted), _PERCENTILE * counted.sum())) + 1
    else:
        loss = _squared_error if method is Method.MSE else _divergence
        tried = np.unique(np.ceil(_TRIED * _BINS).astype(int))
        bins = int(min(tried, key=lambda one: loss(counted, middles, one)))
    return TensorRange(largest * bins / _BINS, largest, float(counted[bins:].sum() / counted.sum()))


def _squared_error(counted: np.ndarray, middles: np.ndarray, bins: int) -> float:
    scale = bins / _BINS / FLOAT8_MAX
    return float(counted @ (float8_array(middles / scale).astype(np.float64) * scale - middles) ** 2)


def _divergence(counted: np.ndarray, middles: np.ndarray, bins: int) -> float:
    """Return the Kullback-Leibler divergence of the sizes in float8, spread over their bins, from the clipped ones."""
    exact = counted[:bins].astype(np.float64)
    present = exact > 0
    codes = float8_array(middles[:bins] * (FLOAT8_MAX * _BINS / bins)).view(np.uint8)
    mass, places = np.bincount(codes, exact), np.bincount(codes, present)
    made = np.where(present, mass[codes] / np.maximum(places[codes], 1), 0.0)
    exact[-1] += counted[bins:].sum()
    made = np.maximum(made / max(made.sum(), 1.0), 1e-9)
    exact /= exact.sum()
    at = exact > 0
    return float((exact[at] * np.log(exact[at] / made[at])).sum())
