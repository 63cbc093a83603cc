"""Errors of the package `models`.

::

    ModelError
    ├── UnknownModelError     a name that is neither a file nor a model of the zoo
    ├── ModelFileError        the file cannot be read, or is not an ONNX model
    ├── UnsupportedModelError a valid model that asks for what the installed stack does not offer
    ├── InvalidModelError     the graph breaks a rule of ONNX
    ├── ExternalDataError     weights outside the file are missing, of the wrong size, or outside its folder
    └── ModelShapeError       a shape override or a dimension that does not fit the model
"""

from __future__ import annotations


class ModelError(Exception):
    """Base of every error raised by `models`; the message is made to be shown to a user as it is."""


class UnknownModelError(ModelError):
    """A name that is neither a file nor a model of the zoo."""


class ModelFileError(ModelError):
    """The file cannot be read, or what it holds is not an ONNX model."""


class UnsupportedModelError(ModelError):
    """The model (or the call) asks for an opset, IR version, operator, type or precision that is not supported."""


class InvalidModelError(ModelError):
    """The graph breaks a rule of ONNX: a cycle, a duplicate name, a wrong dtype."""


class ExternalDataError(ModelError):
    """Weights kept outside the file are missing, of the wrong size, or outside the model's folder."""


class ModelShapeError(ModelError):
    """A shape override, a dimension or a preset's limit that does not fit the model."""
