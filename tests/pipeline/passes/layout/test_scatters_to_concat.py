from __future__ import annotations

import numpy as np
import pytest

from relaxtune.models import OnnxModel
from relaxtune.models.inputs import random_inputs
from relaxtune.pipeline.importer import import_model
from relaxtune.pipeline.passes import LoweredModule, lower
from tests.pipeline.importer.onnx_cases import run_reference
from tests.pipeline.passes.attention_forms import Form
from tests.pipeline.passes.pass_cases import LLVM, assert_agrees, run_lowered

ROWS, WIDTH = 6, 4


def written(*writes: tuple[int, int] | list[int], rows: int = ROWS) -> OnnxModel:
    """Return a model that writes rows of an input, each from an input of its own."""
    f = Form()
    data = f.input("data", "float", rows, WIDTH)
    for number, write in enumerate(writes):
        places = list(range(*write)) if isinstance(write, tuple) else write
        source = f.input(f"x{number}", "float", len(places), WIDTH)
        data = f.op("ScatterND", data, np.array(places)[:, None], source)
    return f.model(f.op("Mul", data, 2.0), (rows, WIDTH))


def transposed(*, back_and_forth: bool) -> OnnxModel:
    """torch's `x[..., :4] = a; x[..., 4:] = b`; between the writes of known sizes it leaves two transposes out."""
    f = Form()
    data = f.op("ConstantOfShape", [ROWS, 3, 2])
    for name, start, stop in (("a", 0, 4), ("b", 4, ROWS)):
        if back_and_forth and name == "b":
            data = f.op("Transpose", f.op("Transpose", data, perm=[2, 1, 0]), perm=[2, 1, 0])
        part = f.op("Transpose", f.input(name, "float", 2, 3, stop - start), perm=[2, 1, 0])
        data = f.op("ScatterND", data, np.arange(start, stop)[:, None], part)
    return f.model(f.op("Transpose", data, perm=[2, 1, 0]), (2, 3, ROWS))


def notes_of(lowered: LoweredModule) -> tuple[str, ...]:
    return next(report.notes for report in lowered.reports if report.name == "scatters_to_concat")


@pytest.mark.parametrize(
    "model",
    [
        written((0, 4), (4, 6)),
        written((1, 3)),
        written([-2, -1]),
        written((0, 4), (2, 6)),
        written((0, 2), (1, 5), (3, 4)),
        written((0, 6)),
        transposed(back_and_forth=False),
        transposed(back_and_forth=True),
    ],
    ids=[
        "all rows",
        "some rows",
        "the last rows",
        "rows written twice",
        "rows in rows",
        "one write",
        "transposed",
        "transposed back and forth",
    ],
)
def test_scatters_to_concat_agrees_with_the_scatters(model: OnnxModel) -> None:
    lowered = lower(import_model(model), LLVM)
    assert "scatters are concatenations" in notes_of(lowered)[0]
    assert not any("scatter" in name for name in lowered.kernels)
    assert sum(map(len, lowered.kernels.values())) == 1
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)


@pytest.mark.parametrize("places", [[0, 2], [3, 2, 1]], ids=["with a gap", "backwards"])
def test_scatters_to_concat_leaves_other_rows_alone(places: list[int]) -> None:
    model = written(places)
    lowered = lower(import_model(model), LLVM)
    assert notes_of(lowered) == ()
    feeds = random_inputs(model, seed=0)
    assert_agrees(run_lowered(lowered, feeds), run_reference(model, feeds), 1e-6)
