"""What ONNX Runtime refuses is an error of ours that names the sizes, and no traceback."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.validate.reference import Reference
from tests.pipeline.importer.onnx_cases import make_model


def test_sizes_that_do_not_fit_together_are_named() -> None:
    model = make_model(
        [helper.make_node("Add", ["x", "mask"], ["y"])],
        {"x": ("float32", ("a", 4)), "mask": ("float32", ("b", 4))},
        {"y": ("float32", ("a", 4))},
    )
    reference = Reference(model)
    sizes = {"x": np.ones((2, 4), "float32"), "mask": np.ones((3, 4), "float32")}
    with pytest.raises(PipelineError, match=r"does not compute the model 'case' .*x 2x4, mask 3x4.*relaxtune inspect"):
        reference.run(sizes)
    assert not reference.accepts(sizes)
