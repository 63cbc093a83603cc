"""Tables of kernels for a symbolic number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import LAUNCH_ATTR, NAMED_ROWS_ATTR, ROWS_MAX_ATTR
from relaxtune.schedules.registry import TEMPLATES
from relaxtune.schedules.targets import ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import OPEN_ROWS, TemplateError, cuda_limits
from relaxtune.schedules.templates.gemm_sm90.cost import predicted_us
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters, make_plan
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.launch_table import list_kernels
from relaxtune.schedules.templates.ranges import DEFAULT_RANGES, Ranges, RangesParameters, SizeRange, symbolic_rows
from relaxtune.schedules.templates.rows.elementwise import ElementwiseParameters
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.matmul_cases import MatmulCase
from tests.schedules.templates.memory_cases import masked_bias
from tests.schedules.templates.norm_cases import NormCase

BATCH, LENGTH = tirx.Var("batch", "int64"), tirx.Var("length", "int64")
CASE = MatmulCase((BATCH, LENGTH), 768, 768, ("bias", "residual"))
FEW = GemmParameters(64, 64, 3, 1, split_k=4)
MANY = GemmParameters(128, 128, 4, 2, blocks=132, group=8)


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def table(*ranges: tuple[int, GemmParameters]) -> RangesParameters:
    return RangesParameters(tuple(SizeRange(most, one.to_json()) for most, one in ranges))


def test_table_is_json_and_back() -> None:
    parameters = table((64, FEW), (4096, MANY))
    assert RangesParameters.from_json(parameters.to_json()) == parameters
    assert parameters.to_json().startswith('{"ranges":[{"decision":{"block_m":64,')


@pytest.mark.parametrize(
    "ranges", ["[]", "3", '[{"most":4096}]', '[{"most":64,"decision":{}}]', '[{"most":"64","decision":{}}]']
)
def test_table_that_is_none_is_refused(ranges: str) -> None:
    with pytest.raises(TemplateError, match="measure the task again"):
        RangesParameters.from_json(f'{{"template":"ranges","ranges":{ranges}}}')


def test_every_range_has_a_kernel_of_one_function(target: ResolvedTarget) -> None:
    func = CASE.func()
    made = Ranges(TEMPLATES).apply(func, target, table((64, FEW), (4096, MANY)))
    assert isinstance(made, tirx.PrimFunc)
    assert [str(param.name) for param in made.params] == [str(param.name) for param in func.params]
    text = made.script()
    assert text.count("tirx.device_entry") == 2
    assert "T.Select(batch * length <= T.int64(64), 0, 1)" in text
    # Of tensors, whatever counts as a row.
    assert "batch * length * T.int64(768) <= T.int64(2147483647)" in text


def test_a_kernel_that_waits_for_none_makes_all_wait(target: ResolvedTarget) -> None:
    dependent = replace(FEW, dependent=True)
    both = table((64, dependent), (4096, replace(MANY, dependent=True)))
    assert LAUNCH_ATTR in Ranges(TEMPLATES).apply(CASE.func(), target, both).attrs
    made = Ranges(TEMPLATES).apply(CASE.func(), target, table((64, dependent), (4096, MANY)))
    assert LAUNCH_ATTR not in made.attrs
    assert "griddepcontrol" not in made.script()


def test_default_has_fewer_kernels_than_ranges_and_is_for_any_number(target: ResolvedTarget) -> None:
    (default,) = Ranges(TEMPLATES).candidates(CASE.func(), target)
    kernels = len({one.decision for one in default.ranges})
    assert 2 <= kernels < len(DEFAULT_RANGES)
    made = Ranges(TEMPLATES).apply(CASE.func(), target, default)
    assert isinstance(made, tirx.PrimFunc)
    # Few rows may have a kernel of their own of a decision that another range has too.
    assert made.script().count("tirx.device_entry") in (kernels, kernels + 1)


def test_table_of_few_rows_has_few_kernels_and_is_for_more_rows_too(target: ResolvedTarget) -> None:
    every, few = (
        Ranges(TEMPLATES).candidates(func, target)[0].ranges
        for func in (CASE.func(), CASE.func().with_attr(ROWS_MAX_ATTR, 32))
    )
    assert [one.most for one in few] == [16, OPEN_ROWS]
    # The best for up to 32 rows, planned for tiles of all rows.
    assert few[0] == every[0]
    made = Ranges(TEMPLATES).apply(CASE.func().with_attr(ROWS_MAX_ATTR, 32), target, RangesParameters(few))
    assert isinstance(made, tirx.PrimFunc)
    assert ROWS_MAX_ATTR not in made.attrs


@pytest.mark.parametrize("count", [100, 1024, 1568])
def test_named_rows_have_the_kernel_of_a_function_of_so_many(count: int, target: ResolvedTarget) -> None:
    ranges = Ranges(TEMPLATES).candidates(CASE.func().with_attr(NAMED_ROWS_ATTR, [count]), target)[0].ranges
    static = replace(CASE, rows=(count,)).func()
    alone = GemmSm90().candidates(static, target)[0]
    assert next(one for one in ranges if count <= one.most).decision == alone.to_json()


def test_few_named_rows_are_taken_and_none_of_the_first_range(target: ResolvedTarget) -> None:
    default, few, many = (
        Ranges(TEMPLATES).candidates(CASE.func().with_attr(NAMED_ROWS_ATTR, list(counts)), target)[0].ranges
        for counts in ((), (1, 16), (1024, 4096, 100))
    )
    assert few == default
    assert many == Ranges(TEMPLATES).candidates(CASE.func().with_attr(NAMED_ROWS_ATTR, [1024, 4096]), target)[0].ranges


def test_two_kernels_of_a_range_share_its_condition(target: ResolvedTarget) -> None:
    """Functions of symbolic columns have a kernel of vectors, and one for calls whose columns allow none."""
    func = masked_bias(BATCH, 8, LENGTH).func()
    few, many = (ElementwiseParameters(lanes, 1, 256, dependent=True) for lanes in (1, 4))
    made = Ranges(TEMPLATES).apply(
        func, target, RangesParameters((SizeRange(256, few.to_json()), SizeRange(4096, many.to_json())))
    )
    assert isinstance(made, tirx.PrimFunc)
    conditions = [str(condition) for condition, _ in list_kernels(made)]
    assert len(conditions) == 3
    assert "== 0" in conditions[0]
    assert "== 1" in conditions[1]
    assert "% T.int64(4)" in conditions[1]
    assert "% T.int64(4)" not in conditions[0]
    assert conditions[2] == "None"


@pytest.mark.parametrize("named", [(), (32,)], ids=["none named", "the most is named"])
@pytest.mark.parametrize("columns", [2048, 8192])
@pytest.mark.parametrize("size", [1, 32])
def test_last_kernel_of_few_rows_has_memory_for_the_norms_of_more(
    size: int, columns: int, named: tuple[int, ...], target: ResolvedTarget
) -> None:
    """A norm's scales lie in shared memory, a pair for each row of a tile: tiles of more rows ask for more."""
    case = NormCase(MatmulCase((BATCH, LENGTH), columns, 2048), group=16, operand=True, centred=False)
    func = case.func().with_attr(ROWS_MAX_ATTR, size).with_attr(NAMED_ROWS_ATTR, list(named))
    offered = Ranges(TEMPLATES).candidates(func, target)
    assert not isinstance(offered, Refusal)
    assert isinstance(Ranges(TEMPLATES).apply(func, target, offered[0]), tirx.PrimFunc)
    alone = GemmSm90().candidates(replace(case, matmul=replace(case.matmul, rows=(32,))).func(), target)[0]
    assert not named or next(one for one in offered[0].ranges if one.most >= 32).decision == alone.to_json()


def test_ranges_of_one_decision_share_a_kernel_planned_for_the_most_rows(target: ResolvedTarget) -> None:
    ranges = table((16, MANY), (64, FEW), (128, MANY), (256, FEW), (4096, MANY))
    text = Ranges(TEMPLATES).apply(CASE.func(), target, ranges).script()
    # The first range loads boxes of 16 rows.
    assert text.count("tirx.device_entry") == 3
    assert "<= T.int64(16), 0, T.Select(" in text


@pytest.mark.parametrize("parameters", [FEW, MANY, replace(MANY, pingpong=True), replace(MANY, blocks=0, multicast=2)])
def test_kernel_is_predicted_as_one_that_is_planned_for_the_rows(
    parameters: GemmParameters, target: ResolvedTarget
) -> None:
    for rows in (1, 16, 65, 300, 4096, 10_000):
        static = replace(CASE, rows=(rows,)).func()
        matmul = recognise_matmul(static)
        assert not isinstance(matmul, Refusal)
        plan = make_plan(matmul, parameters, cuda_limits(target))
        assert not isinstance(plan, Refusal)
        alone = predicted_us(matmul, plan, cuda_limits(target).likely_sm_count)
        assert GemmSm90().predict_us(CASE.func(), target, parameters, rows) == alone


@pytest.mark.parametrize(
    ("parameters", "factor"),
    [
        (replace(MANY, blocks=0, block_n=192), 1.0),
        (replace(MANY, block_n=192), 1.15),
        (replace(MANY, pingpong=True), 1.05),
        # 128 accumulators leave no registers for residuals.
        (replace(MANY, blocks=0, block_n=256), 1.05),
        (replace(MANY, block_n=256), 1.15 * 1.05),
    ],
)
def test_sums_of_unknown_rows_take_longer_by_blocks_of_several_tiles_and_by_large_tiles(
    parameters: GemmParameters, factor: float, target: ResolvedTarget
) -> None:
    case = NormCase(MatmulCase((BATCH, LENGTH), 768, 3072, ("bias", "residual")), group=32, sums=True)
    static = replace(case, matmul=replace(case.matmul, rows=(16384,))).func()
    matmul = recognise_matmul(static)
    assert not isinstance(matmul, Refusal)
    plan = make_plan(matmul, parameters, cuda_limits(target))
    assert not isinstance(plan, Refusal)
    alone = predicted_us(matmul, plan, cuda_limits(target).likely_sm_count)
    assert GemmSm90().predict_us(case.func(), target, parameters, 16384) == pytest.approx(factor * alone)


def test_a_tile_of_unknown_rows_is_found_once(target: ResolvedTarget) -> None:
    made = Ranges(TEMPLATES).apply(CASE.func(), target, table((4096, MANY)))
    # By the thread that loads (early tiles of B, of A, the loop) and by those that multiply.
    assert made.script().count("T.Div(") <= 4


def test_static_functions_and_shared_sums_are_refused(target: ResolvedTarget) -> None:
    static = replace(CASE, rows=(64,)).func()
    assert symbolic_rows(static) is None
    assert isinstance(Ranges(TEMPLATES).candidates(static, target), Refusal)
    made = Ranges(TEMPLATES).apply(CASE.func(), target, table((4096, replace(MANY, stream_k=True))))
    assert isinstance(made, Refusal)
    assert "of up to 4096 rows: stream_k" in made.reason


def test_rows_are_all_axes_of_the_output_but_the_last() -> None:
    assert str(symbolic_rows(CASE.func())) == "batch * length"


def test_calls_are_limited_by_the_elements_of_tensors_not_by_what_a_row_is(target: ResolvedTarget) -> None:
    """ViT's images: rows are images times patches, and a call of 25 images had been refused."""
    images = replace(CASE, rows=(BATCH, 197)).func()
    text = Ranges(TEMPLATES).apply(images, target, table((4096, MANY))).script()
    assert "batch * T.int64(197) * T.int64(768) <= T.int64(2147483647)" in text
    assert "batch * T.int64(197) <= T.int64(1419" not in text
