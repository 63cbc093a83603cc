from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from relaxtune.models import OnnxModel, load_model
from relaxtune.models.inputs import random_inputs
from relaxtune.models.zoo.outliers import Outliers


def residual_stream(model: OnnxModel, hidden: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the outputs, and every sum of the residual stream's shape, on one random input."""
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    added = [node.output[0] for node in proto.graph.node if node.op_type == "Add"]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in added)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [spec.name for spec in model.outputs]
    found = session.run([*names, *added], random_inputs(model, seed=0))
    stream = [array for array in found[len(names) :] if array.ndim == 3 and array.shape[1:] == (16, hidden)]
    return found[: len(names)], stream


@pytest.mark.parametrize("name", ["bert-tiny-outliers", "llama-tiny-outliers"])
def test_a_few_channels_are_beyond_what_half_precision_can_square(name: str) -> None:
    shapes = {"input_ids": (1, 16)}
    outputs, stream = residual_stream(load_model(name, shapes=shapes), 128)
    plain, ordinary = residual_stream(load_model(name.removesuffix("-outliers"), shapes=shapes), 128)
    channels = Outliers(2, 0.0, 0.0).channels(128)
    others = np.setdiff1d(np.arange(128), channels)
    last = stream[-1]
    assert np.abs(last[..., channels]).mean() > 5 * np.abs(last[..., others]).mean()
    assert np.abs(last).max() ** 2 > np.finfo(np.float16).max
    assert np.abs(last).max() < np.finfo(np.float16).max
    assert np.abs(ordinary[-1]).max() < 50
    # The pooler and the logits are as large as without.
    got, want = (float(np.sqrt(np.mean(found[-1] ** 2))) for found in (outputs, plain))
    assert 0.5 * want < got < 2 * want


def test_outliers_need_a_model_they_are_written_for() -> None:
    from relaxtune.models.zoo.presets import _with_outliers, get_preset

    with pytest.raises(TypeError, match="vit-tiny is neither BERT nor Llama"):
        _with_outliers(get_preset("vit-tiny"), Outliers(1, 2.0, 2.0))
