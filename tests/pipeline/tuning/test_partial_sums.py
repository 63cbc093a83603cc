"""Arguments of matmuls of normalised rows: their partial sums are those of the rows."""

from __future__ import annotations

import numpy as np
import pytest

from relaxtune.pipeline.tuning.measure.arguments import ArgumentSpec, make_arrays, with_partial_sums
from relaxtune.pipeline.tuning.measure.wrong_result import find_mismatch
from relaxtune.pipeline.validate.tolerances import kernel_tolerance
from relaxtune.schedules.tir.dependent_arguments import partial_sums_of_rows
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.norm_cases import NormCase, sums_of

CASE = NormCase(MatmulCase((2, 24), 64, 256), operand=True, shifted=True)


def names(case: NormCase) -> list[str]:
    return [str(param.name) for param in case.func().params]


def drawn(case: NormCase) -> dict[str, np.ndarray]:
    """Return what the tuner calls a candidate with, by name."""
    func = case.func()
    specs = [ArgumentSpec(tuple(int(size) for size in p.ty.shape), str(p.ty.dtype)) for p in func.params]
    arrays = with_partial_sums(make_arrays(specs, {}, 3), partial_sums_of_rows(func))
    return dict(zip(names(case), arrays, strict=True))


def test_partial_sums_are_found_with_the_rows_that_they_belong_to() -> None:
    order = names(CASE)
    assert partial_sums_of_rows(CASE.func()) == {str(order.index("partials")): order.index("A")}
    assert partial_sums_of_rows(NormCase(CASE.matmul, sums=True).func()) == {}
    assert partial_sums_of_rows(NormCase(CASE.matmul).func()) == {}


def test_partial_sums_are_those_of_the_rows() -> None:
    arguments = drawn(CASE)
    np.testing.assert_allclose(arguments["partials"], sums_of(arguments["A"].astype(np.float64), CASE.group), rtol=1e-5)
    assert arguments["partials"].dtype == np.float32


@pytest.mark.parametrize(("name", "axis"), [("partials", -2), ("shift", 0), ("column_sums", 0)])
def test_a_candidate_that_reads_a_statistic_wrongly_is_found(name: str, axis: int) -> None:
    arguments = drawn(CASE)
    # As the pass folds them, so that the matmul is one of normalised rows.
    arguments["column_sums"] = arguments["B"].astype(np.float32).sum(axis=1 if CASE.matmul.transposed else 0)
    accepted = kernel_tolerance(CASE.func())
    right = computed(arguments)
    assert np.abs(right).max() < 200
    wrong = {**arguments, name: np.roll(arguments[name], 1, axis=axis)}
    assert find_mismatch(computed(wrong).astype("float16"), right.astype("float16"), accepted) is not None


def computed(arguments: dict[str, np.ndarray]) -> np.ndarray:
    """Return the product of normalised rows from the arguments alone."""
    rows = arguments["A"].astype(np.float32)
    mean, square = np.moveaxis(arguments["partials"].sum(axis=0), -1, 0) / rows.shape[-1]
    scale = 1 / np.sqrt(square - mean**2 + 1e-5)
    b = arguments["B"].astype(np.float32)
    product = rows @ (b.T if CASE.matmul.transposed else b)
    value = product * scale[..., None] - (mean * scale)[..., None] * arguments["column_sums"]
    return np.asarray(value + arguments["shift"])
