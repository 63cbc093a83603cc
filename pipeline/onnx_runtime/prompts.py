"""Whether a decoder with past computes a prompt as the decoder without past does, which was exported beside it.

Exporters write the decoder with past for one new token. It may still have a symbolic number of tokens, as in a merged
file, and be wrong for more than one.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx

from relaxtune.models.external_data import external_tensors
from relaxtune.models.onnx_model import OnnxModel
from relaxtune.models.spec import numpy_dtype
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.onnx_runtime.requests import Level, Settings
from relaxtune.pipeline.onnx_runtime.session import OnnxRuntimeSession

logger = logging.getLogger(__name__)

_BATCH, _TOKENS, _SOURCE = 2, 5, 6
# Of the largest logit: roundings of two graphs, far below what a missing mask or position changes.
_TOLERANCE = 1e-3


def takes_prompts(step: OnnxModel, prompt: onnx.ModelProto) -> bool:
    """Return whether a step with no past gives the logits of the decoder without past, for several tokens."""
    if any(external_tensors(prompt)) or not step.fits_protobuf:
        return False
    draw = np.random.default_rng(0)

    def feed(value: onnx.ValueInfoProto) -> np.ndarray:
        length = _SOURCE if value.name.startswith("encoder") else _TOKENS
        axes = value.type.tensor_type.shape.dim
        shape = [one.dim_value or (length if place else _BATCH) for place, one in enumerate(axes)]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if "position" in value.name:
            return np.broadcast_to(np.arange(_TOKENS), shape).astype(dtype)
        whole = np.ones(shape) if "mask" in value.name else draw.integers(1, 4, shape)
        return whole.astype(dtype) if len(axes) < 3 else draw.standard_normal(shape).astype(dtype)

    weights = {one.name for one in prompt.graph.initializer}
    given = {one.name: feed(one) for one in prompt.graph.input if one.name not in weights}
    settings = Settings(Level.BASIC, None, (("session.intra_op.allow_spinning", "0"),))
    names = [one.name for one in prompt.graph.output]
    with OnnxRuntimeSession(prompt, "the decoder without past", settings) as session:
        made = dict(zip(names, session.run(names, given), strict=True))
    for spec in step.inputs:
        if len(spec.shape) == 4:
            present = made.get(spec.name.replace("past_key_values", "present")) if ".encoder." in spec.name else None
            none = [axis if isinstance(axis, int) else 0 for axis in (_BATCH, *spec.shape[1:])]
            given[spec.name] = np.zeros(none, numpy_dtype(spec.dtype)) if present is None else present
    try:
        with OnnxRuntimeSession(step.inline_proto(), step.name, settings) as session:
            (logits,) = session.run(["logits"], {spec.name: given[spec.name] for spec in step.inputs})
    except (PipelineError, KeyError) as error:
        logger.debug("%s computes one token at a time: %s", step.name, error)
        return False
    difference = np.abs(logits.astype(np.float64) - made["logits"])
    return logits.shape == made["logits"].shape and bool(difference.max() <= _TOLERANCE * np.abs(logits).max())
