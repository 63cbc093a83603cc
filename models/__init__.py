"""Transformer ONNX graphs: the zoo, loading of a user's file, shapes, random inputs. Needs neither TVM nor torch."""

from __future__ import annotations

from relaxtune.models.axes.relations import axis_sizes
from relaxtune.models.dims import parse_shape_override
from relaxtune.models.errors import ModelError
from relaxtune.models.files import save_model
from relaxtune.models.inputs import InputKind, InputRule, describe_inputs, random_inputs, unpadded_inputs
from relaxtune.models.loading import load_model
from relaxtune.models.spec import AxisRelation, OnnxModel, TensorSpec
from relaxtune.models.zoo.presets import get_preset, list_models

__all__ = [
    "AxisRelation",
    "InputKind",
    "InputRule",
    "ModelError",
    "OnnxModel",
    "TensorSpec",
    "axis_sizes",
    "describe_inputs",
    "get_preset",
    "list_models",
    "load_model",
    "parse_shape_override",
    "random_inputs",
    "save_model",
    "unpadded_inputs",
]
