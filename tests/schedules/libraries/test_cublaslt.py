from __future__ import annotations

import pytest
from tvm import te, tirx

from schedules.fallback import SCHEDULED_ATTR
from schedules.libraries.cublaslt import SOURCES_ATTR, CublasLt, CublasLtParameters, library_sources
from schedules.targets import ResolvedTarget, resolve_target
from schedules.templates.base import Refusal, TemplateError
from schedules.templates.gemm_sm90_plan import GemmParameters
from tests.schedules.templates.matmul_cases import MatmulCase

PLAIN = MatmulCase((128,), 96, 64)
LIBRARY = CublasLt()


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def biased() -> tirx.PrimFunc:
    """Return a matmul whose bias has the output's dtype, as a float16 graph has it."""
    a, b = te.placeholder((128, 64), "float16", name="A"), te.placeholder((64, 96), "float16", name="B")
    bias = te.placeholder((96,), "float16", name="bias")
    over = te.reduce_axis((0, 64), name="k")
    total = te.compute(
        (128, 96),
        lambda i, j: te.sum(a[i, over].astype("float32") * b[over, j].astype("float32"), axis=over),
        name="matmul",
    )
    narrow = te.compute((128, 96), lambda i, j: total[i, j].astype("float16"), name="cast")
    added = te.compute((128, 96), lambda i, j: narrow[i, j] + bias[j], name="add")
    return te.create_prim_func([a, b, bias, added], index_dtype_override="int64")


def call_of(func: tirx.PrimFunc, target: ResolvedTarget, algorithm: int = 0) -> str:
    made = LIBRARY.apply(func, target, CublasLtParameters(algorithm))
    assert isinstance(made, tirx.PrimFunc)
    return next(line for line in made.script().splitlines() if "call_extern" in line)


def test_the_function_becomes_one_call_with_its_parameters(target: ResolvedTarget) -> None:
    func = PLAIN.func()
    made = LIBRARY.apply(func, target, CublasLtParameters(3))
    assert isinstance(made, tirx.PrimFunc)
    assert [str(param.name) for param in made.params] == [str(param.name) for param in func.params]
    assert made.attrs[SCHEDULED_ATTR]
    assert [path.name for path in library_sources(list(made.attrs[SOURCES_ATTR]))] == ["cublaslt.c"]
    assert all(path.is_file() for path in library_sources(list(made.attrs[SOURCES_ATTR])))
    assert "T.int64(128), T.int64(96), T.int64(64), 0, 0, 0, 3)" in call_of(func, target, 3)


def test_a_transposed_operand_and_a_wide_output_are_told_to_the_library(target: ResolvedTarget) -> None:
    case = MatmulCase((128,), 96, 64, dtype="bfloat16", output="float32", transposed=True)
    assert "T.int64(64), 1, 1, 2, 0)" in call_of(case.func(), target)


def test_the_residual_and_the_bias_are_added_by_the_library(target: ResolvedTarget) -> None:
    assert "residual.data" in call_of(MatmulCase((128,), 96, 64, ("residual",)).func(), target)
    assert "bias.data" in call_of(biased(), target)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (MatmulCase((128,), 96, 64, ("bias",)), "bias is float32, the output float16"),
        (MatmulCase((128,), 96, 64, ("gelu",)), "does more than add"),
        (MatmulCase((128,), 96, 64, ("row_scale",), output="float32"), "does more than add"),
        (MatmulCase((128,), 96, 64, ("residual", "residual")), "adds two residual terms"),
        (MatmulCase((128,), 96, 64, dtype="float16", output="bfloat16"), "does not make bfloat16 of float16"),
    ],
)
def test_what_the_library_does_not_compute_is_refused(target: ResolvedTarget, case: MatmulCase, reason: str) -> None:
    refused = LIBRARY.candidates(case.func(), target)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


def test_other_targets_are_refused() -> None:
    refused = LIBRARY.candidates(PLAIN.func(), resolve_target("llvm"))
    assert isinstance(refused, Refusal)
    assert "expected cuda" in refused.reason


def test_decisions_survive_a_round_trip(target: ResolvedTarget) -> None:
    offered = LIBRARY.candidates(PLAIN.func(), target)
    assert not isinstance(offered, Refusal)
    assert [LIBRARY.parse(one.to_json()) for one in offered] == list(offered)
    with pytest.raises(TemplateError, match="expected CublasLtParameters"):
        LIBRARY.apply(PLAIN.func(), target, GemmParameters())
