from __future__ import annotations

import pytest
from tvm import te, tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.gpu.binding import count_launches, list_unbound_blocks
from relaxtune.schedules.libraries.cublaslt import CublasLt, CublasLtParameters
from relaxtune.schedules.libraries.vendors import CUBLASLT, libraries_of, library_sources
from relaxtune.schedules.marks import SCHEDULED_ATTR, SOURCES_ATTR
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters
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


def made_of(func: tirx.PrimFunc, target: ResolvedTarget, algorithm: int = 0) -> tirx.PrimFunc:
    offered = LIBRARY.candidates(func, target)
    assert not isinstance(offered, Refusal), offered
    made = LIBRARY.apply(func, target, next(one for one in offered if one.algorithm == algorithm))
    assert isinstance(made, tirx.PrimFunc), made
    assert list_unbound_blocks(made) == []
    return made


def call_of(func: tirx.PrimFunc, target: ResolvedTarget, algorithm: int = 0) -> str:
    return next(line for line in made_of(func, target, algorithm).script().splitlines() if "call_extern" in line)


def test_the_function_becomes_one_call_with_its_parameters(target: ResolvedTarget) -> None:
    func = PLAIN.func()
    made = made_of(func, target, 3)
    assert [str(param.name) for param in made.params] == [str(param.name) for param in func.params]
    assert made.attrs[SCHEDULED_ATTR]
    sources = library_sources(list(made.attrs[SOURCES_ATTR]))
    assert [path.name for path in sources] == ["cublaslt.c"]
    assert all(path.is_file() for path in sources)
    assert libraries_of(sources) == (CUBLASLT,)
    assert count_launches(made) == 1
    assert "T.int64(128), T.int64(96), T.int64(64), 0, 0, 0, 0, 3)" in call_of(func, target, 3)


def test_a_transposed_operand_and_a_wide_output_are_told_to_the_library(target: ResolvedTarget) -> None:
    case = MatmulCase((128,), 96, 64, dtype="bfloat16", output="float32", transposed=True)
    assert "T.int64(64), 1, 1, 2, 0, 0)" in call_of(case.func(), target)


def test_the_residual_and_the_bias_are_added_by_the_library(target: ResolvedTarget) -> None:
    assert "residual.data" in call_of(MatmulCase((128,), 96, 64, ("residual",)).func(), target)
    assert "bias.data" in call_of(biased(), target)
    assert count_launches(made_of(biased(), target)) == 1


@pytest.mark.parametrize("epilogue", [("bias",), ("bias", "residual"), ("bias", "gelu_tanh")])
def test_a_bias_in_float32_is_rounded_before_the_call(target: ResolvedTarget, epilogue: tuple[str, ...]) -> None:
    func = MatmulCase((128,), 100, 64, epilogue).func()
    made, call = made_of(func, target), call_of(func, target)
    assert "rounded_bias.data" in call
    assert 'rounded_bias = T.sblock_alloc_buffer((100,), "float16")' in made.script()
    assert count_launches(made) == 2
    assert call.endswith(f"0, 0, 0, {int('gelu_tanh' in epilogue)}, 0)")
    assert ("residual.data" in call) == ("residual" in epilogue)
    offered = LIBRARY.candidates(func, target)
    assert not isinstance(offered, Refusal)
    assert [one.epilogue for one in offered[:4]] == ["library", "kernel"] * 2
    after = LIBRARY.apply(func, target, CublasLtParameters(0, "kernel"))
    assert isinstance(after, tirx.PrimFunc)
    assert "rounded_bias" not in after.script()


@pytest.mark.parametrize(
    "case",
    [
        MatmulCase((2, 64), 96, 64, ("bias", "gelu")),
        MatmulCase((128,), 96, 64, ("bias", "residual"), output="float32"),
        MatmulCase((128,), 96, 64, ("row_scale",)),
        MatmulCase((128,), 96, 64, ("residual", "residual")),
        MatmulCase((128,), 96, 64, ("residual", "gelu_tanh")),
        MatmulCase((128,), 96, 64, ("squared",)),
        MatmulCase((128,), 96, 64, ("gated",)),
        MatmulCase((128,), 96, 64, dtype="float16", output="bfloat16"),
    ],
    ids=lambda case: "-".join((*case.epilogue, case.output)),
)
def test_what_the_library_does_not_compute_is_a_kernel_after_it(target: ResolvedTarget, case: MatmulCase) -> None:
    func = case.func()
    offered = LIBRARY.candidates(func, target)
    assert not isinstance(offered, Refusal)
    assert {one.epilogue for one in offered} == {"kernel"}
    made, call = made_of(func, target), call_of(func, target)
    assert "matmul.data, T.int64(128), T.int64(96), T.int64(64), 0, 0, 2, 0, 0)" in call
    assert count_launches(made) == 2
    assert 'thread="threadIdx.x"' in made.script()
    refused = LIBRARY.apply(func, target, CublasLtParameters())
    assert isinstance(refused, Refusal)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (MatmulCase((128,), 96, 64, dtype="float32", output="float32"), "the operands are float32"),
        (MatmulCase((128,), 96, 64, ("shifted",)), "another position"),
    ],
)
def test_what_is_no_matmul_for_the_library_is_refused(target: ResolvedTarget, case: MatmulCase, reason: str) -> None:
    refused = LIBRARY.candidates(case.func(), target)
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


def test_parameters_that_do_not_fit_the_function_are_refused(target: ResolvedTarget) -> None:
    without = LIBRARY.apply(PLAIN.func(), target, CublasLtParameters(0, "kernel"))
    assert isinstance(without, tirx.PrimFunc), "a plain product in half precision is still rounded"
    refused = LIBRARY.apply(PLAIN.func(), target, CublasLtParameters(0, "nobody"))
    assert isinstance(refused, Refusal)
    assert "expected 'library' or 'kernel'" in refused.reason


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
