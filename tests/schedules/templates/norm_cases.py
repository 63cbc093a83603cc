"""Fused matmuls that norms were taken into, what they compute, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tvm import tirx

from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from relaxtune.schedules.tir.normed_matmul import OperandNorm, keep_partial_sums, normalise_operand, normalise_residual
from tests.schedules.templates.matmul_cases import MatmulCase

EPSILON = 1e-5


@dataclass(frozen=True)
class NormCase:
    """A matmul with bias, whose A or residual was normalised; `group` for the sums that it reads or writes.

    `operand` and `residual` say what is normalised; `centred`, `shifted` and `keeps` are `OperandNorm`'s; `sums` asks
    for partial sums of the result.
    """

    matmul: MatmulCase
    group: int = 16
    operand: bool = False
    residual: bool = False
    centred: bool = True
    shifted: bool = False
    keeps: bool = False
    sums: bool = False

    def func(self) -> tirx.PrimFunc:
        """Return the function."""
        func = self.matmul.func()
        if self.sums:
            func = keep_partial_sums(func, known(func), self.group)
        if self.operand:
            groups = self.matmul.k // self.group
            norm = OperandNorm(self.centred, EPSILON, groups, self.shifted, self.keeps)
            func = normalise_operand(func, known(func), norm)
        if self.residual:
            place = [str(param.name) for param in func.params].index("residual")
            func = normalise_residual(func, known(func), place, shifted=self.shifted)
        return func

    def inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return random inputs by the names of parameters; what depends on others is made from them."""
        func, made = self.func(), {}
        for param in func.params:
            shape, dtype = [int(size) for size in param.ty.shape], str(param.ty.dtype)
            array = rng.normal(size=shape) + (0.5 if param.name in ("A", "residual") else 0)
            made[str(param.name)] = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        a, b = wide(made["A"]), wide(made["B"])
        if self.operand:
            made["partials"] = sums_of(a, self.group)
            made["column_sums"] = b.sum(axis=1 if self.matmul.transposed else 0).astype("float32")
        if self.residual:
            made["statistics"] = self.statistics(wide(made["residual"]))
        return {name: made[name] for name in (str(param.name) for param in func.params) if name not in OUTPUTS}

    def statistics(self, rows: np.ndarray) -> np.ndarray:
        """Return scale and shift of each row."""
        mean = rows.mean(-1) if self.centred else np.zeros(rows.shape[:-1])
        scale = 1 / np.sqrt(np.mean((rows - mean[..., None]) ** 2, axis=-1) + EPSILON)
        return np.stack([scale, -mean * scale], axis=-1).astype("float32")

    def expected(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs by name, in float32."""
        a, b = wide(inputs["A"]), wide(inputs["B"])
        found = {}
        if self.operand:
            statistics = self.statistics(a)
            found["row_statistics"] = statistics
            a = a * statistics[..., :1] + statistics[..., 1:]
        value = a @ (b.T if self.matmul.transposed else b)
        if self.operand and self.shifted:
            value = value + inputs["shift"]
        if "bias" in inputs:
            value = value + wide(inputs["bias"])
        if self.residual:
            statistics = inputs["statistics"]
            rows = wide(inputs["residual"]) * statistics[..., :1] + statistics[..., 1:]
            value = value + rows * inputs["gamma"] + (inputs["beta"] if self.shifted else 0)
        elif "residual" in inputs:
            value = value + wide(inputs["residual"])
        found["epilogue"] = value
        return found


OUTPUTS = ("partial_sums", "row_statistics", "epilogue")


def known(func: tirx.PrimFunc) -> MatmulFunction:
    """Return a function's matmul, of symbolic rows as one of many."""
    found = recognise_matmul(func, 4096)
    assert isinstance(found, MatmulFunction), found
    return found


def wide(array: np.ndarray) -> np.ndarray:
    """Return an array in float32."""
    return array.astype("float32")


def sums_of(rows: np.ndarray, group: int) -> np.ndarray:
    """Return partial sums [groups, rows..., 2]."""
    parts = wide(rows).reshape(*rows.shape[:-1], -1, group)
    return np.moveaxis(np.stack([parts.sum(-1), (parts**2).sum(-1)], axis=-1), -2, 0).astype("float32").copy()


def assert_right(
    case: NormCase, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], error_max: float
) -> None:
    """Check a function's outputs; partial sums are those of the result as it was written."""
    expected = case.expected(inputs)
    if case.sums:
        expected["partial_sums"] = sums_of(outputs["epilogue"], case.group)
    for name, found in outputs.items():
        right, allowed = expected[name], error_max if name == "epilogue" else 1e-5
        error = np.linalg.norm(wide(found) - right) / np.linalg.norm(right)
        assert error < allowed, (name, error)


def arrays_of(case: NormCase) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return inputs and outputs, which nothing wrote yet, by the names of parameters."""
    inputs = case.inputs(np.random.default_rng(0))
    outputs = {
        str(param.name): np.full([int(size) for size in param.ty.shape], np.nan, str(param.ty.dtype))
        for param in case.func().params
        if str(param.name) not in inputs
    }
    return inputs, outputs


def named(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return outputs by the names that `assert_right` knows."""
    return {{"cast": "epilogue"}.get(name, name): array for name, array in outputs.items()}
