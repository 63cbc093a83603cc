"""Our own ONNX converters, for operators that TVM's frontend lacks or converts wrongly; one file a family.

The keys are (domain, operator); the main ONNX domain is the empty string. A converter found here is used instead of
TVM's. Each is tested against ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

from relaxtune.pipeline.importer.converter_input import Converter, ConverterInput
from relaxtune.pipeline.importer.converters.activations import ACTIVATION_CONVERTERS
from relaxtune.pipeline.importer.converters.attention.caches import CACHE_CONVERTERS
from relaxtune.pipeline.importer.converters.attention.contrib import ATTENTION_CONVERTERS
from relaxtune.pipeline.importer.converters.attention.onnx import ONNX_ATTENTION_CONVERTERS
from relaxtune.pipeline.importer.converters.attention.rotary import ROTARY_CONVERTERS
from relaxtune.pipeline.importer.converters.convolutions import CONVOLUTION_CONVERTERS
from relaxtune.pipeline.importer.converters.elementwise import ELEMENTWISE_CONVERTERS
from relaxtune.pipeline.importer.converters.fourier import FOURIER_CONVERTERS
from relaxtune.pipeline.importer.converters.matmuls import MATMUL_CONVERTERS
from relaxtune.pipeline.importer.converters.norms import NORM_CONVERTERS
from relaxtune.pipeline.importer.converters.quantised.convolutions import QUANTISED_CONVOLUTION_CONVERTERS
from relaxtune.pipeline.importer.converters.quantised.elementwise import QUANTISED_ELEMENTWISE_CONVERTERS
from relaxtune.pipeline.importer.converters.quantised.matmuls import QUANTISED_MATMUL_CONVERTERS
from relaxtune.pipeline.importer.converters.quantised.quantise import QUANTISE_CONVERTERS
from relaxtune.pipeline.importer.converters.reductions import REDUCTION_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.constants import CONSTANT_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.gather import GATHER_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.resize import RESIZE_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.scatter import SCATTER_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.shape import SHAPE_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.tile import TILE_CONVERTERS
from relaxtune.pipeline.importer.converters.shapes.top_k import TOP_K_CONVERTERS

CONVERTERS: Mapping[tuple[str, str], Converter] = {
    **ACTIVATION_CONVERTERS,
    **ATTENTION_CONVERTERS,
    **ONNX_ATTENTION_CONVERTERS,
    **CONSTANT_CONVERTERS,
    **ELEMENTWISE_CONVERTERS,
    **GATHER_CONVERTERS,
    **MATMUL_CONVERTERS,
    **NORM_CONVERTERS,
    **QUANTISE_CONVERTERS,
    **QUANTISED_CONVOLUTION_CONVERTERS,
    **QUANTISED_ELEMENTWISE_CONVERTERS,
    **QUANTISED_MATMUL_CONVERTERS,
    **ROTARY_CONVERTERS,
    **CACHE_CONVERTERS,
    **CONVOLUTION_CONVERTERS,
    **FOURIER_CONVERTERS,
    **REDUCTION_CONVERTERS,
    **RESIZE_CONVERTERS,
    **SCATTER_CONVERTERS,
    **SHAPE_CONVERTERS,
    **TILE_CONVERTERS,
    **TOP_K_CONVERTERS,
}

__all__ = ["CONVERTERS", "Converter", "ConverterInput"]
