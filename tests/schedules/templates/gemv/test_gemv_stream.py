from __future__ import annotations

from dataclasses import replace

import pytest

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.registry import apply_decision
from relaxtune.schedules.targets import resolve_target
from relaxtune.schedules.templates.base import TemplateError
from relaxtune.schedules.templates.gemv.plan import (
    LOAD_BYTES,
    SHARED_MAX,
    GemvParameters,
    GemvStreamParameters,
    GemvStreamPlan,
    make_stream_plan,
)
from relaxtune.schedules.templates.gemv.template import GemvStream
from relaxtune.schedules.templates.matmul_by_rows import recognise_matmul_by_rows
from relaxtune.schedules.tir.epilogue import MatmulFunction
from tests.schedules.templates.gemv_cases import CASES, GemvCase

HOPPER = resolve_target("cuda:sm_90a")
LARGE = GemvCase(n=8192, k=2048, bits=4)


def plan_of(case: GemvCase, parameters: GemvStreamParameters) -> GemvStreamPlan | Refusal:
    function = recognise_matmul_by_rows(case.func())
    assert isinstance(function, MatmulFunction)
    return make_stream_plan(function, parameters, HOPPER.limits)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.bits < 16 and case.k > 256])
def test_every_candidate_makes_a_kernel_with_the_same_parameters(name: str) -> None:
    func = CASES[name].func()
    found = GemvStream().candidates(func, HOPPER)
    assert not isinstance(found, Refusal), found.reason
    assert all(one.dependent for one in found)
    for parameters in (found[0], found[-1]):
        made = apply_decision(func, HOPPER, parameters.to_json())
        assert [str(p.name) for p in made.params] == [str(p.name) for p in func.params]
        assert made.attrs["tirx.is_scheduled"]


def test_two_kernels_fit_into_a_multiprocessor_and_enough_is_on_its_way() -> None:
    found = GemvStream().candidates(LARGE.func(), HOPPER)
    assert not isinstance(found, Refusal)
    for parameters in found:
        plan = plan_of(LARGE, parameters)
        assert isinstance(plan, GemvStreamPlan)
        assert plan.shared_bytes <= SHARED_MAX or parameters.collected
        # A step of 128 weights is within a group.
        assert plan.grouped
    # What a latency of 1 us takes at 4 TB/s.
    first = plan_of(LARGE, found[0])
    assert isinstance(first, GemvStreamPlan)
    p = first.parameters
    steps = min(p.depth, first.turns * first.rounds)
    assert steps * first.threads * p.tiles * 2 * LOAD_BYTES * p.blocks >= 4e6


def test_blocks_share_all_tiles_of_the_matrix() -> None:
    plan = plan_of(LARGE, GemvStreamParameters(tiles=1, warps=8, depth=8, blocks=132))
    assert isinstance(plan, GemvStreamPlan)
    assert (plan.row_tiles, plan.rounds, plan.buffers, plan.turns) == (512, 4, 2, 2)
    one = plan_of(LARGE, GemvStreamParameters(tiles=2, warps=8, depth=2, blocks=256))
    assert isinstance(one, GemvStreamPlan)
    assert (one.row_tiles, one.rounds, one.buffers) == (256, 1, 1)


def test_collected_sums_of_all_tiles_have_a_place_and_the_block_all_shared_memory() -> None:
    plan = plan_of(LARGE, GemvStreamParameters(warps=16, depth=8, blocks=132, early=2, collected=True))
    assert isinstance(plan, GemvStreamPlan)
    assert (plan.rounds, plan.buffers, plan.collected) == (4, 4, True)
    assert plan.shared_bytes > SHARED_MAX
    # One tile a block is never collected.
    one = plan_of(LARGE, GemvStreamParameters(blocks=512, collected=True))
    assert isinstance(one, GemvStreamPlan)
    assert (one.buffers, one.collected) == (1, False)


def test_what_was_fastest_with_early_steps_or_collected_sums_is_proposed_but_not_first() -> None:
    found = GemvStream().candidates(LARGE.func(), HOPPER)
    assert not isinstance(found, Refusal)
    assert (found[0].early, found[0].collected) == (0, False)
    assert [one.collected for one in found[1:3]] == [True, True]


@pytest.mark.parametrize(
    ("rows", "n", "k", "first"),
    [
        # Two tiles a warp: half as many blocks read x.
        (16, 2048, 2048, (2, 16, 2, 4)),
        (16, 2048, 8192, (2, 16, 3, 4)),
        (1, 2048, 2048, (2, 16, 2, 4)),
        # Of one row and a long K, x is little.
        (1, 2048, 8192, (1, 16, 6, 0)),
        # Half the blocks would leave most multiprocessors idle.
        (16, 768, 768, (1, 16, 3, 0)),
    ],
)
def test_16_bit_weights_begin_with_what_was_fastest_at_their_sizes(
    rows: int, n: int, k: int, first: tuple[int, ...]
) -> None:
    found = GemvStream().candidates(GemvCase(rows=(rows,), n=n, k=k).func(), resolve_target("cuda:sm_80@H200"))
    assert not isinstance(found, Refusal)
    assert (found[0].tiles, found[0].warps, found[0].depth, found[0].held) == first


def test_decisions_from_before_early_and_collected_are_the_same_kernels() -> None:
    old = '{"blocks":132,"dependent":true,"depth":2,"template":"gemv_stream","tiles":1,"warps":16}'
    assert GemvStream().parse(old) == GemvStreamParameters(1, 16, 2, 132, True)
    assert GemvStream().parse(old).to_json() == old


@pytest.mark.parametrize(
    ("case", "warps", "levels"),
    [
        (GemvCase(n=8192, k=4096, bits=4), 16, True),
        # Registers: x takes 64 of 128.
        (GemvCase(n=8192, k=8192, bits=4), 16, False),
        (GemvCase(n=8192, k=8192, bits=4), 8, True),
        # A step of 128 weights has four scales.
        (GemvCase(n=8192, k=4096, bits=4, group=32), 16, False),
        (GemvCase(n=8192, k=4096, bits=8), 16, False),
    ],
)
def test_levels_are_multiplied_where_sums_are_scaled_and_registers_suffice(
    case: GemvCase, warps: int, levels: bool
) -> None:
    plan = plan_of(case, GemvStreamParameters(tiles=1, warps=warps, depth=2, blocks=132))
    assert isinstance(plan, GemvStreamPlan)
    assert plan.levels == levels


@pytest.mark.parametrize(
    ("case", "parameters", "reason"),
    [
        (GemvCase(), GemvStreamParameters(blocks=32, split=3), "split is 3, of 16-bit weights expected a divisor"),
        (LARGE, GemvStreamParameters(blocks=128, split=2), "split is 2, of 16-bit weights expected a divisor"),
        (GemvCase(), GemvStreamParameters(blocks=8, split=2), "expected sums of all tiles to be collected"),
        (GemvCase(), GemvStreamParameters(blocks=33), "blocks is 33, expected 32 at most"),
        (LARGE, GemvStreamParameters(depth=3, early=4), "no more early steps than the depth"),
        (LARGE, GemvStreamParameters(tiles=0), "expected 1 or more"),
        (LARGE, GemvStreamParameters(warps=64), "64 warps"),
        (GemvCase(n=1001, bits=4), GemvStreamParameters(), "N is 1001, expected a multiple of 8"),
        (GemvCase(k=8192, bits=8), GemvStreamParameters(warps=2), "64 steps of a warp along K"),
        (GemvCase(rows=(16,), k=8192, bits=8), GemvStreamParameters(warps=16), "registers"),
        (LARGE, GemvStreamParameters(tiles=2, warps=16, depth=16), "shared memory"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(case: GemvCase, parameters: GemvStreamParameters, reason: str) -> None:
    found = plan_of(case, parameters)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_what_it_cannot_make_is_refused_with_the_reason() -> None:
    for case, reason in (
        (GemvCase(rows=(17,)), "17 rows, expected 16 at most"),
        (GemvCase(k=784, bits=4), "K is 784, expected a multiple of 32"),
        (GemvCase(k=256, bits=4), "K is 256, too short for 4 warps to share"),
    ):
        found = GemvStream().candidates(case.func(), HOPPER)
        assert isinstance(found, Refusal)
        assert reason in found.reason


def test_parameters_of_another_template_or_target_are_an_error() -> None:
    func = LARGE.func()
    with pytest.raises(TemplateError, match="expected GemvStreamParameters"):
        GemvStream().apply(func, HOPPER, GemvParameters())
    ampere = resolve_target("cuda:sm_80")
    refused = GemvStream().apply(func, ampere, replace(GemvStreamParameters(), dependent=True))
    assert isinstance(refused, Refusal)
    found = GemvStream().candidates(func, ampere)
    assert not isinstance(found, Refusal)
    assert not any(one.dependent for one in found)
