"""Our own ONNX converters, for operators that TVM's frontend lacks or converts wrongly; one file a family.

A converter found here is used instead of TVM's. Each is tested against ONNX Runtime. Every file of this folder is
imported, and its functions register themselves (`converts`).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

from relaxtune.pipeline.importer.converter_input import CONVERTERS, Converter, ConverterInput

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = ["CONVERTERS", "Converter", "ConverterInput"]
