"""Our own ONNX converters, for operators that TVM's frontend lacks or converts wrongly; one file a family.

The keys are (domain, operator); the main ONNX domain is the empty string. A converter found here is used instead of
TVM's. Each is tested against ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.importer.converters.base import Converter, ConverterInput
from pipeline.importer.converters.constants import CONSTANT_CONVERTERS
from pipeline.importer.converters.elementwise import ELEMENTWISE_CONVERTERS
from pipeline.importer.converters.gather import GATHER_CONVERTERS
from pipeline.importer.converters.shape import SHAPE_CONVERTERS

CONVERTERS: Mapping[tuple[str, str], Converter] = {
    **CONSTANT_CONVERTERS,
    **ELEMENTWISE_CONVERTERS,
    **GATHER_CONVERTERS,
    **SHAPE_CONVERTERS,
}

__all__ = ["CONVERTERS", "Converter", "ConverterInput"]
