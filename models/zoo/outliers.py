"""Zoo models with outlier activations: a few channels of the residual stream thousands of times the others.

Trained transformers have them (Dettmers et al. 2022, "LLM.int8()", arXiv:2208.07339; Sun et al. 2024, "Massive
Activations in Large Language Models", arXiv:2402.17762), random weights do not. They are what breaks half precision:
the square of 300 is beyond float16, and a norm or softmax that sums in it gives NaN.

Construction, for a set of channels O out of H, a factor a and a scale b. Every tensor that adds to the residual stream
(embeddings, outputs of attention and feed-forward layers) is multiplied by b, and its columns O by a as well. A norm's
root mean square grows by b r and its gain by r, where

    r = sqrt(1 + |O| (a^2 - 1) / H)

- pre-norm models (Llama): the gain in O is divided by a besides, so that what the layers read is as before;
- post-norm models (BERT), where the stream is the norm's output: gain and bias are multiplied by b, and the bias in O
  by a; matrices that read the stream are divided by b, and their rows O by a. The model's last hidden state has the
  outliers.

With a near sqrt(H / |O|), outliers and all other channels add up to as much in a norm, which stays well conditioned;
with larger ones the statistics of a token would hang on a few numbers, as they do not in trained models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper


@dataclass(frozen=True)
class Outliers:
    """The residual stream times `scale`, and `count` of its channels, spread evenly, times `factor` besides."""

    count: int
    factor: float
    scale: float

    def channels(self, hidden: int) -> np.ndarray:
        """Return the channels."""
        return (np.arange(self.count) * hidden // self.count + hidden // (2 * self.count)).astype(np.int64)


# Ends of weights' names: what writes to the residual stream, what norms it, and what reads it as it is.
_LLAMA_WRITERS = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
_LLAMA_NORMS = ("norm.weight", "layernorm.weight")
_BERT_WRITERS = ("embeddings.weight", "output.dense.weight", "output.dense.bias")
_BERT_GAINS, _BERT_BIASES = ("LayerNorm.weight",), ("LayerNorm.bias",)
_BERT_READERS = ("query.weight", "key.weight", "value.weight", "intermediate.dense.weight", "pooler.dense.weight")


def add_outliers(proto: onnx.ModelProto, hidden: int, outliers: Outliers) -> onnx.ModelProto:
    """Return the BERT or Llama graph of this zoo with outlier channels, changed in place."""
    channels, factor, scale = outliers.channels(hidden), outliers.factor, outliers.scale
    everywhere = range(hidden)
    growth = math.sqrt(1 + outliers.count * (factor**2 - 1) / hidden)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    post_norm = any(name.endswith(_BERT_GAINS) for name in weights)
    writers, readers = (_BERT_WRITERS, _BERT_READERS) if post_norm else (_LLAMA_WRITERS, ())
    for name, tensor in weights.items():
        if name.endswith(writers):
            _scale(tensor, everywhere, scale)
            _scale(tensor, channels, factor)
        elif name.endswith(readers):
            _scale(tensor, everywhere, 1 / scale, axis=0)
            _scale(tensor, channels, 1 / factor, axis=0)
        elif post_norm and name.endswith(_BERT_GAINS):
            _scale(tensor, everywhere, growth * scale)
        elif post_norm and name.endswith(_BERT_BIASES):
            _scale(tensor, everywhere, scale)
            _scale(tensor, channels, factor)
        elif not post_norm and name.endswith(_LLAMA_NORMS):
            _scale(tensor, everywhere, growth)
            _scale(tensor, channels, 1 / factor)
    return proto


def _scale(tensor: onnx.TensorProto, channels: Sequence[int] | np.ndarray, factor: float, axis: int = -1) -> None:
    array = numpy_helper.to_array(tensor).copy()
    index: list[slice | np.ndarray] = [slice(None)] * array.ndim
    index[axis] = np.asarray(channels)
    array[tuple(index)] = (array[tuple(index)].astype(np.float64) * factor).astype(array.dtype)
    tensor.raw_data = array.tobytes()
