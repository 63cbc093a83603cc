"""Transformer ONNX graphs: the zoo, loading of a user's file, shapes, random inputs. Needs neither TVM nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxtune.lazy import lazy_names

if TYPE_CHECKING:
    from relaxtune.models.axes.relations import axis_sizes
    from relaxtune.models.dims import parse_shape_override
    from relaxtune.models.errors import ModelError
    from relaxtune.models.files import save_model
    from relaxtune.models.inputs import InputKind, InputRule, describe_inputs, random_inputs, unpadded_inputs
    from relaxtune.models.loading import load_model
    from relaxtune.models.onnx_model import OnnxModel
    from relaxtune.models.spec import AxisRelation, TensorSpec
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

if not TYPE_CHECKING:  # mypy would take any name, and any module below, for one that is there
    __getattr__ = lazy_names(
        __name__,
        {
            "AxisRelation": "spec",
            "InputKind": "inputs",
            "InputRule": "inputs",
            "ModelError": "errors",
            "OnnxModel": "onnx_model",
            "TensorSpec": "spec",
            "axis_sizes": "axes.relations",
            "describe_inputs": "inputs",
            "get_preset": "zoo.presets",
            "list_models": "zoo.presets",
            "load_model": "loading",
            "parse_shape_override": "dims",
            "random_inputs": "inputs",
            "save_model": "files",
            "unpadded_inputs": "inputs",
        },
    )
