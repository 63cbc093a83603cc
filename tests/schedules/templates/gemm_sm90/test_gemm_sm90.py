from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import special
from tvm import tirx
from tvm.sym import Analyzer

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.marks import CONSTANT_PARAMS_ATTR, KERNEL_ATTR, SCHEDULED_ATTR
from relaxtune.schedules.targets import CudaLimits, ResolvedTarget, resolve_target
from relaxtune.schedules.templates.base import Parameters, TemplateError
from relaxtune.schedules.templates.emit import fast_math
from relaxtune.schedules.templates.gemm_sm90.plan import GemmParameters, GemmPlan, make_plan
from relaxtune.schedules.templates.gemm_sm90.template import GemmSm90
from relaxtune.schedules.templates.gemm_sm90.tiles import GridSizes, Tiles
from relaxtune.schedules.tir.epilogue import MatmulFunction
from relaxtune.schedules.tir.matmul import recognise_matmul
from tests.schedules.templates.matmul_cases import MatmulCase

CASE = MatmulCase((128,), 768, 768, ("bias", "residual"))
SMALL = GemmParameters(64, 64, 4, 1)
ZERO = tirx.IntImm("int32", 0)
WAIT = 'T.ptx.griddepcontrol("wait"'
LOAD = '"relaxtune_load_4"'


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def matmul(case: MatmulCase) -> MatmulFunction:
    found = recognise_matmul(case.func())
    assert isinstance(found, MatmulFunction)
    return found


def plan(case: MatmulCase, parameters: GemmParameters, *, constant_b: bool = False) -> GemmPlan | Refusal:
    return make_plan(matmul(case), parameters, CudaLimits(227 * 1024, 132), constant_b=constant_b)


def test_kernel_keeps_parameters_and_is_marked(target: ResolvedTarget) -> None:
    func = replace(CASE, rows=(2, 64)).func()
    made = GemmSm90().apply(func, target, SMALL)
    assert isinstance(made, tirx.PrimFunc)
    before, after = (
        [(str(p.name), [int(size) for size in p.ty.shape], str(p.ty.dtype)) for p in f.params] for f in (func, made)
    )
    assert before == after
    assert made.attrs[SCHEDULED_ATTR]
    assert made.attrs[KERNEL_ATTR]
    assert made.attrs["tirx.noalias"]
    assert "s_tir" not in made.attrs


def test_dependent_launch_is_an_attribute_of_the_kernel(target: ResolvedTarget) -> None:
    made = GemmSm90().apply(CASE.func(), target, replace(SMALL, dependent=True))
    assert list(made.attrs["tirx.kernel_launch_params"]) == ["tirx.use_programtic_dependent_launch"]
    # The producer and the consumers wait for the kernel before.
    assert made.script().count(WAIT) == 2


def test_only_a_constant_b_is_loaded_before_the_wait(target: ResolvedTarget) -> None:
    parameters = replace(SMALL, dependent=True)

    def loads_before_wait(func: tirx.PrimFunc) -> int:
        text = GemmSm90().apply(func, target, parameters).script()
        return text[: text.index(WAIT)].count("T.ptx.cp(")

    assert loads_before_wait(CASE.func()) == 0
    assert loads_before_wait(CASE.func().with_attr(CONSTANT_PARAMS_ATTR, [1])) == SMALL.stages


@pytest.mark.parametrize(
    ("constants", "parameters", "copies"),
    [([1, 2], SMALL, 1), ([1], SMALL, 0), ([1, 2], replace(SMALL, blocks=8), 0)],
    ids=["a bias", "an activation", "several tiles a block"],
)
def test_only_constant_columns_of_the_only_tile_are_copied_before_the_wait(
    constants: list[int], parameters: GemmParameters, copies: int, target: ResolvedTarget
) -> None:
    func = replace(CASE, epilogue=("bias", "row_scale")).func().with_attr(CONSTANT_PARAMS_ATTR, constants)
    producer, consumers, rest = GemmSm90().apply(func, target, replace(parameters, dependent=True)).script().split(WAIT)
    assert LOAD not in producer
    assert consumers.count(LOAD) == copies
    # In volatile statements, which the compiler leaves behind the wait: the bias, and a number for each of two rows.
    assert rest.count(LOAD) == 1 - copies + 2


@pytest.mark.parametrize(("stages", "blocks", "waits"), [(12, 0, 1), (11, 0, 2), (12, 8, 2)])
def test_multiplications_are_waited_for_at_the_end_where_no_stage_is_loaded_again(
    stages: int, blocks: int, waits: int, target: ResolvedTarget
) -> None:
    text = GemmSm90().apply(CASE.func(), target, replace(SMALL, stages=stages, blocks=blocks)).script()
    assert text.count('"wait_group"') == waits


def test_candidates_fit_and_differ(target: ResolvedTarget) -> None:
    for rows in ((1,), (128,), (32, 128)):
        case = replace(CASE, rows=rows)
        found = GemmSm90().candidates(case.func(), target)
        assert not isinstance(found, Refusal)
        assert len({one.to_json() for one in found}) == len(found) >= 8
        assert all(isinstance(plan(case, one), GemmPlan) for one in found)


def test_candidates_split_a_long_sum_of_few_tiles(target: ResolvedTarget) -> None:
    found = GemmSm90().candidates(MatmulCase((128,), 768, 3072).func(), target)
    assert any(one.split_k > 1 for one in found[:4])


@pytest.mark.parametrize(
    ("case", "tile"),
    [
        (MatmulCase((1,), 2304, 768, ("bias",)), (64, 64, 2, False)),
        (MatmulCase((16,), 2048, 2048, ("residual",)), (64, 128, 4, False)),
        (MatmulCase((16,), 50257, 768, transposed=True), (64, 128, 1, False)),
        (MatmulCase((128,), 2304, 768, ("bias",)), (64, 64, 1, False)),
        (MatmulCase((128,), 768, 768, ("bias", "residual")), (64, 32, 2, False)),
        (MatmulCase((128,), 3072, 768, ("bias", "gelu")), (64, 96, 1, False)),
        (MatmulCase((128,), 768, 3072, ("bias", "residual")), (64, 64, 4, False)),
        (MatmulCase((512,), 3072, 768, ("bias", "gelu")), (64, 192, 1, False)),
        (MatmulCase((4096,), 2304, 768, ("bias",)), (128, 192, 1, True)),
        (MatmulCase((4096,), 768, 768, ("bias", "residual")), (128, 192, 1, False)),
        (MatmulCase((4096,), 3072, 768, ("bias", "gelu")), (128, 192, 1, True)),
        (MatmulCase((4096,), 4096, 4096), (128, 256, 1, False)),
        (MatmulCase((1024,), 2304, 768, ("bias",)), (64, 192, 1, True)),
        (MatmulCase((1024,), 768, 3072, ("bias", "residual")), (128, 64, 1, False)),
        (MatmulCase((4096,), 50257, 768, transposed=True), (128, 192, 1, True)),
    ],
)
def test_candidates_have_what_won_on_an_h200(case: MatmulCase, tile: tuple, target: ResolvedTarget) -> None:
    """Among the first few: the first one is what an untuned compilation gets."""
    found = GemmSm90().candidates(case.func(), target)
    assert not isinstance(found, Refusal)
    assert tile in [(one.block_m, one.block_n, one.split_k, one.pingpong) for one in found[:6]]


@pytest.mark.parametrize(
    ("case", "first", "among"),
    [
        # On an H200, 88 us with stream-K and 94 without.
        (MatmulCase((1576,), 4096, 4096), True, True),
        # 49 and 45 us, of 112 tiles and 160.
        (MatmulCase((2048,), 1280, 5120, ("bias", "residual")), False, True),
        # 12 and 8 us: fewer tiles than multiprocessors, which clusters share faster.
        (MatmulCase((512,), 768, 3072, ("bias", "residual")), False, False),
    ],
)
def test_stream_k_is_proposed_where_the_last_tiles_leave_multiprocessors_idle(
    case: MatmulCase, first: bool, among: bool, target: ResolvedTarget
) -> None:
    found = GemmSm90().candidates(case.func(), target)
    assert not isinstance(found, Refusal)
    assert found[0].stream_k == first
    assert any(one.stream_k for one in found) == among


def test_parse_reads_a_decision() -> None:
    assert GemmSm90().parse(SMALL.to_json()) == SMALL


def test_parameters_of_another_template_are_an_error(target: ResolvedTarget) -> None:
    class Other(Parameters):
        template = "other"

    with pytest.raises(TemplateError, match="expected GemmParameters"):
        GemmSm90().apply(CASE.func(), target, Other())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(CASE, k=772), "K is 772, expected a multiple of 8"),
        (replace(CASE, n=762), "N is 762, expected a multiple of 8"),
        (replace(CASE, k=772, transposed=True), "K is 772, expected a multiple of 8"),
        (replace(CASE, dtype="float32"), "the operands are float32, expected one of float16, bfloat16"),
        (replace(CASE, output="float64"), "the output is float64"),
        (replace(CASE, rows=(2**22,)), "2**31 elements or more"),
        (replace(CASE, epilogue=("shifted",)), "at another position"),
    ],
)
def test_candidates_say_why_there_are_none(case: MatmulCase, message: str, target: ResolvedTarget) -> None:
    for found in (GemmSm90().candidates(case.func(), target), GemmSm90().apply(case.func(), target, SMALL)):
        assert isinstance(found, Refusal)
        assert message in found.reason


@pytest.mark.parametrize("text", ["llvm", "cuda:sm_80", "cuda:sm_100a"])
def test_other_targets_are_refused(text: str) -> None:
    found = GemmSm90().candidates(CASE.func(), resolve_target(text))
    assert isinstance(found, Refusal)
    assert "expected cuda sm_90a" in found.reason


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (replace(SMALL, block_m=96), "block_m is 96, expected a multiple of 64"),
        (replace(SMALL, block_m=320), "block_m is 320, expected a multiple of 64 up to 256"),
        (replace(SMALL, consumers=2), "block_m is 64, expected a multiple of 128"),
        (replace(SMALL, consumers=3), "consumers is 3, expected 1 or 2"),
        (replace(SMALL, block_n=40), "block_n is 40, expected a multiple of 16"),
        (replace(SMALL, stages=1), "stages is 1, expected 2 to 24"),
        (replace(SMALL, blocks=-1), "blocks is -1"),
        (replace(SMALL, split_k=9), "split_k is 9, expected 1 to 8"),
        (replace(SMALL, split_k=2, blocks=4), "split_k does not go with"),
        (replace(SMALL, split_k=5), "a block would have none"),
        (replace(SMALL, pingpong=True), "pingpong has 1 consumers, expected 2"),
        (replace(SMALL, multicast=3), "multicast is 3, expected 1, 2 or 4"),
        (replace(SMALL, multicast=2, split_k=2), "multicast does not go with split_k"),
        (replace(SMALL, multicast=4, block_n=48), "parts of 48 columns"),
        (replace(SMALL, group=0), "group is 0, expected 1 or more"),
        (replace(SMALL, stream_k=True), "stream_k has no number of blocks"),
        (replace(SMALL, blocks=9, multicast=2, stream_k=True), "stream_k does not go with pingpong, split_k or"),
        (GemmParameters(256, 256, 2, 2), "256 accumulators a thread"),
        (GemmParameters(128, 256, 5, 2), "bytes of shared memory, the target has 232448"),
    ],
)
def test_plan_says_why_parameters_do_not_fit(parameters: GemmParameters, message: str) -> None:
    case = replace(CASE, k=256) if parameters.split_k == 5 else CASE
    if parameters.split_k == 5:
        parameters = replace(parameters, split_k=3)
    found = plan(case, parameters)
    assert isinstance(found, Refusal)
    assert message in found.reason


def test_plan_shares_columns_among_the_blocks_of_a_cluster() -> None:
    found = plan(MatmulCase((128,), 768, 3072), GemmParameters(64, 64, 4, 1, 0, 3))
    assert isinstance(found, GemmPlan)
    assert (found.k_tiles, found.k_share, found.shares.columns) == (48, 16, 24)
    assert (found.tiles, found.blocks) == (24, 24)


@pytest.mark.parametrize(("group", "multicast"), [(1, 1), (3, 1), (8, 1), (1, 2), (2, 2), (16, 4)])
def test_every_tile_is_made_once_and_a_group_of_rows_column_by_column(group: int, multicast: int) -> None:
    case = MatmulCase((700,), 320, 128)
    found = plan(case, replace(SMALL, group=group, multicast=multicast))
    assert isinstance(found, GemmPlan)
    places = []
    for tile in range(found.tiles):
        for rank in range(multicast):
            place = Tiles(found, GridSizes.of(found, 700), ZERO, tirx.IntImm("int32", rank)).place(
                tirx.IntImm("int32", tile)
            )
            places.append(tuple(int(Analyzer().simplify(tirx.convert(index))) for index in place))
    rows = multicast * found.tiles_m
    assert sorted(places) == [(row, column) for row in range(rows) for column in range(5)]
    assert rows >= 11
    first = places[: multicast * min(group, found.tiles_m)]
    assert first == [(row, 0) for row in range(len(first))]


def test_plan_loads_only_rows_of_a_that_exist() -> None:
    one = plan(replace(CASE, rows=(1,)), SMALL)
    assert isinstance(one, GemmPlan)
    assert (one.rows_a, one.stage_bytes) == (8, (8 + 64) * 64 * 2)
    assert plan(replace(CASE, rows=(17,)), SMALL).rows_a == 24
    assert plan(replace(CASE, rows=(65,)), SMALL).rows_a == 64
    # What the instructions read beyond the last stage must be shared memory of the ring.
    assert plan(replace(CASE, rows=(1,)), GemmParameters(128, 16, 2, 2)).rows_a == 128


def test_rows_of_b_need_alignment_only_as_they_lie_in_memory(target: ResolvedTarget) -> None:
    """A vocabulary of 50257 words: weights as [N, K] are taken, as [K, N] refused."""
    case = MatmulCase((16,), 50257, 768, transposed=True)
    assert not isinstance(GemmSm90().candidates(case.func(), target), Refusal)
    refused = GemmSm90().candidates(replace(case, transposed=False).func(), target)
    assert isinstance(refused, Refusal)
    assert "N is 50257" in refused.reason


def test_plan_prefetches_residuals_while_registers_last() -> None:
    assert plan(CASE, GemmParameters(128, 192, 4, 2)).shares.prefetched
    assert not plan(CASE, GemmParameters(128, 192, 3, 2, pingpong=True)).shares.prefetched


def test_erf_is_within_its_stated_error() -> None:
    """The coefficients of the CUDA source, evaluated in float32 steps."""
    coefficients = [np.float32(text) for text in re.findall(r"-?\d\.\d{3,}", fast_math._ERF_SOURCE)]
    head, *rest = coefficients
    assert len(coefficients) == 5
    x = np.linspace(-8, 8, 200_001, dtype=np.float32)
    t = np.abs(x)
    q = np.full_like(t, head)
    for coefficient in rest:
        q = q * t + coefficient
    found = np.copysign(np.float32(1) - np.exp2(-t * q), x)
    assert np.abs(found - special.erf(x.astype(np.float64))).max() < 8e-7
