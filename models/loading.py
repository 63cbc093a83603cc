"""The one door: a zoo name or a path in, a checked `OnnxModel` out."""

from __future__ import annotations

from pathlib import Path

import onnx

from models.dims import Dim, evaluate_dim
from models.errors import ModelShapeError
from models.hashing import content_sha256
from models.shapes import Shapes, bind_shapes, signature_of
from models.spec import OnnxModel
from models.zoo.graph import Precision
from models.zoo.presets import DEFAULT_DIMS, Preset, get_preset


def load_model(
    source: str | Path, *, shapes: Shapes | None = None, precision: str | None = None, seed: int = 0
) -> OnnxModel:
    """Return a model of the zoo, or a user's `.onnx` file, checked and with its shapes pinned.

    Parameters
    ----------
    source
        A path to an `.onnx` file, or a name from `list_models()`.
    shapes
        Input name to shape, numbers or names. For a zoo name the axes of any one input decide the whole graph (batch 1,
        sequence 128 and past_sequence 127 where nothing is said). For a file, axes of one name are pinned everywhere.
    precision
        "fp32" or "fp16": what a zoo model is built in (fp32 when None). A file keeps the precision it has.
    seed
        Seed of a zoo model's weights.

    Raises
    ------
    ModelError
        Every leaf of `models.errors`.
    """
    return _load_zoo(get_preset(str(source)), shapes or {}, _parse_precision(precision), seed)


def _load_zoo(preset: Preset, shapes: Shapes, precision: Precision, seed: int) -> OnnxModel:
    dims: dict[str, Dim] = {
        axis: DEFAULT_DIMS[axis]
        for spec in preset.inputs
        for axis in spec.shape
        if isinstance(axis, str) and axis in DEFAULT_DIMS
    }
    dims.update(bind_shapes(preset.inputs, shapes, preset.name))
    for name, limit in preset.limits.items():
        value = evaluate_dim(name, {key: number for key, number in dims.items() if isinstance(number, int)})
        if isinstance(value, int) and value > limit:
            msg = f"dimension {name!r} of zoo model {preset.name!r} is {value}, expected at most {limit}"
            raise ModelShapeError(msg)
    proto = preset.build(preset.name, dims, precision, seed)
    return make_model(preset.name, proto, path=None, data_dir=None)


def make_model(name: str, proto: onnx.ModelProto, *, path: Path | None, data_dir: Path | None) -> OnnxModel:
    """Return the model's value from a checked proto: its hash and its signature."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return OnnxModel(
        name=name,
        proto=proto,
        path=path,
        sha256=content_sha256(proto, data_dir),
        inputs=signature_of([value for value in proto.graph.input if value.name not in weights], "input"),
        outputs=signature_of(proto.graph.output, "output"),
        data_dir=data_dir,
    )


def _parse_precision(precision: str | None) -> Precision:
    if precision is None:
        return Precision.FP32
    try:
        return Precision(precision)
    except ValueError as e:
        msg = f"precision {precision!r} is not known; expected one of {', '.join(p.value for p in Precision)}"
        raise ModelShapeError(msg) from e
