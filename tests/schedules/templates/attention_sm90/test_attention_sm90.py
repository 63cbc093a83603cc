from __future__ import annotations

from dataclasses import replace

import pytest
from tvm import tirx

from relaxtune.schedules.errors import Refusal
from relaxtune.schedules.functions.attention import AttentionSpec, spec_of
from relaxtune.schedules.functions.plain_attention import attention_function
from relaxtune.schedules.marks import INPUT_PARAMS_ATTR, KERNEL_ATTR, OWN_OUTPUTS_ATTR, SCHEDULED_ATTR
from relaxtune.schedules.targets import CudaLimits, ResolvedTarget, resolve_target
from relaxtune.schedules.templates.attention_sm90.plan import AttentionParameters, AttentionPlan, make_plan
from relaxtune.schedules.templates.attention_sm90.template import AttentionSm90
from relaxtune.schedules.templates.base import Parameters, TemplateError
from tests.schedules.attention_cases import AttentionCase

BERT = AttentionCase(1, 12, 128, 128, 64, dtype="float16", packed=True)
LONG = replace(BERT, heads=16, queries=2048, keys=2048, head_dim=128, batch=8)
DECODE = AttentionCase(1, 32, 1, 1024, 64, kv_heads=8, dtype="float16", heads_first=True)
SMALL = AttentionParameters(consumers=1, block_k=64, stages=2)
LIMITS = CudaLimits(227 * 1024, 132)
WAIT = 'T.ptx.griddepcontrol("wait"'


@pytest.fixture(scope="module")
def target() -> ResolvedTarget:
    return resolve_target("cuda:sm_90a")


def function(case: AttentionCase) -> tirx.PrimFunc:
    return attention_function(*case.made())


def candidates(case: AttentionCase, target: ResolvedTarget) -> list[AttentionParameters]:
    found = AttentionSm90().candidates(function(case), target)
    assert not isinstance(found, Refusal), found.reason
    return list(found)


def plan(case: AttentionCase, parameters: AttentionParameters) -> AttentionPlan:
    found = make_plan(case.made()[0], parameters, LIMITS)
    assert isinstance(found, AttentionPlan), found.reason
    return found


def test_kernel_keeps_parameters_and_marks(target: ResolvedTarget) -> None:
    func = function(replace(BERT, bias=("add", "float32", (1, 1, 1, 128))))
    made = AttentionSm90().apply(func, target, SMALL)
    assert isinstance(made, tirx.PrimFunc)
    before, after = (
        [(str(p.name), [int(size) for size in p.ty.shape], str(p.ty.dtype)) for p in f.params] for f in (func, made)
    )
    assert before == after
    assert made.attrs[SCHEDULED_ATTR]
    assert made.attrs[KERNEL_ATTR]
    assert spec_of(made) == spec_of(func)
    assert "s_tir" not in made.attrs


@pytest.mark.parametrize(("bias", "waits"), [(None, 1), (("add", "float16", (1, 1, 1, 128)), 2)])
def test_dependent_launch_waits_before_every_read(
    bias: tuple[str, str, tuple[int, int, int, int]] | None, waits: int, target: ResolvedTarget
) -> None:
    func = function(replace(BERT, bias=bias))
    made = AttentionSm90().apply(func, target, SMALL)
    assert list(made.attrs["tirx.kernel_launch_params"]) == ["tirx.use_programtic_dependent_launch"]
    # The producer waits, and the consumers where they read a mask.
    assert made.script().count(WAIT) == waits
    off = AttentionSm90().apply(func, target, replace(SMALL, dependent=False))
    assert "tirx.kernel_launch_params" not in off.attrs
    assert WAIT not in off.script()


@pytest.mark.parametrize(
    "case",
    [
        BERT,
        LONG,
        DECODE,
        replace(LONG, causal=True, head_dim=64),
        replace(BERT, head_dim=80, bias=("keep", "bool", (1, 1, 128, 128))),
        replace(BERT, head_dim=96, queries=1, keys=1),
        replace(LONG, head_dim=256, window=100),
        replace(DECODE, queries=7, kv_heads=32),
        replace(LONG, head_dim=192, value_dim=128, causal=True),
        replace(DECODE, head_dim=64, value_dim=256),
    ],
)
def test_candidates_fit_and_differ(case: AttentionCase, target: ResolvedTarget) -> None:
    found = candidates(case, target)
    assert len({one.to_json() for one in found}) == len(found) >= 1
    for one in found:
        made = plan(case, one)
        assert made.shared_bytes <= LIMITS.shared_bytes_optin
        assert made.blocks > 0


@pytest.mark.parametrize(
    ("case", "among", "expected"),
    [
        # One block of keys, or two: as many blocks as there are tiles.
        (BERT, 1, {"consumers": 1, "split": 1, "blocks": 0}),
        # One new token: the heads of a group share a tile, its keys are split over a cluster.
        (DECODE, 1, {"consumers": 1, "pack": True, "split": 8}),
        (LONG, 6, {"consumers": 2, "block_k": 128, "blocks": 132, "pingpong": True}),
        (replace(LONG, causal=True), 6, {"consumers": 2, "block_k": 128, "blocks": 132, "pingpong": True}),
        (replace(LONG, heads=32, head_dim=64), 2, {"consumers": 3, "block_k": 128, "blocks": 132, "pingpong": True}),
        (replace(LONG, heads=32, head_dim=64, causal=True), 3, {"consumers": 1, "block_k": 64, "residents": 3}),
        (replace(BERT, batch=8, queries=197, keys=197), 3, {"consumers": 1, "block_k": 80, "residents": 3}),
    ],
)
def test_first_candidates_have_what_won_on_an_h200(
    case: AttentionCase, among: int, expected: dict[str, int], target: ResolvedTarget
) -> None:
    found = candidates(case, target)[:among]
    assert any(all(getattr(one, name) == value for name, value in expected.items()) for one in found), found


def test_parse_reads_a_decision() -> None:
    assert AttentionSm90().parse(SMALL.to_json()) == SMALL


def test_parameters_of_another_template_are_an_error(target: ResolvedTarget) -> None:
    class Other(Parameters):
        template = "other"

    with pytest.raises(TemplateError, match="expected AttentionParameters"):
        AttentionSm90().apply(function(BERT), target, Other())


def changed(case: AttentionCase, **changes: object) -> tirx.PrimFunc:
    """Return a case's function with another specification; nothing but the mark is looked at."""
    spec, params = case.made()
    text = replace(spec, **changes).to_json()  # type: ignore[arg-type]
    return attention_function(spec, params).with_attr("relaxtune.attention", text)


SPEC: AttentionSpec = BERT.made()[0]


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (function(BERT).without_attr("relaxtune.attention"), "not marked as an attention"),
        (function(replace(BERT, dtype="float32")), "expected float16 or bfloat16 for all"),
        (function(replace(BERT, head_dim=20)), "head_dim is 20, expected a multiple of 8 up to 256"),
        (function(replace(BERT, head_dim=264)), "head_dim is 264"),
        (function(replace(BERT, value_dim=20)), "value_dim is 20, expected a multiple of 8 up to 256"),
        (changed(BERT, scale=-1.0), "scale is -1.0, expected a positive one"),
        (changed(BERT, key=replace(SPEC.key, head_stride=60)), "the key's head stride is 60"),
        (changed(BERT, value=replace(SPEC.value, position_stride=0)), "the value's position stride is 0"),
        (changed(BERT, query=replace(SPEC.query, offset=4)), "the query starts at element 4"),
        (function(replace(BERT, bias=("add", "int32", (1, 1, 1, 128)))), "the add mask is int32"),
        (function(replace(BERT, batch=2**12, queries=2**10, keys=2**10)), "2**31 elements or more"),
    ],
)
def test_functions_that_the_template_does_not_make(func: tirx.PrimFunc, message: str, target: ResolvedTarget) -> None:
    for found in (AttentionSm90().candidates(func, target), AttentionSm90().apply(func, target, SMALL)):
        assert isinstance(found, Refusal)
        assert message in found.reason


@pytest.mark.parametrize("text", ["llvm", "cuda:sm_80", "cuda:sm_100a"])
def test_other_targets_are_refused(text: str) -> None:
    found = AttentionSm90().candidates(function(BERT), resolve_target(text))
    assert isinstance(found, Refusal)
    assert "expected cuda sm_90a" in found.reason


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (replace(SMALL, consumers=4), "consumers is 4, expected 1 to 3"),
        (replace(SMALL, block_k=72), "block_k is 72, expected a multiple of 16 up to 256"),
        (replace(SMALL, stages=0), "stages is 0, expected 1 to 8"),
        (replace(SMALL, stages=1), "overlap has 1 stage"),
        (replace(SMALL, split=9), "split is 9, expected 1 to 8"),
        (replace(SMALL, split=3), "split is 3, there are 2 blocks of 64 keys"),
        (replace(SMALL, split=2, blocks=4), "split does not go with a fixed number of blocks"),
        (replace(SMALL, blocks=-1), "blocks is -1"),
        (replace(SMALL, pingpong=True), "pingpong has 1 consumer"),
        (replace(SMALL, residents=5), "residents is 5, expected 1 to 4"),
        (replace(SMALL, consumers=2, residents=2), "residents is 2 with 2 consumers"),
        (replace(SMALL, block_k=256), "registers, 168 exist"),
        (AttentionParameters(consumers=2, block_k=64, stages=8), "bytes of shared memory, the target has 232448"),
    ],
)
def test_plan_says_why_parameters_do_not_fit(parameters: AttentionParameters, message: str) -> None:
    case = BERT if parameters.block_k != 64 or parameters.stages < 8 else LONG
    if parameters.block_k == 256:
        parameters = replace(parameters, residents=2)
    found = make_plan(case.made()[0], parameters, LIMITS)
    assert isinstance(found, Refusal)
    assert message in found.reason


def test_plan_refuses_heads_that_do_not_fill_a_warpgroup() -> None:
    case = replace(DECODE, heads=24, kv_heads=8, queries=64)
    found = make_plan(case.made()[0], AttentionParameters(consumers=2, block_k=64, pack=True), LIMITS)
    assert isinstance(found, Refusal)
    assert "pack puts 3 heads into 2 times 64 rows" in found.reason


def test_plan_counts_the_registers_of_a_mask() -> None:
    case = replace(LONG, heads=32, head_dim=64, bias=("add", "float32", (8, 1, 2048, 2048)))
    p = AttentionParameters(consumers=3)
    assert isinstance(make_plan(replace(case, bias=None).made()[0], p, LIMITS), AttentionPlan)
    found = make_plan(case.made()[0], p, LIMITS, bias_bytes=4)
    assert isinstance(found, Refusal)
    assert "160 exist" in found.reason


def test_plan_packs_the_heads_of_a_group_into_a_tile() -> None:
    made = plan(DECODE, AttentionParameters(consumers=1, block_k=128, stages=1, split=8, pack=True, overlap=False))
    assert (made.group, made.tile_queries, made.tiles, made.heads) == (4, 16, 1, 8)
    # Of 64 rows, 4 are the one query's heads; every other block of the cluster adds up one of them.
    assert (made.used_rows, made.share_rows, made.blocks) == (4, 1, 64)


def test_plan_pairs_causal_tiles_of_persistent_blocks() -> None:
    made = plan(replace(LONG, causal=True), AttentionParameters(blocks=132))
    assert (made.tiles, made.head_items, made.items, made.blocks, made.query_stages) == (16, 8, 1024, 132, 2)
    assert not plan(LONG, AttentionParameters(blocks=132)).paired


def test_sections_are_a_divisor_of_all_heads_whose_keys_fit_the_cache() -> None:
    for batch, heads, keys in ((8, 16, 2048), (3, 5, 8192), (1, 1, 128)):
        made = plan(
            replace(LONG, batch=batch, heads=heads, queries=keys, keys=keys, causal=True), AttentionParameters()
        )
        assert batch * heads % made.section == 0
        assert made.section == 1 or made.section * keys * 128 * 4 <= 16 << 20


def test_plan_sizes_shared_memory_by_both_widths() -> None:
    wide, narrow = replace(LONG, head_dim=192), replace(LONG, head_dim=128)
    p = AttentionParameters(block_k=64)
    # Q, which O takes later, is as wide as the wider; of each key, K and V are 320 wide together.
    made = [plan(replace(LONG, head_dim=d, value_dim=v), p) for d, v in ((192, 128), (128, 192))]
    assert [(one.chunks, one.value_chunks, one.query_chunks) for one in made] == [(3, 2, 3), (2, 3, 3)]
    assert made[0].shared_bytes == made[1].shared_bytes < plan(wide, p).shared_bytes
    assert made[0].shared_bytes > plan(narrow, p).shared_bytes


GROWING = replace(DECODE, keys=1024, past=1023)


def test_candidates_of_caches_that_grow_load_each_key_once(target: ResolvedTarget) -> None:
    for p in candidates(GROWING, target):
        made = plan(GROWING, p)
        assert (p.pack, p.consumers, made.tiles, made.query_stages) == (True, 1, 1, 1)
        assert made.blocks == GROWING.shared * p.split


def test_only_caches_that_no_kernel_writes_are_loaded_before_the_wait(target: ResolvedTarget) -> None:
    growth = GROWING.made()[0].growth
    assert growth is not None
    caches = [growth.past_key.param, growth.past_value.param]

    def loads_before_wait(func: tirx.PrimFunc) -> int:
        made = AttentionSm90().apply(func, target, replace(SMALL, pack=True))
        assert isinstance(made, tirx.PrimFunc)
        text = made.script()
        return text[: text.index(WAIT)].count("T.ptx.cp(")

    assert loads_before_wait(function(GROWING)) == 0
    assert loads_before_wait(function(GROWING).with_attr(INPUT_PARAMS_ATTR, caches[:1])) == 0
    given = function(GROWING).with_attr(INPUT_PARAMS_ATTR, caches)
    assert loads_before_wait(given) == 2
    # And copied where no other kernel uses what is written; each block's copy of keys and of values is a group.
    spec = GROWING.made()[0]
    assert loads_before_wait(given.with_attr(OWN_OUTPUTS_ATTR, [spec.key.param])) == 2
    assert loads_before_wait(given.with_attr(OWN_OUTPUTS_ATTR, [spec.key.param, spec.value.param])) > 2
    assert loads_before_wait(function(GROWING).with_attr(OWN_OUTPUTS_ATTR, [spec.key.param, spec.value.param])) == 0


@pytest.mark.parametrize(
    ("case", "parameters", "reason"),
    [
        (GROWING, SMALL, "one tile for all queries of the heads that share a head"),
        (replace(GROWING, queries=20, past=1004), replace(SMALL, pack=True), "one tile for all queries"),
        (GROWING, replace(SMALL, consumers=2, pack=True), "1 consumer and no window"),
        (replace(GROWING, window=9, causal=True), replace(SMALL, pack=True), "1 consumer and no window"),
        (GROWING, replace(SMALL, pack=True, stages=1, overlap=False), "2 stages or more"),
    ],
)
def test_plan_refuses_what_does_not_load_each_key_of_a_growing_cache_once(
    case: AttentionCase, parameters: AttentionParameters, reason: str
) -> None:
    found = make_plan(case.made()[0], parameters, LIMITS)
    assert isinstance(found, Refusal)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("kind", "dtype", "looked_for"),
    [("add", "float16", True), ("add", "float32", True), ("keep", "bool", False)],
)
def test_kernel_looks_for_zeros_in_a_mask_to_be_added(
    kind: str, dtype: str, looked_for: bool, target: ResolvedTarget
) -> None:
    func = function(replace(BERT, bias=(kind, dtype, (1, 1, 1, 128))))
    made = AttentionSm90().apply(func, target, SMALL)
    assert isinstance(made, tirx.PrimFunc), made
    assert ("relaxtune_any_lane" in made.script()) is looked_for


@pytest.mark.parametrize(
    ("keys", "dtype", "parameters", "twice"),
    [
        (128, "float16", SMALL, True),
        (300, "float32", SMALL, True),
        (2048, "float32", SMALL, True),
        (8192, "float32", SMALL, True),
        (16384, "float32", SMALL, False),
        (131, "float16", SMALL, False),
        (512, "float16", replace(SMALL, split=2), False),
    ],
)
def test_tile_without_padding_has_code_of_its_own(
    keys: int, dtype: str, parameters: AttentionParameters, twice: bool, target: ResolvedTarget
) -> None:
    """One search beside that of the blocks of keys, and exponentials for both."""
    func = function(replace(BERT, queries=keys, keys=keys, bias=("add", dtype, (1, 1, 1, keys))))
    made = AttentionSm90().apply(func, target, parameters)
    assert isinstance(made, tirx.PrimFunc), made
    other = AttentionSm90().apply(function(replace(BERT, queries=keys, keys=keys)), target, parameters)
    assert isinstance(other, tirx.PrimFunc), other
    each = other.script().count("relaxtune_exp2(")
    assert made.script().count("relaxtune_exp2(") == (2 * each if twice else each)
